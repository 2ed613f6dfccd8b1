"""The driver of process workers, with threads in place of processes: steps, arrays, their ends."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import WorkerError
from autopar.lower.instructions import ArgumentUse, BufferSpec
from autopar.runtime.arrays import DistributedArray
from autopar.runtime.control import DELETES
from autopar.runtime.driver import ProcessPipeline
from tests.runtime.lists import FOUR, four, spec, step_program, worker_program
from tests.runtime.thread_workers import (
    MICRO_BATCHES,
    PATIENCE,
    Started,
    ThreadProcesses,
    two_stage_step,
)

BATCH = np.concatenate([four(0), four(4)])
BYTES = four(0).nbytes


@pytest.fixture
def started() -> Iterator[Started]:
    made = Started()
    yield made
    made.end()


def expected(p: Any, q: Any, x: Any = BATCH) -> list[Any]:
    return [p + 1, (p * x.reshape(MICRO_BATCHES, 4) * q).sum(0)]


def values(arrays: list[DistributedArray]) -> list[Any]:
    return [np.asarray(array).tolist() for array in arrays]


def handles(processes: ThreadProcesses) -> list[int]:
    """What each worker keeps, by its own count."""
    return [processes.workers[rank].worker.stats().handles for rank in sorted(processes.workers)]


# Steps.


def test_steps_equal_the_same_in_numpy_and_move_no_more_than_they_must(started: Started) -> None:
    run, _ = started.pipeline()
    p, q = four(1), four(2)
    given: list[Any] = [p, q]
    for number in range(3):
        before = run.bytes_fed
        results = run.run([*given, BATCH])
        assert values(results) == [array.tolist() for array in expected(p, q)]
        # The state is passed back in where it lies; q is fed once and again, as numpy.
        fed = {0: 2 * BYTES, 1: BYTES, 2: BYTES}[number]
        assert run.bytes_fed - before == fed + BATCH.nbytes
        given, p = [results[0], q], p + 1


def test_results_are_arrays_that_stay_on_their_workers(started: Started) -> None:
    run, _ = started.pipeline()
    state, total = run.run([four(1), four(2), BATCH])
    assert [list(array.parts) for array in (state, total)] == [[0], [1]]
    assert (state.shape, state.ndim, state.size) == ((4,), 1, 4)
    assert state.dtype == jnp.dtype("float32")
    assert state.nbytes == BYTES
    assert state.sharding == "worker 0: [-]"
    assert repr(total) == "DistributedArray(float32[4], worker 1: [-])"
    assert state.block_until_ready() is state
    assert isinstance(jnp.asarray(state), jax.Array)
    assert np.asarray(state, dtype=np.int32).dtype == np.int32
    with pytest.raises(ValueError, match="size 1"):
        float(state)


def passing(started: Started, laid: BufferSpec, *, donated: bool = False) -> ProcessPipeline:
    """One worker whose only result is its argument."""
    uses = [ArgumentUse(0, "v", donated=donated)]
    worker = worker_program("FEED v argument 0 micro -1\nFETCH v result 0", specs={"v": laid})
    return started.pipeline(step_program(worker, arguments=[uses]))[0]


def test_a_scalar_result_is_a_number(started: Started) -> None:
    run = passing(started, spec(dtype="bfloat16"))
    (one,), (zero,) = run.run([1.5]), run.run([0])
    assert (float(one), int(one), one.item(), bool(one), bool(zero)) == (1.5, 1, 1.5, True, False)
    assert one.dtype == jnp.bfloat16


def test_an_array_without_elements_travels(started: Started) -> None:
    run = passing(started, spec(0, 3))
    (found,) = run.run([np.zeros((0, 3))])
    assert np.asarray(found).shape == (0, 3)


def test_run_returns_when_the_workers_have_been_told(started: Started) -> None:
    run, processes = started.pipeline()
    told = threading.Event()

    def hook(rank: int, step: int, position: int) -> None:
        assert told.wait(PATIENCE)

    processes.hook = hook
    results = run.run([four(1), four(2), BATCH])
    told.set()
    assert values(results) == [array.tolist() for array in expected(four(1), four(2))]


def test_closed_over_arrays_reach_the_workers_that_read_them(started: Started) -> None:
    texts = ("RUN U a -> b\nFETCH b result 0", "FETCH h result 1\nFETCH a result 2")
    hidden = ((("a", 2),), (("h", 0), ("a", 2)))
    workers = (
        worker_program(text, rank=rank, hidden=hidden[rank]) for rank, text in enumerate(texts)
    )
    run, _ = started.pipeline(step_program(*workers), [four(0), None, jnp.asarray(four(5))])
    for _ in range(2):
        assert values(run.run([])) == [four(i).tolist() for i in (6, 0, 5)]


# Arguments.


def test_an_argument_given_away_is_gone(started: Started) -> None:
    run, processes = started.pipeline()
    state, kept = run.place([four(1), four(2), BATCH])[:2]
    (new, _) = run.run([state, kept, BATCH])
    assert state.is_deleted()
    assert not kept.is_deleted()
    assert "given away to a step" in repr(state)
    uses: list[Callable[[], Any]] = [
        lambda: np.asarray(state),
        lambda: state.block_until_ready(),
        lambda: run.run([state, kept, BATCH]),
        lambda: run.place([state, kept, BATCH]),
    ]
    for use in uses:
        with pytest.raises(WorkerError, match="this array was given away to a step"):
            use()
    state.delete()  # of what is gone anyway
    assert np.asarray(kept).tolist() == four(2).tolist()
    assert np.asarray(new).tolist() == four(2).tolist()
    assert handles(processes) == [1, 2]


def test_placed_arguments_are_not_moved_again(started: Started) -> None:
    run, _ = started.pipeline()
    state, kept, batch = run.place([four(1), four(2), BATCH])
    assert batch is BATCH, "it is cut when it is fed"
    assert run.place([state, kept, batch]) == [state, kept, batch]
    before = run.bytes_fed
    results = run.run([state, kept, batch])
    assert run.bytes_fed - before == BATCH.nbytes
    assert values(results) == [array.tolist() for array in expected(four(1), four(2))]


def test_a_placed_argument_has_the_dtype_of_the_plan(started: Started) -> None:
    run, _ = started.pipeline()
    placed = run.place([np.arange(4, dtype=np.float64), four(2), BATCH])[0]
    assert np.asarray(placed).dtype == np.float32
    assert placed.dtype == np.float32


def test_an_array_that_lies_elsewhere_comes_over_the_driver(started: Started) -> None:
    run, _ = started.pipeline()
    _, total = run.run([four(1), four(2), BATCH])
    known = np.asarray(total)
    results = run.run([total, total, BATCH])  # worker 1 has it, worker 0 wants it
    assert values(results) == [array.tolist() for array in expected(known, known)]
    assert total.is_deleted()
    # What was given away without being taken over is freed with a later message.
    assert [worker["handles"] for worker in run.stats()] == [2, 1]


def test_an_array_of_other_workers_is_fed(started: Started) -> None:
    (one, _), (other, _) = started.pipeline(), started.pipeline()
    state, _ = one.run([four(1), four(2), BATCH])
    assert state.held_by(one)
    assert not state.held_by(other)
    results = other.run([state, four(2), BATCH])
    assert values(results) == [array.tolist() for array in expected(four(2), four(2))]
    assert state.is_deleted()
    with pytest.raises(WorkerError, match="given away"):
        one.run([state, four(2), BATCH])


def test_a_batch_that_lies_on_a_worker_is_cut_here(started: Started) -> None:
    (batch,) = passing(started, spec(8)).run([BATCH])
    run, _ = started.pipeline()
    results = run.run([four(1), four(2), batch])
    assert values(results) == [array.tolist() for array in expected(four(1), four(2))]
    assert not batch.is_deleted()


def test_an_argument_that_only_passes_through_moves_to_its_result(started: Started) -> None:
    """No task takes it over: the worker must drop the handle all the same."""
    run = passing(started, FOUR, donated=True)
    (first,) = run.run([four(0)])
    (second,) = run.run([first])
    assert [worker["handles"] for worker in run.stats()] == [1]
    assert np.asarray(second).tolist() == four(0).tolist()
    assert first.is_deleted()


# What nobody wants any more.


def test_an_array_that_is_dropped_is_freed_with_the_next_message(started: Started) -> None:
    run, processes = started.pipeline()
    results = run.run([four(1), four(2), BATCH])
    run.settle()
    assert handles(processes) == [1, 1]
    del results
    gc.collect()
    assert handles(processes) == [1, 1], "nothing is sent for it alone"
    others = run.run([four(1), four(2), BATCH])
    run.settle()
    assert handles(processes) == [1, 1]
    del others


def test_more_than_a_message_can_tell_waits_for_the_next(started: Started) -> None:
    run, processes = started.pipeline()
    many = 2 * DELETES + 3
    kept = [run.place([four(n), four(2), BATCH])[0] for n in range(many)]
    assert handles(processes)[0] == many
    kept.clear()
    gc.collect()
    results = []
    for number in range(3):
        results += run.run([four(1), four(2), BATCH])
        run.settle()
        left = max(many - (number + 1) * DELETES, 0)
        assert handles(processes)[0] == left + number + 1
    del results


def test_stats_free_all_that_waits(started: Started) -> None:
    run, _ = started.pipeline()
    kept = [run.place([four(n), four(2), BATCH])[:2] for n in range(DELETES + 1)]
    kept.clear()
    gc.collect()
    stats = run.stats()
    assert [(row["handles"], row["bytes"], row["steps"]) for row in stats] == [(0, 0, 0)] * 2
    assert all(row["rss"] > 0 for row in stats)
    results = run.run([four(1), four(2), BATCH])
    assert [(row["handles"], row["bytes"], row["steps"]) for row in run.stats()] == [
        (1, BYTES, 1)
    ] * 2
    del results


def test_delete_frees_at_once(started: Started) -> None:
    run, processes = started.pipeline()
    state, total = run.run([four(1), four(2), BATCH])
    for _ in range(2):
        state.delete()
        assert handles(processes) == [0, 1]
    assert repr(state) == "DistributedArray(float32[4], deleted)"
    with pytest.raises(WorkerError, match="this array was deleted") as caught:
        np.asarray(state)
    assert "the array that the step returned in its place" in caught.value.remedy
    assert not total.is_deleted()


def test_many_steps_keep_nothing(started: Started) -> None:
    run, _ = started.pipeline()
    state, total = run.run([four(1), four(2), BATCH])
    for _ in range(20):
        state, total = run.run([state, four(2), BATCH])
    assert [row["handles"] for row in run.stats()] == [1, 1]
    assert np.asarray(state).tolist() == (four(1) + 21).tolist()
    del total


# Timelines.


def test_events_come_from_all_workers_while_they_are_asked_for(started: Started) -> None:
    run, _ = started.pipeline()
    run.run([four(1), four(2), BATCH])
    assert run.record(on=True) == [[], []]
    run.run([four(1), four(2), BATCH])
    events = run.record(on=False)
    runs = [[event["text"].split()[1] for event in row if event["kind"] == "RUN"] for row in events]
    assert runs == [["F", "F", "U"], ["L", "L"]]
    kinds = [{event["kind"] for event in row} - {"WAIT"} for row in events]
    assert kinds == [{"RUN", "SEND"}, {"RUN", "RECV"}]
    assert {event["step"] for row in events for event in row} == {1}
    marks = [event["mark"] for event in events[1] if event["kind"] == "RUN"]
    assert marks == ["1F0", "1F1"]
    run.run([four(1), four(2), BATCH])
    assert run.record(on=False) == [[], []]


# Start and end.


def test_the_start_is_told_and_has_a_folder_of_its_own(started: Started) -> None:
    told: list[str] = []
    run, processes = started.pipeline(progress=told.append)
    assert told == ["starting 2 workers", "connecting workers", "compiling on the workers"]
    assert run.pids == (1000, 1001)
    assert run.folder.is_dir()
    assert not run.closed
    run.close()
    run.close()
    assert run.closed
    assert not run.folder.exists()
    assert processes.ended == 1


def test_workers_end_well_when_they_are_told(started: Started) -> None:
    run, processes = started.pipeline()
    processes.gentle = True
    run.run([four(1), four(2), BATCH])
    run.settle()
    run.close()
    assert processes.last_words(PATIENCE) == {0: "", 1: ""}


def test_nothing_works_after_the_end(started: Started) -> None:
    run, _ = started.pipeline()
    state, total = run.run([four(1), four(2), BATCH])
    run.close()
    uses: list[Callable[[], Any]] = [
        lambda: run.run([four(1), four(2), BATCH]),
        lambda: run.place([four(1), four(2), BATCH]),
        run.settle,
        run.stats,
        lambda: run.record(on=True),
        lambda: np.asarray(state),
        total.block_until_ready,
    ]
    for use in uses:
        with pytest.raises(WorkerError, match="the workers were ended") as caught:
            use()
        assert caught.value.got == "the runtime was closed"
        assert "starts new workers" in caught.value.remedy
    state.delete()  # nothing is left to be freed


def test_a_pipeline_that_is_dropped_ends_its_workers(started: Started) -> None:
    processes = started.processes()
    run = ProcessPipeline(step_program(worker_program("")), [{}], processes)
    folder = run.folder
    run.run([])
    run.settle()
    assert processes.ended == 0
    del run
    gc.collect()
    assert processes.ended == 1
    assert not folder.exists()


def test_a_start_that_fails_leaves_nothing(started: Started) -> None:
    processes = started.processes()
    with pytest.raises(WorkerError, match=r"task F of worker 0 \(stage 0\) cannot be compiled"):
        ProcessPipeline(two_stage_step(), [{"F": b"nothing", "U": b""}, {}], processes)
    assert processes.ended == 1
    assert not processes.folder.exists()
