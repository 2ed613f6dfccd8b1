"""Instruction lists of real pipelines: they print and parse back, and every mutation is found."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import replace

import pytest

import autopar as ap
from autopar.errors import AutoparError
from autopar.lower.instruction_text import (
    instructions_text,
    parse_instruction,
    parse_instructions,
    worker_program_from_json,
    worker_program_to_json,
)
from autopar.lower.instructions import (
    Feed,
    Fetch,
    Free,
    Instruction,
    Mark,
    Recv,
    Run,
    Send,
    StepProgram,
    WorkerProgram,
    Zero,
)
from autopar.lower.verify_instructions import verify_no_deadlock, verify_step
from autopar.staged import StagedPlan
from tests.models.headed import headed_model


@functools.cache
def step_program() -> StepProgram:
    model = headed_model()
    plan = ap.make_plan(
        model.step,
        *model.args,
        cluster="abstract:1x6",
        method=ap.PipeshardParallel(4, stages=ap.UniformStages(3)),
        batch_argnums=(2,),
    )
    assert isinstance(plan, StagedPlan)
    return plan.lower().step


def test_a_pipeline_is_valid_and_does_not_deadlock() -> None:
    step = step_program()
    verify_step(step)
    verify_no_deadlock(step)
    kinds = {type(item) for worker in step.workers for item in worker.instructions}
    assert kinds == {Feed, Fetch, Free, Mark, Recv, Run, Send, Zero}


def test_lists_print_and_parse_back() -> None:
    for worker in step_program().workers:
        text = instructions_text(worker.instructions)
        assert parse_instructions(text) == worker.instructions
        data = json.loads(json.dumps(worker_program_to_json(worker)))
        assert worker_program_from_json(data) == worker


@pytest.mark.parametrize("text", ["", "RUN", "SEND v1 to 2", "JUMP 3", "FEED v1 argument x"])
def test_what_is_no_instruction(text: str) -> None:
    with pytest.raises(AutoparError):
        parse_instruction(text)


def mutate(worker: WorkerProgram, rng: random.Random, how: str) -> tuple[Instruction, ...] | None:
    """The list with one fault; None if it has no place for it."""
    code = list(worker.instructions)
    kinds: dict[str, type | tuple[type, ...]] = {
        "drop a free": Free,
        "drop a receive": Recv,
        "drop a send": Send,
        "drop a feed": Feed,
        "drop a fetch": Fetch,
        "double a free": Free,
        "double a run": Run,
        "early free": Free,
        "another tag": (Send, Recv),
        "another peer": (Send, Recv),
        "unknown buffer": (Free, Send),
        "unknown task": Run,
        "swapped inputs": Run,
    }
    places = [n for n, item in enumerate(code) if isinstance(item, kinds[how])]
    if not places:
        return None
    place = rng.choice(places)
    item = code[place]
    if how.startswith("drop"):
        code.pop(place)
    elif how.startswith("double"):
        code.insert(place, item)
    elif how == "early free":
        assert isinstance(item, Free)
        first = next(n for n, other in enumerate(code) if item.buffer in str(other))
        code.insert(first + 1, code.pop(place))
        return tuple(code) if place > first + 1 else None
    elif how == "another tag":
        assert isinstance(item, Send | Recv)
        code[place] = replace(item, tag=item.tag + 1000)
    elif how == "another peer":
        assert isinstance(item, Send | Recv)
        code[place] = replace(item, peer=(item.peer + 1) % 3)
    elif how == "unknown buffer":
        assert isinstance(item, Send | Free)
        code[place] = replace(item, buffer="nothing")
    elif how == "unknown task":
        assert isinstance(item, Run)
        code[place] = replace(item, task="X")
    else:
        assert isinstance(item, Run)
        specs = dict(worker.buffers)
        inputs = list(item.inputs)
        other = next(
            (n for n in range(1, len(inputs)) if specs[inputs[n]] != specs[inputs[0]]), None
        )
        if other is None:
            return None
        inputs[0], inputs[other] = inputs[other], inputs[0]
        code[place] = replace(item, inputs=tuple(inputs))
    return tuple(code)


MUTATIONS = (
    "drop a free",
    "drop a receive",
    "drop a send",
    "drop a feed",
    "drop a fetch",
    "double a free",
    "double a run",
    "early free",
    "another tag",
    "another peer",
    "unknown buffer",
    "unknown task",
    "swapped inputs",
)


def verify(step: StepProgram) -> None:
    verify_step(step)
    verify_no_deadlock(step)


@pytest.mark.parametrize("how", MUTATIONS)
def test_every_mutation_is_found(how: str, *, full: bool) -> None:
    step = step_program()
    rng = random.Random(how)
    found = 0
    for _ in range(60 if full else 12):
        rank = rng.randrange(3)
        code = mutate(step.workers[rank], rng, how)
        if code is None:
            continue
        found += 1
        workers = list(step.workers)
        workers[rank] = replace(workers[rank], instructions=code)
        with pytest.raises(AutoparError):
            verify(replace(step, workers=tuple(workers)))
    assert found > 3


def test_a_receive_before_its_turn_deadlocks_under_rendezvous() -> None:
    """A worker that receives an answer before it has sent the question waits for ever."""
    step = step_program()
    for rank, worker in enumerate(step.workers):
        code = list(worker.instructions)
        sends = {i.peer: n for n, i in reversed(list(enumerate(code))) if isinstance(i, Send)}
        receives = {i.peer: n for n, i in enumerate(code) if isinstance(i, Recv)}
        peer = next((p for p in sends if sends[p] < receives.get(p, -1)), None)
        if peer is None:
            continue
        code.insert(sends[peer], code.pop(receives[peer]))
        workers = list(step.workers)
        workers[rank] = replace(worker, instructions=tuple(code))
        with pytest.raises(AutoparError, match="wait for each other"):
            verify_no_deadlock(replace(step, workers=tuple(workers)))
        return
    pytest.fail("no worker sends and then receives from the same peer")
