"""Small models under many plans: loss, gradients and new state are the single device's.

Data parallel, the solver's plan and 20 random ones, of three models on four meshes.
"""

from __future__ import annotations

from typing import Any

import jax
import pytest

from autopar.runtime.local import LocalProgram, local_devices
from tests.models.small_models import NAMES, small_model
from tests.oracles.random_plans import (
    RANDOM_PLANS,
    SHAPES,
    Case,
    intra_model,
    program_for,
    random_decisions,
    split_share,
    traced,
)
from tests.oracles.single_device import differences, single_device

SAMPLE = frozenset(
    {
        *(
            Case(name, shape, plan)
            for name in NAMES
            for shape in ((2, 4), (3,))
            for plan in ("solver", "data")
        ),
        *(
            Case(name, shape, number)
            for name in ("mlp", "convnet")
            for shape in SHAPES
            for number in ("0", "3")
        ),
        Case("gpt", (2, 4), "0"),
        Case("gpt", (6,), "1"),
    }
)


def _all_cases() -> list[Any]:
    plans = ("solver", "data", *map(str, range(RANDOM_PLANS)))
    cases = [Case(name, shape, plan) for name in NAMES for shape in SHAPES for plan in plans]
    full = pytest.mark.full
    return [pytest.param(c, id=str(c), marks=() if c in SAMPLE else full) for c in cases]


@pytest.mark.parametrize("case", _all_cases())
def test_a_step_equals_the_single_device(case: Case) -> None:
    model, known = small_model(case.model), traced(case.model)
    program = program_for(case)
    local = LocalProgram(program, known.rules, local_devices(program.mesh.size), known.built.hidden)
    results = local.run(jax.tree.leaves(model.args))
    expected = single_device(case.model)
    found = jax.tree.unflatten(jax.tree.structure(expected), results)
    assert differences(model, model.args, expected, found) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_random_plans_are_distinct_and_split(name: str, shape: tuple[int, ...]) -> None:
    model = intra_model(name, shape)
    made = [random_decisions(Case(name, shape, str(number))) for number in range(RANDOM_PLANS)]
    assert len({(d.inputs, d.ops, d.settled) for d in made}) == RANDOM_PLANS
    assert min(split_share(model, decisions) for decisions in made) >= 0.6


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("name", NAMES)
def test_the_plan_of_the_solver_splits_the_work(name: str, shape: tuple[int, ...]) -> None:
    program = program_for(Case(name, shape, "solver"))
    assert len(program.collectives) > 0
