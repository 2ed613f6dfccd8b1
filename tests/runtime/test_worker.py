"""One worker over the in-process transport: steps, handles, errors, and what its peers learn.

The test itself is the peer: it sends before the worker looks, so one thread is enough.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

from autopar.errors import TransportError, WorkerError
from autopar.ir.mesh import Mesh
from autopar.lower.instructions import WHOLE, BufferSpec, WorkerProgram
from autopar.runtime.executor import Event
from autopar.runtime.remote_worker import feed_plan, fetch_plan
from autopar.runtime.transfer import message_tag
from autopar.runtime.transport.base import DRIVER, ArraySpec, Transport
from autopar.runtime.transport.in_process import InProcessHub
from autopar.runtime.worker import Code, Worker, WorkerStats, put_array, sharding_of
from tests.runtime.lists import FOUR, four, spec, worker_program

PATIENCE = 30.0
ADD = "FEED v argument 0 micro -1\nRUN F v -> w\nFREE v\nFETCH w result 0"
PASS = "FEED v argument 0 micro -1\nFETCH v result 0"
WAIT = "MARK 1F0\nRECV x from 1 by 0 tag 17\nFREE x"
FIRST_RESULT = 100


def plus_one(array: Any) -> tuple[Any]:
    return (array + 1,)


def ends(rank: int = 1) -> list[Transport]:
    """The transports of the worker and of one other rank."""
    hub = InProcessHub()
    mine, other = hub.transport(0), hub.transport(rank)
    mine.connect({rank: other.address}, timeout=PATIENCE)
    return [mine, other]


@dataclass
class Bench:
    """A loaded worker of rank 0, and the transport of another rank."""

    worker: Worker
    peer: Transport
    program: WorkerProgram
    code: Mapping[str, Code]

    def step(self, *args: Any, number: int = 0, given_away: Sequence[int] = ()) -> None:
        """A step on whole arguments, whose results get handles from FIRST_RESULT."""
        keyed = {(index, WHOLE): given for index, given in enumerate(args)}
        results = {index: FIRST_RESULT + index for index, _ in self.program.results()}
        self.worker.step(number, keyed, results, [(index, WHOLE) for index in given_away])

    def value(self, handle: int) -> list[float]:
        found: list[float] = np.asarray(self.worker.get(handle)).tolist()
        return found

    def send(self, tag: int, array: Any) -> None:
        self.peer.isend(0, message_tag(tag, 0), array)

    def received(self, tag: int, size: int = 4) -> list[float]:
        request = self.peer.irecv(0, message_tag(tag, 0), ArraySpec((size,), "float32"))
        self.peer.wait([request], timeout=PATIENCE)
        found: list[float] = request.result().tolist()
        return found


def bench_of(
    text: str,
    code: Mapping[str, Code] | None = None,
    *,
    worker: Worker | None = None,
    peer: int = 1,
    arrays: Sequence[Any] = (),
    **options: Any,
) -> Bench:
    """A worker that has loaded a list; `options` are those of `worker_program`."""
    mine, other = ends(peer)
    program = worker_program(text, **options)
    made = worker or Worker(timeout=PATIENCE)
    bench = Bench(made, other, program, code or {"F": plus_one})
    made.load(program, bench.code, jax.devices()[: program.mesh.size], mine, arrays)
    return bench


# Steps.


def test_a_step_runs_its_tasks_between_its_messages() -> None:
    bench = bench_of(
        """
        FEED v argument 0 micro -1
        RECV x from 1 by 0 tag 5
        RUN F v x -> w
        FREE v
        FREE x
        SEND w to 1 by 0 tag 6
        FETCH w result 0
        """,
        {"F": lambda v, x: (v + 10 * x,)},
    )
    for number in range(2):
        bench.send(5, four(number))
        bench.step(four(1), number=number)
        expected = (four(1) + 10 * four(number)).tolist()
        assert bench.received(6) == expected
        assert bench.value(FIRST_RESULT) == expected
    assert bench.worker.stats() == WorkerStats(handles=1, bytes=16, steps=2)


def test_a_serialised_task_donates_too() -> None:
    """`jax.export` loses the donation: it is asked for again when the worker compiles."""
    shape = jax.ShapeDtypeStruct((4,), np.float32)
    exported = jax.export.export(jax.jit(plus_one))(shape).serialize()
    bench = bench_of(
        "FEED v argument 0 micro -1\nRUN F v -> w\nFETCH w result 0",
        {"F": bytes(exported)},
        donated={"F": (0,)},
    )
    bench.worker.put(1, four(0), FOUR)
    array = bench.worker.get(1)
    bench.step(1)
    assert bench.value(FIRST_RESULT) == (four(0) + 1).tolist()
    assert array.is_deleted()


def test_constants_and_closed_over_arrays_stay_from_step_to_step() -> None:
    bench = bench_of(
        "RUN F c h -> w\nFETCH w result 0\nFETCH h result 1",
        {"F": lambda c, h: (c + h,)},
        constants=[("c", 7)],
        hidden=[("h", 2)],
        arrays=[None, None, four(1)],
    )
    for _ in range(2):
        bench.step()
        assert bench.value(FIRST_RESULT) == (four(1) + 7).tolist()
        assert bench.value(FIRST_RESULT + 1) == four(1).tolist()
        bench.worker.get(FIRST_RESULT + 1).delete()  # a copy: the closed-over array stays


def test_micro_batches_come_by_their_numbers() -> None:
    text = "".join(
        f"FEED v.{micro} argument 0 micro {micro}\nRUN F v.{micro} -> w.{micro}\nFREE v.{micro}\n"
        f"FETCH w.{micro} result {micro}\n"
        for micro in range(3)
    )
    worker = bench_of(text).worker
    worker.step(0, {(0, micro): four(10 * micro) for micro in range(3)}, {0: 50, 2: 52})
    assert np.asarray(worker.get(50)).tolist() == (four(0) + 1).tolist()
    assert np.asarray(worker.get(52)).tolist() == (four(20) + 1).tolist()
    assert worker.stats().handles == 2, "a result that nobody wants is dropped"


def test_events_and_positions_are_told_to_those_who_asked() -> None:
    events: list[Event] = []
    places: list[tuple[int, int]] = []
    worker = Worker(recorder=events.append, report=lambda *place: places.append(place))
    bench_of(ADD, worker=worker).step(four(0), number=4)
    assert [(event.kind, event.step, event.text) for event in events] == [
        ("RUN", 4, "RUN F v -> w")
    ]
    assert places == [(4, position) for position in range(4)]


# Handles.


def test_arrays_are_kept_by_handle() -> None:
    worker = bench_of(ADD).worker
    array = jax.device_put(four(0), sharding_of(FOUR, worker_program(ADD), jax.devices()[:1]))
    worker.put(1, array, FOUR)
    worker.put(2, four(1), FOUR)
    assert worker.get(1) is array, "it is in place"
    assert worker.stats() == WorkerStats(handles=2, bytes=32, steps=0)
    worker.delete([2, 99])
    assert worker.stats().handles == 1
    with pytest.raises(WorkerError, match="no array with the handle 2"):
        worker.get(2)


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (np.zeros(3, np.float32), "float32[3]"),
        (np.zeros((4, 1), np.float32), "float32[4, 1]"),
        (np.zeros(4, np.int32), "int32[4]"),
    ],
)
def test_what_does_not_fit_is_not_kept(given: Any, got: str) -> None:
    worker = bench_of(ADD).worker
    with pytest.raises(WorkerError, match="does not fit its buffer") as caught:
        worker.put(1, given, FOUR)
    assert caught.value.got == got
    assert "float32[4]" in caught.value.why
    assert worker.stats().handles == 0


def test_a_shape_that_cannot_be_split_is_told_alike() -> None:
    halves = spec(4, sharding="[x]")
    program = worker_program("", mesh=Mesh.of(2))
    sharding = sharding_of(halves, program, jax.devices()[:2])
    with pytest.raises(WorkerError, match="does not fit its buffer"):
        put_array(four(0)[:3], halves, sharding)


def test_a_handle_given_away_is_gone_after_the_step_and_others_stay() -> None:
    bench = bench_of(
        "FEED v argument 0 micro -1\nFEED u argument 1 micro -1\nFETCH v result 0\nFETCH u result 1"
    )
    worker = bench.worker
    worker.put(1, four(0), FOUR)
    worker.put(2, four(1), FOUR)
    kept, given = worker.get(1), worker.get(2)
    bench.step(1, 2, given_away=[1])
    assert worker.get(FIRST_RESULT + 1) is given
    assert worker.get(1) is kept
    assert worker.get(FIRST_RESULT) is not kept
    with pytest.raises(WorkerError, match="given away to a step"):
        worker.get(2)
    bench.worker.delete([FIRST_RESULT])
    assert bench.value(1) == four(0).tolist()


def test_a_handle_that_a_task_took_over_is_gone() -> None:
    text = "FEED v argument 0 micro -1\nRUN F v -> w\nFETCH w result 0"
    bench = bench_of(text, donated={"F": (0,)})
    bench.worker.put(1, four(0), FOUR)
    bench.step(1)
    assert bench.worker.stats().handles == 1
    bench.step(FIRST_RESULT, number=1)
    assert bench.value(FIRST_RESULT) == (four(0) + 2).tolist()


def test_arrays_come_and_go_by_tile_plans() -> None:
    """Two devices, no collective: each half is a message of its own."""
    mesh, halves = Mesh.of(2), spec(4, sharding="[x]")
    bench = bench_of(ADD, peer=DRIVER, mesh=mesh, specs={"v": halves, "w": halves})
    for tile in range(2):
        bench.peer.isend(0, message_tag(3, tile), four(2 * tile)[:2].copy())
    bench.worker.receive(1, feed_plan(halves, mesh), DRIVER, 3)
    assert bench.value(1) == four(0).tolist()
    bench.step(1)
    bench.worker.send(FIRST_RESULT, fetch_plan(halves, mesh), DRIVER, 0)
    assert bench.received(0, 2) == [1.0, 2.0]
    with pytest.raises(WorkerError, match="no array with the handle 7"):
        bench.worker.send(7, fetch_plan(halves, mesh), DRIVER, 0)


@pytest.mark.parametrize(("laid", "total"), [("[-]", 32), ("[x]", 16)])
def test_stats_count_the_bytes_of_all_devices(laid: str, total: int) -> None:
    worker = bench_of(PASS, mesh=Mesh.of(2)).worker
    worker.put(1, four(0), spec(4, sharding=laid))
    worker.put(2, np.zeros((0, 2), np.float32), spec(0, 2))
    assert worker.stats() == WorkerStats(handles=2, bytes=total, steps=0)


# What cannot be loaded.


def broken(array: Any) -> tuple[Any]:
    raise ArithmeticError("no such thing")


def load_error(code: Mapping[str, Code]) -> str:
    with pytest.raises(WorkerError) as caught:
        bench_of(ADD, code)
    return str(caught.value)


@pytest.mark.parametrize(
    ("code", "texts"),
    [
        ({"G": plus_one}, ["has no code", "['G']"]),
        ({"F": broken}, ["cannot be compiled", "ArithmeticError: no such thing"]),
        ({"F": b"nothing"}, ["cannot be compiled"]),
        ({"F": lambda v: (v[:2],)}, ["other outputs than planned", "(2,)", "(4,)"]),
        ({"F": lambda v: (v, v)}, ["task F of worker 0 (stage 0)"]),
    ],
)
def test_a_task_that_cannot_be_loaded_is_named(code: Mapping[str, Code], texts: list[str]) -> None:
    error = load_error(code)
    for text in ["task F of worker 0 (stage 0)", *texts]:
        assert text in error


def test_a_worker_needs_as_many_devices_as_its_mesh() -> None:
    mine, _ = ends()
    program = worker_program(PASS, mesh=Mesh.of(3))
    with pytest.raises(WorkerError, match=r"worker 0 \(stage 0\) needs 3 devices"):
        Worker().load(program, {}, jax.devices()[:2], mine)


def test_a_worker_without_a_program_says_so() -> None:
    worker = Worker()
    assert worker.progress() is None
    worker.abort("nothing is under way")
    loaded = bench_of(PASS).worker
    loaded.put(1, four(0), FOUR)
    loaded.close()
    assert loaded.stats().handles == 0
    uses: list[Callable[[Worker], None]] = [
        lambda w: w.step(0, {}, {}),
        lambda w: w.put(0, four(0), FOUR),
        lambda w: w.send(0, fetch_plan(FOUR, Mesh.of(1)), DRIVER, 0),
        lambda w: w.receive(0, feed_plan(FOUR, Mesh.of(1)), DRIVER, 0),
    ]
    for one in (worker, loaded):
        for use in uses:
            with pytest.raises(WorkerError, match="no program yet"):
                use(one)


# Steps that fail.


def refused(bench: Bench) -> str:
    """The error of a step after one that failed; progress still tells where that was."""
    with pytest.raises(WorkerError) as caught:
        bench.step(four(0), number=9)
    return str(caught.value)


def told(peer: Transport) -> str:
    """What a peer that waits for the worker learns."""
    with pytest.raises(TransportError) as caught:
        peer.irecv(0, 0, ArraySpec((), "float32"))
    return str(caught.value)


def test_a_worker_that_failed_tells_its_peers_and_runs_no_other_step() -> None:
    bench = bench_of(ADD)
    bench.worker.put(1, four(0), FOUR)
    bench.worker.get(1).delete()
    expected = "worker 0 (stage 0) failed in step 3 at instruction 1: RUN F v -> w"
    with pytest.raises(WorkerError) as caught:
        bench.step(1, number=3)
    assert caught.value.what == expected
    assert "has been deleted" in caught.value.got
    assert expected in told(bench.peer)
    assert "failed before and runs no other step" in refused(bench)
    assert expected in refused(bench)
    progress = bench.worker.progress()
    assert progress is not None
    assert (progress.step, progress.position) == (3, 1)
    bench.worker.delete([1])
    assert bench.worker.stats() == WorkerStats(handles=0, bytes=0, steps=0)


def test_it_runs_again_when_it_is_loaded_again() -> None:
    bench = bench_of(ADD)
    with pytest.raises(WorkerError):
        bench.step(77)
    bench = bench_of(ADD, worker=bench.worker)
    bench.step(four(0))
    assert bench.value(FIRST_RESULT) == (four(0) + 1).tolist()


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({(0, WHOLE): 77}, "no array with the handle 77"),
        ({(0, 2): four(0)}, "worker 0 takes no argument 0 (micro-batch 2)"),
        ({(5, WHOLE): four(0)}, "worker 0 takes no argument 5"),
        ({(0, WHOLE): four(0)[:3]}, "does not fit its buffer"),
        ({}, "argument 0 was not given to this worker"),
    ],
)
def test_a_wrong_argument_fails_the_step_here_and_at_the_peers(
    args: Mapping[tuple[int, int], Any], text: str
) -> None:
    bench = bench_of(ADD)
    with pytest.raises(WorkerError) as caught:
        bench.worker.step(0, args, {0: 1})
    assert text in str(caught.value)
    assert caught.value.what in told(bench.peer)
    assert "failed before" in refused(bench)


@pytest.mark.parametrize("timeout", [0.0, 0.05])
def test_a_peer_that_does_not_come_is_named(timeout: float) -> None:
    bench = bench_of(WAIT, worker=Worker(timeout=timeout))
    with pytest.raises(WorkerError) as caught:
        bench.step(number=2)
    error = caught.value
    assert error.what == "worker 0 (stage 0) failed in step 2 at instruction 2: FREE x"
    assert error.where == "action 1F0"
    assert f"rank 0 waited {timeout:g} s in vain" in error.got
    assert f"from rank 1: tag {message_tag(17, 0)}" in error.why
    assert "under way: recv x from 1 tag 17" in error.why
    assert "worker 0 (stage 0) failed in step 2" in told(bench.peer)


def test_a_peer_that_is_gone_ends_the_step() -> None:
    bench = bench_of(WAIT)
    bench.peer.close()
    with pytest.raises(WorkerError, match="rank 0 lost rank 1"):
        bench.step()


def test_a_step_may_be_ended_from_another_thread() -> None:
    waiting = threading.Event()

    def report(step: int, position: int) -> None:
        if position == 2:  # `FREE x`, which waits
            waiting.set()

    bench = bench_of(WAIT, worker=Worker(timeout=PATIENCE, report=report))
    worker = bench.worker

    def end() -> None:
        if waiting.wait(PATIENCE):
            worker.abort("the driver is gone")

    ender = threading.Thread(target=end)
    ender.start()
    with pytest.raises(WorkerError) as caught:
        bench.step()
    ender.join(PATIENCE)
    assert "at instruction 2: FREE x" in caught.value.what
    assert "the driver is gone" in str(caught.value)
    assert "the driver is gone" in told(bench.peer)
    with pytest.raises(WorkerError, match="failed before"):
        worker.step(1, {}, {})


def test_an_aborted_worker_runs_no_step() -> None:
    bench = bench_of(ADD)
    bench.worker.abort("enough")
    assert "enough" in refused(bench)


def test_an_array_that_is_not_sent_is_waited_for_no_longer_than_the_timeout() -> None:
    bench = bench_of(PASS, worker=Worker(timeout=0.0), peer=DRIVER)
    plan = feed_plan(BufferSpec((4,), "float32", FOUR.sharding), Mesh.of(1))
    with pytest.raises(TransportError, match="rank 0 waited 0 s in vain"):
        bench.worker.receive(1, plan, DRIVER, 3)
    assert bench.worker.stats().handles == 0
