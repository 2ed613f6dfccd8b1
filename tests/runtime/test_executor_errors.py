"""What the interpreter tells of a step: errors with their place, progress, timelines."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from autopar.errors import TransportError, WorkerError
from autopar.lower.instructions import WHOLE
from autopar.runtime.executor import Event, Progress
from tests.runtime.lists import four
from tests.runtime.manual_transport import Rig, end_of, failure_of, on_device, values_of, waits_for

PATIENCE = 30.0


# Errors.


def test_an_exception_in_a_task_is_named_with_its_place() -> None:
    cause = ZeroDivisionError("no such number")

    def fail(array: Any) -> list[Any]:
        raise cause

    rig = Rig(
        "MARK 1B2\nRECV x from 3 by 0 tag 17\nZERO a\nSEND a to 2 by 0 tag 18\nRUN B a -> b\n"
        "FREE a\nFREE b\nFREE x",
        {"B": fail},
    )
    error = failure_of(rig, number=9)
    assert error.what == "worker 0 (stage 0) failed in step 9 at instruction 4: RUN B a -> b"
    assert error.where == "action 1B2"
    assert error.got == "ZeroDivisionError: no such number"
    assert "recv x from 3 tag 17, send a to 2 tag 18" in error.why
    assert "raise cause" in error.why, "the trace of the original error"
    assert error.__cause__ is cause
    progress = rig.executor.progress()
    assert (progress.step, progress.position) == (9, 4), "where it failed stays known"
    assert progress.pending == ()


def test_an_error_of_ours_is_told_by_its_first_sentence() -> None:
    def fail(array: Any) -> list[Any]:
        raise WorkerError("the disc is full", got="0 bytes left")

    error = failure_of(Rig("ZERO a\nRUN F a -> b\nFREE a\nFREE b", {"F": fail}))
    assert error.got == "WorkerError: the disc is full"
    assert "under way: nothing" in error.why
    assert "0 bytes left" in error.why


def test_an_error_of_a_wait_names_the_instruction_and_who_is_waited_for() -> None:
    """Whoever drives throws it in: the step knows where it was."""
    rig = Rig("RECV x from 3 by 0 tag 17\nRUN F x -> y\nFREE x\nFREE y")
    step = rig.step()
    waits_for(step)
    cause = TransportError("rank 0 waited 5 s in vain")
    with pytest.raises(WorkerError) as caught:
        step.throw(cause)
    assert "at instruction 1: RUN F x -> y" in caught.value.what
    assert "waited 5 s in vain" in caught.value.got
    assert "under way: recv x from 3 tag 17" in caught.value.why
    assert caught.value.__cause__ is cause


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RECV x from 3 by 0 tag 17\nFREE x", "recv 17"),
        ("ZERO x\nSEND x to 3 by 0 tag 17\nFREE x", "send 17"),
    ],
)
def test_a_message_that_failed_fails_the_step(text: str, name: str) -> None:
    rig = Rig(text)
    step = rig.step()
    assert waits_for(step) == [name]
    rig.message(name).fail("rank 0 lost rank 3")
    with pytest.raises(WorkerError, match="rank 0 lost rank 3"):
        next(step)


def test_a_send_that_failed_is_noticed_by_the_next() -> None:
    rig = Rig(
        "ZERO x\nSEND x to 3 by 0 tag 17\nRUN F x -> y\nSEND y to 3 by 0 tag 18\nFREE x\nFREE y"
    )

    rig.transport.launched = lambda: rig.message("send 17").fail("rank 0 lost rank 3")
    assert "at instruction 3: SEND y" in failure_of(rig).what
    assert "send 18" not in rig.done()


def test_a_step_after_one_that_failed_starts_anew() -> None:
    """The worker forbids it; the executor itself keeps nothing of the failure."""
    rig = Rig("FEED v argument 0 micro -1\nSEND v to 1 by 0 tag 5\nFETCH v result 0")
    failure_of(rig)
    step = rig.step({(0, WHOLE): on_device(four(2))}, number=1)
    assert waits_for(step) == ["send 5"]
    rig.message("send 5").leave()
    assert values_of(step) == {0: four(2).tolist()}


# Where it is.


def test_progress_tells_what_a_step_waits_for() -> None:
    rig = Rig(
        "MARK 0F0\nZERO a\nSEND a to 1 by 0 tag 4\nMARK 0B0\nRECV x from 1 by 0 tag 5\n"
        "RUN B x a -> b\nFREE a\nFREE b\nFREE x"
    )
    assert str(rig.executor.progress()) == "worker 0 (stage 0) is between steps, after step -1"
    step = rig.step(number=3)
    waits_for(step)
    text = "RUN B x a -> b"
    pending = ("send a to 1 tag 4", "recv x from 1 tag 5")
    assert rig.executor.progress() == Progress(0, "stage 0", 3, 5, text, "0B0", pending)
    assert str(rig.executor.progress()) == (
        "worker 0 (stage 0) is in step 3 at instruction 5 `RUN B x a -> b` of 0B0; "
        "pending: send a to 1 tag 4, recv x from 1 tag 5"
    )
    rig.message("recv 5").arrive(four(0))
    rig.message("send 4").leave()
    end_of(step)
    progress = rig.executor.progress()
    assert (progress.step, progress.position, progress.pending) == (3, -1, ())
    assert str(progress) == "worker 0 (stage 0) is between steps, after step 3"


def test_progress_may_be_asked_from_another_thread_while_a_task_runs() -> None:
    running, seen = threading.Event(), threading.Event()

    def task(array: Any) -> list[Any]:
        running.set()
        assert seen.wait(PATIENCE), "nobody looked"
        return [array]

    rig = Rig("MARK 2F1\nZERO a\nRUN F a -> b\nFREE a\nFREE b", {"F": task})
    found: list[Progress] = []

    def watch() -> None:
        if running.wait(PATIENCE):
            found.append(rig.executor.progress())
        seen.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    end_of(rig.step(number=6))
    watcher.join(PATIENCE)
    assert found == [Progress(0, "stage 0", 6, 2, "RUN F a -> b", "2F1", ())]


# Timelines.


def test_events_tell_runs_messages_and_waits() -> None:
    events: list[Event] = []
    rig = Rig(
        "MARK 0F0\nRECV x from 1 by 0 tag 5\nZERO a\nRUN F a -> b\nFREE a\nMARK 0F1\n"
        "SEND b to 1 by 0 tag 6\nRUN G x b -> c\nFREE x\nFREE b\nFREE c",
        recorded=events,
    )
    step = rig.step(number=2)
    waits_for(step)
    rig.message("recv 5").arrive(four(0))
    waits_for(step)
    rig.message("send 6").leave()
    end_of(step)
    assert [(event.kind, event.position, event.mark) for event in events] == [
        ("RUN", 3, "0F0"),
        ("WAIT", 7, "0F1"),
        ("RECV", 1, "0F0"),  # of the action that posted it
        ("RUN", 7, "0F1"),
        ("WAIT", 10, "0F1"),
        ("SEND", 6, "0F1"),
    ]
    texts = rig.program.instructions
    for event in events:
        assert event.step == 2
        assert event.start <= event.end
        assert event.text.split()[0] == type(texts[event.position]).__name__.upper()
    of = {(event.kind, event.position): event for event in events}
    assert of["RECV", 1].start <= of["RUN", 3].start, "it was under way meanwhile"
    assert of["RECV", 1].end <= of["RUN", 7].start


def test_a_send_that_has_left_is_told_at_the_next_free() -> None:
    events: list[Event] = []
    rig = Rig(
        "ZERO a\nSEND a to 1 by 0 tag 5\nRUN F a -> b\nFREE a\nRUN G b -> c\nFREE b\nFREE c",
        {"F": lambda array: [rig.message("send 5").leave(), array][1:]},
        recorded=events,
    )
    end_of(rig.step())
    assert [event.kind for event in events] == ["RUN", "SEND", "RUN"]
