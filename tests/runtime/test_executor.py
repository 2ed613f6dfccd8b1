"""What the interpreter of one list does between two waits: order, overlap, lifetimes, errors."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from autopar.lower.instructions import WHOLE
from autopar.runtime.executor import STEPS_IN_FLIGHT
from tests.runtime.lists import four, spec
from tests.runtime.manual_transport import Rig, end_of, failure_of, on_device, values_of, waits_for

# Order.


def test_instructions_run_in_their_order_and_results_come_by_index() -> None:
    rig = Rig(
        """
        ZERO a
        FEED v argument 0 micro -1
        RUN F v a -> w x
        FREE v
        FREE a
        RUN G w x -> y
        FREE w
        FREE x
        FETCH y result 1
        ZERO z
        FETCH z result 0
        """
    )
    results = values_of(rig.step({(0, WHOLE): on_device(four(0))}))
    assert results == {0: [0.0] * 4, 1: (2 * four(0) + 4).tolist()}
    assert rig.done() == ["run F", "run G"]


def test_a_list_without_instructions_has_no_results() -> None:
    assert end_of(Rig("").step()) == {}


def test_each_instruction_is_reported_before_it_runs() -> None:
    rig = Rig("MARK 1F0\nZERO a\nRUN F a -> b\nFREE a\nFREE b")
    for number in (4, 5):
        end_of(rig.step(number=number))
        assert rig.log == [
            *(f"at {number}.{position}" for position in range(3)),
            "launch",
            "run F",
            *(f"at {number}.{position}" for position in range(3, 5)),
        ]
        rig.log.clear()


def test_what_was_posted_is_launched_before_each_run() -> None:
    rig = Rig("ZERO a\nSEND a to 1 by 0 tag 5\nRUN F a -> b\nFREE a\nFREE b")
    waits_for(rig.step())
    assert [line for line in rig.log if not line.startswith("at ")] == ["send 5", "launch", "run F"]


def test_every_step_starts_from_nothing() -> None:
    rig = Rig(
        "ZERO a\nFEED v argument 0 micro -1\nRUN F a v -> b\nFREE a\nFREE v\nFETCH b result 0"
    )
    for number in range(3):
        args = {(0, WHOLE): on_device(four(number))}
        assert values_of(rig.step(args, number=number)) == {0: (four(number) + 1).tolist()}


# Receives and sends overlap with everything else.


def test_a_receive_goes_on_until_somebody_reads_it() -> None:
    rig = Rig(
        """
        RECV x from 1 by 0 tag 5
        RECV y from 2 by 0 tag 6
        ZERO a
        RUN F a -> b
        RUN G b y -> c
        FREE a
        FREE b
        FREE y
        RUN H c x -> d
        FREE c
        FREE x
        FETCH d result 0
        """
    )
    step = rig.step()
    assert waits_for(step) == ["recv 6"]
    assert rig.done() == ["recv 5", "recv 6", "run F"]
    rig.message("recv 6").arrive(four(10))
    assert waits_for(step) == ["recv 5"]
    assert rig.done() == ["run G"]
    rig.message("recv 5").arrive(four(100))
    assert values_of(step) == {0: (four(0) + four(0) + 113).tolist()}


def test_what_has_arrived_is_not_waited_for() -> None:
    rig = Rig("RECV x from 1 by 0 tag 5\nZERO a\nRUN F a -> b\nFREE a\nFREE b\nFETCH x result 0")
    rig.transport.arrived["recv 5"] = four(3)
    assert values_of(rig.step()) == {0: four(3).tolist()}


@pytest.mark.parametrize("spare", [0, 2])
def test_a_step_that_is_woken_early_goes_on_waiting(spare: int) -> None:
    """Whoever drives may look again before all messages are there."""
    rig = Rig("RECV x from 1 by 0 tag 5\nFETCH x result 0")
    step = rig.step()
    for _ in range(1 + spare):
        assert waits_for(step) == ["recv 5"]
    rig.message("recv 5").arrive(four(0))
    assert values_of(step) == {0: four(0).tolist()}


def test_what_nobody_reads_arrives_before_the_step_ends() -> None:
    """Else its message would be taken for that of the next step."""
    rig = Rig("RECV x from 1 by 0 tag 5")
    step = rig.step()
    assert waits_for(step) == ["recv 5"]
    rig.message("recv 5").arrive(four(0))
    assert end_of(step) == {}


def test_a_free_of_what_still_arrives_waits_for_it() -> None:
    rig = Rig("RECV x from 1 by 0 tag 5\nFREE x\nZERO a\nFETCH a result 0")
    step = rig.step()
    assert waits_for(step) == ["recv 5"]
    rig.message("recv 5").arrive(four(0))
    assert set(end_of(step)) == {0}


def test_a_send_goes_on_without_its_partner() -> None:
    rig = Rig(
        "ZERO a\nSEND a to 1 by 0 tag 5\nRUN F a -> b\nSEND b to 1 by 0 tag 6\n"
        "FREE a\nFETCH b result 0"
    )
    step = rig.step()
    assert waits_for(step) == ["send 5"]
    assert rig.done() == ["send 5", "run F", "send 6"]
    rig.message("send 5").leave()
    assert waits_for(step) == ["send 6"]
    assert rig.message("send 6").leave().tolist() == [1.0] * 4
    assert values_of(step) == {0: [1.0] * 4}


def test_what_is_donated_must_have_left_to_all_its_peers() -> None:
    rig = Rig(
        "ZERO a\nSEND a to 1 by 0 tag 5\nSEND a to 2 by 0 tag 6\nRUN F a -> b\nFETCH b result 0",
        donated={"F": (0,)},
    )
    step = rig.step()
    assert waits_for(step) == ["send 5"]
    rig.message("send 5").leave()
    assert waits_for(step) == ["send 6"]
    assert rig.done() == ["send 5", "send 6"], "the memory must not be given to F yet"
    assert rig.message("send 6").leave().tolist() == [0.0] * 4
    assert values_of(step) == {0: [1.0] * 4}
    assert rig.done() == ["run F"]


def test_only_the_donated_input_is_waited_for() -> None:
    rig = Rig(
        "ZERO a\nZERO b\nSEND a to 1 by 0 tag 5\nSEND b to 1 by 0 tag 6\n"
        "RUN F a b -> c\nFREE a\nFETCH c result 0",
        donated={"F": (1,)},
    )
    step = rig.step()
    assert waits_for(step) == ["send 6"]
    rig.message("send 6").leave()
    assert waits_for(step) == ["send 5"]
    assert rig.done() == ["send 5", "send 6", "run F"]


def test_a_freed_buffer_that_still_leaves_goes_on_and_keeps_its_bytes() -> None:
    rig = Rig(
        "FEED v argument 0 micro -1\nRUN F v -> a\nFREE v\nSEND a to 1 by 0 tag 5\nFREE a\n"
        "ZERO b\nRUN G b -> c\nFREE b\nFETCH c result 0"
    )
    step = rig.step({(0, WHOLE): on_device(four(0))})
    assert waits_for(step) == ["send 5"]
    assert rig.done() == ["run F", "send 5", "run G"]
    assert rig.message("send 5").leave().tolist() == (four(0) + 1).tolist()
    assert set(end_of(step)) == {0}


def test_memory_of_a_freed_buffer_is_given_back_when_it_has_left() -> None:
    made: list[weakref.ref[Any]] = []

    def make(array: Any) -> list[Any]:
        result = on_device(np.asarray(array) + 1)
        made.append(weakref.ref(result))
        return [result]

    rig = Rig("ZERO a\nRUN F a -> b\nFREE a\nSEND b to 1 by 0 tag 5\nFREE b", {"F": make})
    step = rig.step()
    waits_for(step)
    memory = weakref.ref(rig.message("send 5").array)
    gc.collect()
    assert made[0]() is None, "the list has freed it"
    assert memory() is not None, "but it still leaves"
    rig.message("send 5").leave()
    end_of(step)
    gc.collect()
    assert memory() is None


def test_nothing_is_kept_after_a_step() -> None:
    kept: list[weakref.ref[Any]] = []

    def keep(array: Any) -> list[Any]:
        kept.append(weakref.ref(array))
        return [on_device(array)]

    rig = Rig("FEED v argument 0 micro -1\nRUN F v -> a\nFREE v\nFETCH a result 0", {"F": keep})
    args = {(0, WHOLE): on_device(four(0))}
    results = end_of(rig.step(args))
    kept.append(weakref.ref(results[0]))
    del args, results
    gc.collect()
    assert [array() for array in kept] == [None, None]


def test_a_step_that_is_given_up_keeps_nothing() -> None:
    rig = Rig("FEED v argument 0 micro -1\nRECV x from 1 by 0 tag 5\nFREE x\nFETCH v result 0")
    args = {(0, WHOLE): on_device(four(0))}
    step = rig.step(args)
    waits_for(step)
    argument = weakref.ref(args[0, WHOLE])
    step.close()
    del args
    gc.collect()
    assert argument() is None
    assert rig.executor.progress().pending == ()


# Results and arguments.


def pointer(array: Any) -> int:
    return int(array.unsafe_buffer_pointer())


def test_a_borrowed_argument_is_copied_and_one_given_away_is_not() -> None:
    rig = Rig(
        "FEED v argument 0 micro -1\nFEED w argument 1 micro -1\nFETCH v result 0\nFETCH w result 1"
    )
    args = {(0, WHOLE): on_device(four(0)), (1, WHOLE): on_device(four(1))}
    results = end_of(rig.step(args, given_away=[(1, WHOLE)]))
    assert pointer(results[0]) != pointer(args[0, WHOLE])
    assert results[1] is args[1, WHOLE]
    args[0, WHOLE].delete()
    assert np.asarray(results[0]).tolist() == four(0).tolist()


def test_what_becomes_two_results_is_two_arrays() -> None:
    """Each may be given away on its own."""
    rig = Rig("ZERO a\nRUN F a -> b\nFREE a\nFETCH b result 0\nFETCH b result 1")
    results = end_of(rig.step())
    assert pointer(results[0]) != pointer(results[1])
    results[0].delete()
    assert np.asarray(results[1]).tolist() == [1.0] * 4


def test_constants_stay_and_their_results_are_copies() -> None:
    constant = on_device(four(7))
    rig = Rig("RUN F c -> a\nFREE a\nFETCH c result 0", persistent={"c": constant})
    for _ in range(2):
        results = end_of(rig.step())
        assert pointer(results[0]) != pointer(constant)
        results[0].delete()
    assert not constant.is_deleted()


def test_micro_batches_are_fed_one_by_one() -> None:
    count = 3
    text = "".join(
        f"FEED v.{micro} argument 2 micro {micro}\nRUN F v.{micro} -> w.{micro}\nFREE v.{micro}\n"
        f"FETCH w.{micro} result {micro}\n"
        for micro in reversed(range(count))
    )
    rig = Rig(text)
    args = {(2, micro): on_device(four(10 * micro)) for micro in range(count)}
    expected = {micro: (four(10 * micro) + 1).tolist() for micro in range(count)}
    assert values_of(rig.step(args)) == expected


@pytest.mark.parametrize(
    ("micro", "given", "texts"),
    [
        (WHOLE, None, ["argument 2 was not given to this worker"]),
        (1, None, ["argument 2, micro-batch 1 was not given to this worker"]),
        (
            WHOLE,
            np.zeros(3, np.float32),
            ["argument 2 is not what the step was made for", "float32[3]", "says float32[4]"],
        ),
        (1, np.zeros(4, np.int32), ["argument 2, micro-batch 1 is not", "int32[4]"]),
        (WHOLE, np.zeros((), np.float32), ["float32[]", "says float32[4]"]),
    ],
)
def test_an_argument_that_does_not_fit_is_named(micro: int, given: Any, texts: list[str]) -> None:
    rig = Rig(f"FEED v argument 2 micro {micro}\nFETCH v result 0")
    args = {} if given is None else {(2, micro): on_device(given)}
    error = str(failure_of(rig, args))
    assert "worker 0 (stage 0) failed in step 0 at instruction 0: FEED v argument 2" in error
    for text in texts:
        assert text in error


def test_sizes_of_zero_and_no_dims_travel() -> None:
    rig = Rig(
        "RECV x from 1 by 0 tag 5\nRECV y from 1 by 1 tag 6\nFETCH x result 0\nFETCH y result 1",
        specs={"x": spec(0, 3), "y": spec(dtype="int32")},
    )
    step = rig.step()
    assert waits_for(step) == ["recv 6"], "nothing is sent of an array without elements"
    rig.message("recv 6").arrive(np.array(7, np.int32))
    results = end_of(step)
    assert results[0].shape == (0, 3)
    assert int(results[1]) == 7


# Where programs are queued, a step only waits for the last but one.


class Queued:
    """An array that is not there yet."""

    def __init__(self, name: str, log: list[str], *, deleted: bool = False) -> None:
        self._name = name
        self._log = log
        self._deleted = deleted

    def block_until_ready(self) -> None:
        self._log.append(f"await {self._name}")

    def is_deleted(self) -> bool:
        return self._deleted


def test_each_run_is_awaited_on_cpu() -> None:
    log: list[str] = []

    def task(name: str) -> Any:
        def run(array: Any) -> list[Any]:
            log.append(f"run {name}")
            return [Queued(name, log)]

        return run

    rig = Rig(
        "ZERO a\nRUN F a -> b\nRUN G b -> c\nFREE a\nFREE b\nFREE c",
        {"F": task("F"), "G": task("G")},
    )
    end_of(rig.step())
    assert log == ["run F", "await F", "run G", "await G"]


@pytest.mark.parametrize("deleted", [False, True])
def test_elsewhere_steps_are_queued_up_to_a_bound(*, deleted: bool) -> None:
    log: list[str] = []
    numbers = iter(range(10))

    def task(*_: Any) -> list[Any]:
        name = str(next(numbers))
        log.append(f"run {name}")
        return [Queued(name, log, deleted=deleted)]

    rig = Rig("ZERO a\nRUN F a -> b\nFREE a\nFREE b", {"F": task}, awaits=False)
    for number in range(4):
        end_of(rig.step(number=number))
    expected = []
    for number in range(4):
        if number >= STEPS_IN_FLIGHT and not deleted:  # what was given away cannot be awaited
            expected.append(f"await {number - STEPS_IN_FLIGHT}")
        expected.append(f"run {number}")
    assert log == expected
