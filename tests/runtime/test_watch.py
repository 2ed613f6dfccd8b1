"""Waiting as long as somebody moves, with positions and messages by a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from autopar.errors import TransportError
from autopar.runtime.board import Board, Positions
from autopar.runtime.faults import DIED
from autopar.runtime.transport.base import ArraySpec, Request, Transport
from autopar.runtime.transport.in_process import InProcessHub
from autopar.runtime.watch import Watch
from tests.runtime.lists import four
from tests.runtime.thread_workers import ThreadProcesses

PATIENCE = 30.0
Places = tuple[tuple[int, int] | None, ...]


class Here:
    def __init__(self, places: Places) -> None:
        self._places = places

    def where(self, rank: int) -> tuple[int, int] | None:
        return self._places[rank]


class Script(ThreadProcesses):
    """Processes that never start: each look finds the next places; then something happens."""

    def __init__(self, looks: Sequence[Places], then: Callable[[], object]) -> None:
        super().__init__()
        self.left = list(looks)
        self._then = then

    def positions(self, board: Board) -> Positions:
        """The next ones; the last ones stay."""
        here = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        if len(self.left) == 1:
            self._then()
        return Here(here)

    def last_words(self, timeout: float) -> dict[int, str]:
        """Those that a test has put there."""
        assert timeout == 0.0, "who only looks must not wait"
        return self.words


@pytest.fixture(autouse=True)
def _short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.runtime.watch.POLL_SECONDS", 0.001)


@pytest.fixture
def ends() -> Iterator[list[Transport]]:
    """The driver's transport and a worker's."""
    hub = InProcessHub()
    made: list[Transport] = [hub.transport(rank) for rank in (-1, 0)]
    made[0].connect({0: made[1].address}, timeout=PATIENCE)
    yield made
    for transport in made:
        transport.close()


def expected(ends: list[Transport]) -> Request:
    return ends[0].irecv(0, 0, ArraySpec((4,), "float32"))


def watch(script: Script, tmp_path: Path, hang_seconds: float) -> Watch:
    return Watch(script, Board(tmp_path, 2), range(2), hang_seconds)


@pytest.mark.parametrize("workers", [[0], [1], [0, 1]])
def test_who_is_slow_but_moves_does_not_hang(
    ends: list[Transport], tmp_path: Path, workers: list[int]
) -> None:
    """With no patience at all for who stands still; one that moves is enough."""
    looks: list[Places] = [
        tuple((2, look if rank in workers else 0) for rank in range(2)) for look in range(6)
    ]
    script = Script(looks, lambda: ends[1].isend(-1, 0, four(3)))
    request = expected(ends)
    watch(script, tmp_path, 0.0).wait(ends[0], [request])
    assert request.result().tolist() == four(3).tolist()
    assert len(script.left) == 1


@pytest.mark.parametrize("place", [(2, 7), (-1, -1), None])
def test_when_nobody_moves_for_long_somebody_hangs(
    ends: list[Transport], tmp_path: Path, place: tuple[int, int] | None
) -> None:
    script = Script([(place, place)], lambda: None)
    with pytest.raises(TransportError, match=r"no worker has moved for 0\.003 s"):
        watch(script, tmp_path, 0.003).wait(ends[0], [expected(ends)])


def test_who_stands_still_has_some_time(ends: list[Transport], tmp_path: Path) -> None:
    looks: list[Places] = [((0, 0), (0, 0))] * 6
    script = Script(looks, lambda: ends[1].isend(-1, 0, four(0)))
    watch(script, tmp_path, PATIENCE).wait(ends[0], [expected(ends)])


def test_a_worker_that_has_ended_is_not_waited_for(ends: list[Transport], tmp_path: Path) -> None:
    script = Script([((0, 0), (0, 0))], lambda: None)
    script.words = {1: f"{DIED} signal 9"}
    with pytest.raises(TransportError, match="rank -1 waited"):
        watch(script, tmp_path, PATIENCE).wait(ends[0], [expected(ends)])


def test_a_transfer_that_failed_is_not_waited_for(ends: list[Transport], tmp_path: Path) -> None:
    script = Script([((0, 0), (0, 0))], ends[1].close)
    first, second = expected(ends), expected(ends)
    with pytest.raises(TransportError, match="rank -1 lost rank 0"):
        watch(script, tmp_path, PATIENCE).wait(ends[0], [first, second])


def test_what_is_there_needs_no_look(ends: list[Transport], tmp_path: Path) -> None:
    ends[1].isend(-1, 0, four(0))
    script = Script([], lambda: None)
    watch(script, tmp_path, 0.0).wait(ends[0], [expected(ends)])
    watch(script, tmp_path, 0.0).wait(ends[0], [])


def test_positions_are_those_of_all_workers(tmp_path: Path) -> None:
    looks: list[Places] = [((1, 2), None), ((3, 4), (5, 6))]
    found = watch(Script(looks, lambda: None), tmp_path, 0.0)
    assert found.positions() == [(1, 2), None]
    assert found.positions() == [(3, 4), (5, 6)]
