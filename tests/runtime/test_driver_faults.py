"""What the driver makes of workers that raise, die or hang, with threads in place of processes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from autopar.errors import TransportError, WorkerError
from autopar.runtime.arrays import DistributedArray
from autopar.runtime.calls import Given
from autopar.runtime.driver import ProcessPipeline
from autopar.runtime.faults import DIED
from autopar.runtime.peer import Peer
from autopar.runtime.transport.base import ArraySpec
from tests.runtime.lists import FOUR, four
from tests.runtime.thread_workers import (
    PATIENCE,
    Hook,
    Killed,
    Started,
    ThreadProcesses,
    position_of,
    two_stage_step,
)

STEP = two_stage_step()
SECOND_LOSS = position_of(STEP, 1, "RUN L s.1")
FIRST_FORWARD = position_of(STEP, 0, "RUN F p x.0")
ARGUMENTS = [four(1), four(2), np.concatenate([four(0), four(4)])]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """Short slices: a hang is told at the second look that finds nobody moved."""
    monkeypatch.setattr("autopar.runtime.watch.POLL_SECONDS", 0.02)
    monkeypatch.setattr("autopar.runtime.driver.GRACE_SECONDS", 0.02)
    made = Started()
    yield made
    made.end()


def at(rank: int, step: int, position: int, act: Callable[[], None]) -> Hook:
    """A hook that acts at one instruction."""

    def hook(*here: int) -> None:
        if here == (rank, step, position):
            act()

    return hook


def throw(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def failure(use: Callable[[], Any]) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        use()
    return caught.value


def settled(run: ProcessPipeline, steps: int = 1) -> None:
    for _ in range(steps):
        run.run(ARGUMENTS)
    run.settle()


def begin(run: ProcessPipeline, processes: ThreadProcesses, hook: Hook) -> list[DistributedArray]:
    """A step with a hook that acts when all workers have been told, and no sooner."""
    told = threading.Event()

    def later(rank: int, step: int, position: int) -> None:
        assert told.wait(PATIENCE)
        hook(rank, step, position)

    processes.hook = later
    results = run.run(ARGUMENTS)
    told.set()
    return results


def seen_to_fail(run: ProcessPipeline) -> None:
    """Wait until it has come to the driver that worker 1 failed."""
    assert run._calls is not None
    transport = run._calls.transport
    with pytest.raises(TransportError, match=r"aborted|lost"):
        transport.wait([transport.irecv(1, 1 << 40, ArraySpec((), "int32"))], timeout=PATIENCE)


OUT_OF_MEMORY = throw(MemoryError("no room"))


# Workers that raise.


@pytest.mark.parametrize(
    ("rank", "position", "text"),
    [
        (1, SECOND_LOSS, "RUN L s.1 y.1 q -> s.2"),
        (0, FIRST_FORWARD, "RUN F p x.0 -> y.0"),
        (0, 0, "FEED p argument 0 micro -1"),
    ],
)
def test_a_worker_that_raises_is_named_and_the_others_only_followed(
    started: Started, rank: int, position: int, text: str
) -> None:
    run, processes = started.pipeline()
    kept = run.run(ARGUMENTS)
    run.settle()
    begin(run, processes, at(rank, 1, position, OUT_OF_MEMORY))
    error = failure(run.settle)
    what = f"worker {rank} (stage {rank}) failed in step 1 at instruction {position}: {text}"
    assert error.what == what
    assert "got: MemoryError: no room" in error.got
    assert f"the others: worker {1 - rank} in step" in error.why
    assert "still running" not in error.why
    assert processes.workers[rank].where() == (1, position), "also after its end"
    assert run.closed
    assert not run.folder.exists()
    assert processes.ended == 1
    for use in (run.settle, run.stats, lambda: run.run(ARGUMENTS), kept[1].block_until_ready):
        later = failure(use)
        assert later.what == "the workers were ended"
        assert later.got == what
    kept[1].delete()
    run.close()


def test_what_went_wrong_is_raised_by_whoever_waits_next(started: Started) -> None:
    run, processes = started.pipeline()
    results = begin(run, processes, at(1, 0, SECOND_LOSS, OUT_OF_MEMORY))
    assert "worker 1 (stage 1) failed in step 0" in failure(lambda: np.asarray(results[0])).what
    assert failure(lambda: np.asarray(results[1])).what == "the workers were ended"


def test_a_worker_may_fail_before_run_expects_its_reply(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, processes = started.pipeline()
    calls, told = run._calls, threading.Event()
    assert calls is not None
    tell = calls.step

    def step(peer: Peer, number: int, first: int, given: Sequence[Given]) -> None:
        tell(peer, number, first, given)
        if peer.rank == 1:
            told.set()
            seen_to_fail(run)

    def hook(*here: int) -> None:
        assert told.wait(PATIENCE)
        raises(*here)

    raises = at(1, 0, SECOND_LOSS, OUT_OF_MEMORY)
    processes.hook = hook
    monkeypatch.setattr(calls, "step", step)
    error = failure(lambda: settled(run))
    assert "worker 1 (stage 1) failed in step 0" in error.what


def test_what_waits_inside_a_step_is_told_too(started: Started) -> None:
    """A worker waits for one that hangs; its own error says for whom, the hanging one is named."""
    run, processes = started.pipeline()
    processes.hanging = (0,)
    workers, hang = processes.workers, at(0, 0, FIRST_FORWARD, started.hang)

    def hook(rank: int, step: int, position: int) -> None:
        if rank == 1:
            workers[1].worker.timeout = 0.05  # not before all its arguments have come
        hang(rank, step, position)

    begin(run, processes, hook)
    error = failure(run.settle)
    place = f"at instruction {FIRST_FORWARD}: RUN F p x.0 -> y.0"
    assert error.what == f"worker 0 (stage 0) hangs in step 0 {place}"
    words = json.loads(processes.last_words(0.0)[1])
    assert words["aborted"], "it only followed"
    assert "worker 1 (stage 1) failed in step 0" in words["what"]
    assert "rank 1 waited 0.05 s in vain" in words["text"]
    assert "recv y.0 from 0 tag 0" in words["text"]


# Workers that die.


def test_a_worker_that_dies_in_a_step_is_named(started: Started) -> None:
    run, processes = started.pipeline()
    settled(run, 2)
    begin(run, processes, at(1, 2, SECOND_LOSS, throw(Killed("signal 9"))))
    error = failure(run.settle)
    place = f"at instruction {SECOND_LOSS}: RUN L s.1 y.1 q -> s.2"
    assert error.what == f"worker 1 (stage 1) died in step 2 {place}"
    assert error.got == "signal 9"


def dead_between_steps(started: Started) -> tuple[ProcessPipeline, list[DistributedArray]]:
    """A pipeline whose worker 1 has died after the first step, and the results of that step."""
    run, processes = started.pipeline()
    processes.words = {1: f"{DIED} signal 9"}
    results = run.run(ARGUMENTS)
    run.settle()
    processes.workers[1].transport.close()
    seen_to_fail(run)
    return run, results


@pytest.mark.parametrize("name", ["run", "fetch"])
def test_a_worker_that_died_between_steps_is_named_by_the_next_use(
    started: Started, name: str
) -> None:
    run, results = dead_between_steps(started)
    uses = {"run": lambda: settled(run), "fetch": lambda: np.asarray(results[1])}
    error = failure(uses[name])
    assert error.what.startswith("worker 1 (stage 1) died in step ")
    assert error.got == "signal 9"
    assert run.closed


@pytest.mark.parametrize("name", ["place", "stats", "record", "delete"])
def test_every_use_names_a_worker_that_died(started: Started, name: str) -> None:
    run, results = dead_between_steps(started)
    uses: dict[str, Callable[[], Any]] = {
        "place": lambda: run.place(ARGUMENTS),
        "stats": run.stats,
        "record": lambda: run.record(on=True),
        "delete": results[1].delete,
    }
    with pytest.raises(WorkerError, match=r"worker 1 \(stage 1\) died"):
        uses[name]()
    assert run.closed


# Workers that hang.


@pytest.mark.parametrize(
    ("rank", "position", "text"),
    [(1, SECOND_LOSS, "RUN L s.1"), (0, FIRST_FORWARD, "RUN F p x.0")],
)
def test_a_worker_that_hangs_is_named(
    started: Started, rank: int, position: int, text: str
) -> None:
    run, processes = started.pipeline()
    processes.hanging = (rank,)
    settled(run)
    reached = threading.Event()

    def hang() -> None:
        reached.set()
        started.hang()

    begin(run, processes, at(rank, 1, position, hang))
    assert reached.wait(PATIENCE)
    assert processes.workers[rank].where() == (1, position)
    run.watch.hang_seconds = 0.0  # not before: a slow machine must not look like a hang
    error = failure(run.settle)
    what = f"worker {rank} (stage {rank}) hangs in step 1 at instruction {position}: {text}"
    assert error.what.startswith(what)
    assert error.got == "no worker has moved for 0 s"
    assert f"the others: worker {1 - rank}" in error.why


class Unknown:
    def where(self, rank: int) -> None:
        return None


def test_a_worker_whose_position_is_unknown_is_named_all_the_same(started: Started) -> None:
    run, processes = started.pipeline()
    processes.where = Unknown()
    begin(run, processes, at(1, 0, SECOND_LOSS, OUT_OF_MEMORY))
    error = failure(run.settle)
    assert error.what == "worker 1 (stage 1) failed in step 0 at an unknown instruction"


# Last words.


@pytest.mark.parametrize(
    ("words", "what", "got"),
    [
        ({1: f"{DIED} the node is gone"}, "worker 1 (stage 1) died", "the node is gone"),
        ({0: f"{DIED}"}, "worker 0 (stage 0) died", ""),
        ({0: "", 1: ""}, "worker 0 (stage 0) failed", "rank -1"),
        (
            {0: json.dumps({"what": "w", "text": "what it was", "aborted": False})},
            "worker 0 (stage 0) failed",
            "what it was",
        ),
    ],
)
def test_last_words_decide_who_is_named(
    started: Started, words: dict[int, str], what: str, got: str
) -> None:
    run, processes = started.pipeline()
    processes.words = words
    begin(run, processes, at(1, 0, SECOND_LOSS, OUT_OF_MEMORY))
    error = failure(run.settle)
    assert error.what.startswith(f"{what} in step 0")
    assert got in error.got


# Refusals, after which it goes on.


def test_a_worker_that_refuses_is_told_and_the_pipeline_stays(started: Started) -> None:
    run, _ = started.pipeline()
    lost = DistributedArray(run, (4,), "float32", {1: 999}, {1: FOUR})
    assert failure(lambda: np.asarray(lost)).what == "there is no array with the handle 999"
    assert not run.closed
    settled(run)


@pytest.mark.parametrize("name", ["run", "place"])
def test_an_argument_that_does_not_fit_is_an_error_that_says_so(
    started: Started, name: str
) -> None:
    run, _ = started.pipeline()
    wrong = [four(0)[:3], *ARGUMENTS[1:]]
    error = failure(lambda: getattr(run, name)(wrong))
    assert error.what == "an argument does not fit the plan"
    assert (error.got, error.why) == ("float32[3]", "the plan says float32[4]")


def goes_on(run: ProcessPipeline) -> bool:
    """Whether a step after a refusal is right; one that was ended by the refusal is right too."""
    if run.closed:
        return True
    state, total = run.run(ARGUMENTS)
    p, q, x = ARGUMENTS
    assert np.asarray(state).tolist() == (p + 1).tolist()
    return bool((np.asarray(total) == (p * x.reshape(2, 4) * q).sum(0)).all())


def test_a_refused_fetch_takes_nothing_of_the_next(started: Started) -> None:
    run, _ = started.pipeline(hang_seconds=1.0)
    lost = DistributedArray(run, (4,), "float32", {0: 999}, {0: FOUR})
    failure(lambda: np.asarray(lost))
    assert goes_on(run)


@pytest.mark.parametrize("name", ["run", "place"])
def test_a_refused_argument_leaves_no_worker_waiting(started: Started, name: str) -> None:
    run, _ = started.pipeline(hang_seconds=1.0)
    wrong = [four(0)[:3], *ARGUMENTS[1:]]
    failure(lambda: getattr(run, name)(wrong))
    assert goes_on(run)
