"""The bound never exceeds what a schedule takes: named ones, and random ones of any order."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import pytest

from autopar.solver.inter.closed_form import closed_form_seconds, closed_form_splits
from autopar.solver.inter.stage_bound import Bounds
from autopar.solver.inter.stage_growth import children
from autopar.solver.inter.stage_problem import Discipline, StageProblem
from autopar.solver.inter.stage_tables import tabulate
from tests.oracles.brute_stages import (
    SCHEDULES,
    Stages,
    all_splits,
    closed_formula,
    random_orders,
    random_problem,
    simulate,
)


def bounds_on_the_way(problem: StageProblem, stages: Stages, bounds: Bounds) -> Iterator[float]:
    """The bounds of a split's beginnings, shortest first."""
    for depth, stage in enumerate(stages):
        grown = children(bounds, len(stages), stages[:depth])
        at = (grown.stop == stage.last + 1) & (grown.submesh == stage.submesh)
        assert at.sum() == 1
        yield float(grown.bound[at][0])


@pytest.mark.parametrize("discipline", [Discipline.ANY, None], ids=["any", "its own"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bounds_of_the_named_schedules(
    schedule: str, discipline: Discipline | None, *, full: bool
) -> None:
    order, _, own = SCHEDULES[schedule]
    ratios = []
    for seed in range(300 if full else 30):
        problem = random_problem(seed, schedule)
        problem = dataclasses.replace(problem, discipline=discipline or own)
        bounds = Bounds(tabulate(problem))
        for stages in all_splits(problem):
            makespan = simulate(problem, order, stages)
            way = list(bounds_on_the_way(problem, stages, bounds))
            assert max(way) <= makespan * (1 + 1e-9), (seed, stages)
            ratios.append(way[-1] / makespan)
    # And they are worth something: whole splits are bounded closely.
    assert sum(ratios) / len(ratios) > (0.99 if discipline is None else 0.9)


def _order_of(
    orders: list[list[tuple[str, int]]], stages: int, stage: int, micro_batches: int
) -> list[tuple[str, int]]:
    assert len(orders) == stages
    assert len(orders[stage]) == 2 * micro_batches
    return list(orders[stage])


@pytest.mark.parametrize("capped", [False, True], ids=["any", "capped"])
def test_bounds_of_random_schedules(capped: bool, *, full: bool) -> None:  # noqa: FBT001
    checked = 0
    for seed in range(200 if full else 25):
        problem = random_problem(seed, "1f1b")
        m = problem.micro_batches

        def live(stages: int, index: int, micro_batches: int, seed: int = seed) -> int:
            drawn = 1 + (5 * index + 3 * stages + seed) % micro_batches
            return drawn if capped else micro_batches

        discipline = Discipline.CAPPED if capped else Discipline.ANY
        problem = dataclasses.replace(problem, live=live, discipline=discipline)
        bounds = Bounds(tabulate(problem))
        for number, stages in enumerate(list(all_splits(problem))[:40]):
            orders = random_orders(seed + number, problem.tail(len(stages)), m)
            makespan = simulate(problem, functools.partial(_order_of, orders), stages)
            for bound in bounds_on_the_way(problem, stages, bounds):
                assert bound <= makespan * (1 + 1e-9), (seed, stages)
            checked += 1
    assert checked > 150


def test_gpipe_bound_is_its_makespan_without_updates() -> None:
    # Sum of all F, B and transfers + (m - 1) (max F + max B).
    compared = 0
    for seed in range(40):
        problem = random_problem(seed, "gpipe")
        problem = dataclasses.replace(problem, discipline=Discipline.FORWARDS_FIRST)
        bounds = Bounds(tabulate(problem))
        for stages in all_splits(problem):
            costs = [problem.cost(*stage) for stage in stages]
            if any(cost is None or cost.update for cost in costs):
                continue
            *_, last = bounds_on_the_way(problem, stages, bounds)
            makespan = simulate(problem, SCHEDULES["gpipe"][0], stages)
            assert last == pytest.approx(makespan, rel=1e-9)
            compared += 1
    assert compared > 30


@pytest.mark.parametrize("memory", [False, True], ids=["free", "memory"])
def test_closed_form_equals_brute_force(memory: bool, *, full: bool) -> None:  # noqa: FBT001
    compared = 0
    for seed in range(400 if full else 60):
        problem = random_problem(seed, "1f1b", memory=memory)
        # One row of devices: every sequence of submeshes tiles it.
        if problem.mesh[0] > 1:
            continue
        costs = tabulate(problem)
        forms = closed_form_splits(costs)
        values = {stages: closed_formula(problem, stages) for stages in all_splits(problem)}
        assert forms[0].seconds == pytest.approx(min(values.values()), rel=1e-9), seed
        for form in forms:
            assert form.seconds == pytest.approx(values[form.stages], rel=1e-9)
            assert form.seconds == closed_form_seconds(costs, form.stages)
        assert len({len(form.stages) for form in forms}) == len(forms)
        compared += 1
    assert compared > 30


def test_closed_form_of_nothing() -> None:
    problem = random_problem(3, "gpipe")
    nothing = dataclasses.replace(problem, cost=lambda first, last, submesh: None)
    assert closed_form_splits(tabulate(nothing)) == ()
    full = dataclasses.replace(problem, memory_bytes=-math.inf)
    assert closed_form_splits(tabulate(full)) == ()
