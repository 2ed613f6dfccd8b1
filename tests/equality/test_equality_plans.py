"""Small models under many plans: loss, gradients and new state are the single device's.

The solver's plan, data parallel and 20 random plans, of three models, on four meshes.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from autopar.lower.program import RunOp
from autopar.runtime.local import LocalProgram, local_devices
from tests.models.small_models import NAMES, small_model
from tests.oracles.random_plans import (
    ALL_KINDS,
    RANDOM_PLANS,
    SHAPES,
    Case,
    kinds_of,
    program_for,
    random_cases,
    random_decisions,
    split_share,
    traced,
)
from tests.oracles.single_device import differences, single_device

# What `make test` runs; a program of the GPT takes ten times the compile time of another.
SAMPLE = (
    *(Case(name, (2, 4), plan) for name in NAMES for plan in ("solver", "data")),
    *(Case(name, (3,), plan) for name in NAMES for plan in ("solver", "data")),
    *(Case(name, shape, "0") for name in ("mlp", "convnet") for shape in SHAPES),
    *(Case(name, (2, 4), "3") for name in ("mlp", "convnet")),
    Case("gpt", (2, 4), "0"),
    Case("gpt", (6,), "3"),
)

LEAST_SPLIT = 0.6
"""Share of the ops that every random plan divides, at least."""

shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
names = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def _forget_compiled_programs() -> Iterator[None]:
    """Hundreds of programs are compiled and run once each; kept, they fill the memory."""
    yield
    jax.clear_caches()


def _all_cases() -> list[Any]:
    plans = ("solver", "data", *map(str, range(RANDOM_PLANS)))
    cases = [Case(name, shape, plan) for name in NAMES for shape in SHAPES for plan in plans]
    full = pytest.mark.full
    return [pytest.param(c, id=str(c), marks=() if c in SAMPLE else full) for c in cases]


@pytest.mark.parametrize("case", _all_cases())
def test_a_step_equals_the_single_device(case: Case) -> None:
    model, known, program = small_model(case.model), traced(case.model), program_for(case)
    devices = local_devices(program.mesh.size)
    local = LocalProgram(program, known.rules, devices, known.built.hidden)
    results = local.run(jax.tree.leaves(model.args))
    expected = single_device(case.model)
    found = jax.tree.unflatten(jax.tree.structure(expected), results)
    assert differences(model, model.args, expected, found) == []


@shapes
@names
def test_random_plans_are_distinct_and_split(name: str, shape: tuple[int, ...]) -> None:
    cases = random_cases((name,), (shape,))
    made = [random_decisions(case) for case in cases]
    assert len({(d.inputs, d.ops, d.settled) for d in made}) == RANDOM_PLANS
    assert min(map(split_share, made)) >= LEAST_SPLIT


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(tuple(case for case in SAMPLE if case.plan.isdigit()), id="sample"),
        pytest.param(random_cases(), id="all", marks=pytest.mark.full),
    ],
)
def test_random_plans_use_every_kind_of_strategy_and_step(cases: tuple[Case, ...]) -> None:
    counts: collections.Counter[str] = collections.Counter()
    for case in cases:
        counts.update(kinds_of(program_for(case), traced(case.model).rules))
    print(f"{len(cases)} plans:", *(f"{kind}: {counts[kind]}," for kind in sorted(counts)))
    assert {kind: counts[kind] for kind in ALL_KINDS if not counts[kind]} == {}
    assert set(counts) == set(ALL_KINDS)


@shapes
@names
def test_the_plan_of_the_solver_is_worth_comparing(name: str, shape: tuple[int, ...]) -> None:
    program = program_for(Case(name, shape, "solver"))
    ops = [step for step in program.steps if isinstance(step, RunOp)]
    assert sum(op.strategy.work > 1 for op in ops) > 0.5 * len(ops)
    assert {c.kind for c in program.collectives} > {"all-reduce"}


@shapes
@names
def test_data_parallel_only_reduces(name: str, shape: tuple[int, ...]) -> None:
    program = program_for(Case(name, shape, "data"))
    assert {c.kind for c in program.collectives} == {"all-reduce"}
    assert all(c.axes == program.mesh.names for c in program.collectives)
