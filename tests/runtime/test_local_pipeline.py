"""All workers in this process: hand-written stages against the same numbers in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import WorkerError
from autopar.ir.mesh import Mesh
from autopar.lower.instructions import ArgumentUse, StepProgram
from autopar.lower.verify_instructions import verify_step
from autopar.runtime.pipeline import LocalPipeline, micro_part
from autopar.runtime.transport.buffers import aligned_empty
from autopar.runtime.worker import Code
from tests.runtime.lists import ONE, four, spec, step_program, worker_program

PASS = "FEED v argument 0 micro -1\nFETCH v result 0"


def pipeline(step: StepProgram, *code: Mapping[str, Code], verify: bool = True) -> LocalPipeline:
    """The workers on devices of their own, in order."""
    if verify:
        verify_step(step)
    here, devices = jax.devices(), []
    for worker in step.workers:
        devices.append(here[: worker.mesh.size])
        here = here[worker.mesh.size :]
    return LocalPipeline(step, code or [{} for _ in step.workers], devices)


def two_stages(count: int) -> LocalPipeline:
    """A train step by hand: y = p x, then z = y q; gradients of sum(z x) back; sums over count.

    Results: p + the sum of its gradients, q + likewise, the sum of all z.
    """
    micros = range(count)
    first = "FEED p argument 0 micro -1\nZERO g.0\n" + "".join(
        f"MARK 0F{m}\nFEED x.{m} argument 2 micro {m}\nRUN F p x.{m} -> y.{m}\n"
        f"SEND y.{m} to 1 by 0 tag {m}\n"
        for m in micros
    )
    first += "".join(
        f"MARK 0B{m}\nRECV d.{m} from 1 by 0 tag {100 + m}\n"
        f"RUN B g.{m} d.{m} x.{m} -> g.{m + 1}\nFREE d.{m}\nFREE x.{m}\nFREE y.{m}\n"
        for m in micros
    )
    first += f"MARK update\nRUN U p g.{count} -> new\nFETCH new result 0"
    second = "FEED q argument 1 micro -1\nZERO s.0\nZERO g.0\n" + "".join(
        f"RECV y.{m} from 0 by 0 tag {m}\nMARK 1F{m}\nRUN L s.{m} g.{m} y.{m} q -> s.{m + 1} "
        f"g.{m + 1} d.{m}\nFREE y.{m}\nSEND d.{m} to 0 by 0 tag {100 + m}\nFREE d.{m}\n"
        for m in micros
    )
    second += f"RUN U q g.{count} -> new\nFETCH new result 1\nFETCH s.{count} result 2"
    code: list[Mapping[str, Code]] = [
        {
            "F": lambda p, x: (p * x,),
            "B": lambda g, d, x: (g + d * x,),
            "U": lambda p, g: (p + g,),
        },
        {
            "L": lambda s, g, y, q: (s + y * q, g + y, q),
            "U": lambda q, g: (q + g,),
        },
    ]
    step = step_program(
        worker_program(first, donated={"B": (0,), "U": (0, 1)}),
        worker_program(second, rank=1, donated={"L": (0, 1), "U": (0, 1)}),
        arguments=[
            [ArgumentUse(0, "p", donated=True)],
            [ArgumentUse(1, "q", donated=True)],
            [ArgumentUse(0, f"x.{m}", m, (0, 4)) for m in micros],
        ],
        micro_batches=count,
    )
    return pipeline(step, *code)


def two_stages_in_numpy(p: Any, q: Any, x: Any) -> list[Any]:
    rows = x.reshape(-1, 4)
    y = p * rows
    return [p + (q * rows).sum(0), q + y.sum(0), (y * q).sum(0)]


@pytest.mark.parametrize("count", [1, 3])
def test_stages_and_micro_batches_equal_the_same_in_numpy(count: int) -> None:
    step = two_stages(count)
    state: list[Any] = [four(1), four(2)]
    known: list[Any] = [four(1), four(2)]
    for number in range(3):
        batch = np.concatenate([four(number + micro) for micro in range(count)]) / 8
        expected = two_stages_in_numpy(known[0], known[1], batch)
        results = step.run([*state, batch])
        for found, wanted in zip(results, expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-6)
        state, known = results[:2], expected[:2]
    assert [next(iter(array.devices())).id for array in results] == [0, 1, 1]
    step.close()


def test_an_interleaving_is_driven_in_turn() -> None:
    """Each worker waits for the other more than once in a step."""
    count = 4
    lists = []
    for rank in (0, 1):
        text = "FEED a.0 argument 0 micro -1\n" if rank == 0 else ""
        for turn in range(count):
            here, there = f"a.{turn}", f"a.{turn + 1}"
            if turn % 2 == rank:
                text += f"RUN F {here} -> {there}\nFREE {here}\nSEND {there} to {1 - rank} "
                text += f"by 0 tag {turn}\nFREE {there}\n"
            else:
                text += f"RECV {there} from {1 - rank} by 0 tag {turn}\n"
        if count % 2 == rank:
            text += f"FETCH a.{count} result 0"
        lists.append(worker_program(text, rank=rank))
    step = step_program(*lists, arguments=[[ArgumentUse(0, "a.0")]])
    code: Mapping[str, Code] = {"F": lambda v: (2 * v,)}
    (result,) = pipeline(step, code, code).run([four(1)])
    assert np.asarray(result).tolist() == (2**count * four(1)).tolist()


# Micro-batches of an argument.


@pytest.mark.parametrize(("dim", "outer", "inner"), [(0, 1, 2), (1, 1, 3), (0, 3, 1), (1, 2, 2)])
@pytest.mark.parametrize("numbers", [np, jnp])
def test_a_micro_batch_is_a_part_of_its_dim(dim: int, outer: int, inner: int, numbers: Any) -> None:
    """The dim is (outer, count, inner): element `i` belongs to micro-batch `i // inner % count`."""
    count = 4
    shape = [2, 2]
    shape[dim] = outer * count * inner
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    places = np.arange(shape[dim]) // inner % count
    for micro in range(count):
        found = micro_part(numbers.asarray(array), (dim, inner), count, micro)
        expected = np.take(array, np.flatnonzero(places == micro), axis=dim)
        np.testing.assert_array_equal(found, expected)


def test_a_micro_batch_may_be_empty() -> None:
    assert micro_part(np.zeros((4, 0)), (0, 2), 2, 1).shape == (2, 0)


# Arguments and results.


def passing(*, donated: bool, mesh: Mesh = ONE) -> LocalPipeline:
    """A step whose only result is its argument."""
    uses = [ArgumentUse(0, "v", donated=donated)]
    return pipeline(step_program(worker_program(PASS, mesh=mesh), arguments=[uses]))


def test_an_argument_that_is_kept_becomes_a_copy() -> None:
    run = passing(donated=False)
    (leaf,) = run.place([four(0)])
    (result,) = run.run([leaf])
    leaf.delete()
    assert np.asarray(result).tolist() == four(0).tolist()


def test_an_argument_that_is_given_away_becomes_the_result() -> None:
    run = passing(donated=True)
    (leaf,) = run.place([four(0)])
    (result,) = run.run([leaf])
    assert result is leaf
    assert not leaf.is_deleted()


def test_what_is_given_away_is_deleted_even_if_it_was_moved() -> None:
    text = "FEED v argument 0 micro -1\nRUN F v -> w\nFREE v\nFETCH w result 0"
    step = step_program(worker_program(text), arguments=[[ArgumentUse(0, "v", donated=True)], []])
    run = pipeline(step, {"F": lambda v: (v + 1,)})
    for device in jax.devices()[:2]:
        leaf, unused = (jax.device_put(four(0), device) for _ in range(2))
        (result,) = run.run([leaf, unused])
        assert np.asarray(result).tolist() == four(1).tolist()
        assert leaf.is_deleted()
        assert not unused.is_deleted()


def test_a_result_shares_no_memory_with_the_caller_s_array() -> None:
    run = passing(donated=False)
    given = aligned_empty((4,), np.dtype(np.float32))
    given[:] = four(0)
    (result,) = run.run([given])
    given[:] = -1
    assert np.asarray(result).tolist() == four(0).tolist()


@pytest.mark.parametrize("donated", [True, False])
def test_a_result_outlives_an_argument_on_one_of_its_devices(*, donated: bool) -> None:
    run = passing(donated=donated, mesh=Mesh.of(2))
    leaf = jax.device_put(four(0), jax.devices()[0])
    (result,) = run.run([leaf])
    if not donated:
        leaf.delete()
    assert np.asarray(result).tolist() == four(0).tolist()


def test_placed_arguments_stay_where_they_are() -> None:
    micros = [ArgumentUse(0, f"x.{micro}", micro, (0, 4)) for micro in range(2)]
    text = "FEED v argument 0 micro -1\n" + "".join(
        f"FEED x.{m} argument 1 micro {m}\nFETCH x.{m} result {m}\n" for m in range(2)
    )
    worker = worker_program(text + "FETCH v result 2")
    step = step_program(worker, arguments=[[ArgumentUse(0, "v")], micros, []], micro_batches=2)
    run = pipeline(step)
    batch, unused = np.concatenate([four(0), four(4)]), object()
    placed = run.place([four(9), batch, unused])
    assert isinstance(placed[0], jax.Array)
    assert placed[1] is batch, "it is cut in the step"
    assert placed[2] is unused
    assert run.place(placed)[0] is placed[0]
    results = run.run([placed[0], batch, 0.0])
    assert [np.asarray(array).tolist() for array in results] == [
        four(0).tolist(),
        four(4).tolist(),
        four(9).tolist(),
    ]


def test_numbers_become_arrays_of_the_plan_s_dtype() -> None:
    worker = worker_program(PASS, specs={"v": spec(dtype="bfloat16")})
    run = pipeline(step_program(worker, arguments=[[ArgumentUse(0, "v")]]))
    for given in (1.5, np.float64(1.5), np.array(1.5, np.float32), jnp.bfloat16(1.5)):
        (result,) = run.run([given])
        assert (result.dtype, float(result)) == (jnp.bfloat16, 1.5)


@pytest.mark.parametrize("given", [four(0)[:3], np.zeros((4, 1), np.float32)])
def test_an_argument_that_does_not_fit_is_refused_before_anything_runs(given: Any) -> None:
    run = passing(donated=False)
    with pytest.raises(WorkerError, match="does not fit its buffer") as caught:
        run.run([given])
    assert "float32[4]" in caught.value.why
    assert not run.closed
    assert len(run.run([four(0)])) == 1


# Timelines.


def test_events_are_recorded_while_it_is_asked_for() -> None:
    run = two_stages(2)
    batch = np.concatenate([four(0), four(1)])

    def step() -> None:
        run.run([four(0), four(1), batch])

    step()
    assert run.record(on=True) == []
    step()
    step()
    events = run.record(on=True)
    assert len(events) == 2
    assert {event["step"] for row in events for event in row} == {1, 2}
    runs = [[event["text"].split()[1] for event in row if event["kind"] == "RUN"] for row in events]
    assert runs == [["F", "F", "B", "B", "U"] * 2, ["L", "L", "U"] * 2]
    marks = [event["mark"] for event in events[0] if event["kind"] == "RUN"]
    assert marks == ["0F0", "0F1", "0B0", "0B1", "update"] * 2
    step()
    (first, _) = run.record(on=False)
    assert {event["step"] for event in first} == {3}
    step()
    assert run.record(on=False) == []


# Faults.


def test_a_stage_that_fails_is_named_and_ends_the_pipeline() -> None:
    run = two_stages(2)
    state = run.place([four(0), four(1), np.concatenate([four(0), four(1)])])
    state[1].delete()
    with pytest.raises(WorkerError) as caught:
        run.run(state)
    error = caught.value
    assert error.what.startswith("worker 1 (stage 1) failed in step 0 at instruction 5: RUN L s.0")
    assert error.where == "action 1F0"
    assert "has been deleted" in error.got
    assert run.closed
    with pytest.raises(WorkerError):
        run.run([four(0), four(1), np.concatenate([four(0), four(1)])])
    run.close()


def waiting_for_each_other() -> LocalPipeline:
    """What `verify_no_deadlock` refuses."""
    texts = ("RECV x from 1 by 0 tag 5\nFREE x", "RECV y from 0 by 0 tag 6\nFREE y")
    workers = (worker_program(text, rank=rank) for rank, text in enumerate(texts))
    return pipeline(step_program(*workers), verify=False)


def test_workers_that_wait_for_each_other_are_told_and_nothing_hangs() -> None:
    with pytest.raises(WorkerError, match="all workers wait for each other") as caught:
        waiting_for_each_other().run([])
    assert "worker 0 (stage 0) is in step 0 at instruction 1 `FREE x`" in caught.value.got
    assert "worker 1 (stage 1) is in step 0 at instruction 1 `FREE y`" in caught.value.got


def test_workers_that_wait_for_each_other_tell_for_what() -> None:
    with pytest.raises(WorkerError) as caught:
        waiting_for_each_other().run([])
    assert "pending: recv x from 1 tag 5" in caught.value.got
    assert "pending: recv y from 0 tag 6" in caught.value.got


def test_an_interrupted_step_leaves_nothing_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = (
        "FEED v argument 0 micro -1\nSEND v to 1 by 0 tag 3\nRUN F v -> w\nFREE v\nFREE w",
        "RECV v from 0 by 0 tag 3\nFETCH v result 0",
    )
    workers = (worker_program(text, rank=rank) for rank, text in enumerate(texts))
    step = step_program(*workers, arguments=[[ArgumentUse(0, "v")]])
    run = pipeline(step, {"F": lambda v: (v + 1,)}, {})

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run._transports[0], "launch", interrupted)  # after the SEND, before F
        with pytest.raises(KeyboardInterrupt):
            run.run([four(0)])
    if not run.closed:
        (result,) = run.run([four(100)])
        assert np.asarray(result).tolist() == four(100).tolist()


def test_closing_twice_is_closing_once() -> None:
    run = passing(donated=False)
    assert not run.closed
    run.close()
    run.close()
    assert run.closed
    with pytest.raises(WorkerError):
        run.run([four(0)])


def test_a_step_may_be_empty() -> None:
    assert pipeline(step_program()).run([]) == []
