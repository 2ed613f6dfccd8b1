"""Who is named after a fault: the one that died, else that failed, else that hangs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import TransportError, WorkerError
from autopar.runtime.board import Board, BoardRow
from autopar.runtime.faults import DIED, diagnose
from autopar.runtime.peer import Peer, peer_of
from autopar.runtime.remote_worker import error_text
from tests.runtime.lists import worker_program

SEEN = TransportError("the driver lost somebody")
FOLLOWED = {"text": "rank 0 lost rank 1", "aborted": True}
FAILED = {"text": "worker 1 (stage 1) failed\n  got: no memory", "aborted": False}
KILLED = {DIED: True, "text": "signal 9", "aborted": False}

POSTS, RUNS, PAST_THE_END = 0, 1, 9


class Places:
    """Positions by rank; None where they are unknown."""

    def __init__(self, *places: tuple[int, int] | None) -> None:
        self._places = places

    def where(self, rank: int) -> tuple[int, int] | None:
        return self._places[rank]


def peers(*senders: int) -> list[Peer]:
    """Three workers, each of which is sent its `x` by one of `senders`."""
    text = "RECV x from {} by 0 tag 5\nRUN F x -> y\nFREE x\nFREE y"
    return [
        peer_of(worker_program(text.format(sender), rank=rank))
        for rank, sender in enumerate(senders or (9, 9, 9))
    ]


def named(
    told: Mapping[int, Mapping[str, Any]],
    *places: tuple[int, int] | None,
    step: int = 4,
    senders: tuple[int, ...] = (),
) -> WorkerError:
    here = Places(*(places or [(4, RUNS)] * 3))
    return diagnose(peers(*senders), here, told, SEEN, step=step)


@pytest.mark.parametrize(
    ("told", "what"),
    [
        ({0: FOLLOWED, 1: FOLLOWED, 2: KILLED}, "worker 2 (stage 2) died"),
        ({0: FAILED, 1: KILLED, 2: FAILED}, "worker 1 (stage 1) died"),
        ({0: FAILED, 1: FOLLOWED}, "worker 0 (stage 0) failed"),
        ({0: FOLLOWED, 1: FAILED}, "worker 1 (stage 1) failed"),
        ({0: FOLLOWED, 2: FOLLOWED}, "worker 1 (stage 1) hangs"),
        ({0: {}, 2: FOLLOWED}, "worker 1 (stage 1) hangs"),
        ({0: {}, 1: FOLLOWED, 2: FAILED}, "worker 2 (stage 2) failed"),
        ({}, "worker 0 (stage 0) hangs"),
        # All have ended and none began it: what the driver saw is all there is.
        ({0: FOLLOWED, 1: FOLLOWED, 2: {}}, "worker 0 (stage 0) failed"),
    ],
)
def test_one_is_named_by_what_all_have_said(told: Any, what: str) -> None:
    assert named(told).what == f"{what} in step 4 at instruction 1: RUN F x -> y"


def test_what_it_said_is_told() -> None:
    assert named({1: FAILED}).got == FAILED["text"]
    assert named({1: KILLED}).got == "signal 9"
    for told in ({0: FOLLOWED, 2: FOLLOWED}, dict.fromkeys(range(3), FOLLOWED)):
        assert named(told).got == "the driver lost somebody"


def test_one_that_waits_for_another_is_not_the_one_that_hangs() -> None:
    """A RECV only posts: who waits is at the instruction that first reads what was sent."""
    assert "worker 1 (stage 1) hangs" in named({}, senders=(1, 9, 1)).what
    assert "worker 2 (stage 2) hangs" in named({0: FOLLOWED}, senders=(1, 2, 9)).what
    # Worker 0 has told its last words, so nobody waits for it any more.
    assert "worker 1 (stage 1) hangs" in named({0: FOLLOWED}, senders=(9, 0, 1)).what
    # Whoever is past the first use, or has only posted, waits for nobody.
    for past in ((4, RUNS + 1), (4, POSTS)):
        places = (past, (4, RUNS), (4, RUNS))
        assert "worker 0 (stage 0) hangs" in named({}, *places, senders=(1, 2, 0)).what
    # They cannot all wait, but if they do somebody is named.
    assert "worker 0 (stage 0) hangs" in named({}, senders=(1, 2, 0)).what


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ((4, RUNS), "in step 4 at instruction 1: RUN F x -> y"),
        ((3, RUNS), "in step 4 before its first instruction"),
        ((-1, -1), "in step 4 before its first instruction"),
        ((4, PAST_THE_END), "in step 4 at instruction 9: "),
        (None, "in step 4 at an unknown instruction"),
    ],
)
def test_where_it_was(place: tuple[int, int] | None, text: str) -> None:
    assert named({0: KILLED}, place, (4, 0), (4, 0)).what == f"worker 0 (stage 0) died {text}"


def test_the_others_are_told_with_their_places() -> None:
    error = named({1: FOLLOWED, 2: KILLED}, (4, POSTS), (4, -1), (4, RUNS))
    assert error.why == (
        "the others: worker 0 in step 4 at instruction 0 `RECV x from 9 by 0 tag 5`, "
        "still running; worker 1 in step 4 at instruction -1 `between steps`"
    )
    unknown = named({2: KILLED, 1: {}}, None, None, (4, RUNS))
    assert unknown.why == (
        "the others: worker 0 at an unknown instruction, still running; "
        "worker 1 at an unknown instruction"
    )
    assert "start new ones, with state from a checkpoint" in error.remedy


def test_a_worker_alone_has_no_others() -> None:
    error = diagnose(peers(1), Places((0, RUNS)), {0: KILLED}, SEEN, step=0)
    assert error.why == "the others: there are none"


# What a worker says at its end.


@pytest.mark.parametrize("aborted", [True, False])
def test_last_words_are_json(*, aborted: bool) -> None:
    ours = json.loads(error_text(WorkerError("it broke", got='a "b"\n'), aborted=aborted))
    assert ours == {"what": "it broke", "text": 'it broke\n  got: a "b"\n', "aborted": aborted}
    other = json.loads(error_text(ValueError("no"), aborted=aborted))
    assert (other["what"], other["text"]) == ("ValueError: no", "no")


# Where they were, read from a file that outlives them.


def test_the_board_tells_what_each_worker_wrote_last(tmp_path: Path) -> None:
    board = Board(tmp_path, 3)
    rows = [BoardRow(str(board.path), rank) for rank in range(3)]
    assert [board.where(rank) for rank in range(3)] == [(-1, -1)] * 3
    rows[2].write(1 << 40, 7)
    rows[0].write(0, 0)
    del rows
    expected = [(0, 0), (-1, -1), (1 << 40, 7)]
    assert [board.where(rank) for rank in range(3)] == expected
    for _ in range(2):
        board.close()
        assert [board.where(rank) for rank in range(3)] == expected, "also after its end"
    assert board._map.closed, "the memory is given back"
