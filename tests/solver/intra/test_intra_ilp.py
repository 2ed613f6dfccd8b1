from __future__ import annotations

import math

import numpy as np
import pulp
import pytest

from autopar.solver.intra import ilp
from autopar.solver.intra.backends import BACKENDS
from autopar.solver.intra.ilp import cost_scale, decode, formulate
from autopar.solver.intra.ilp_process import GRACE_SECONDS, run_backend, solve_ilp
from autopar.solver.intra.problem import Edge, Limits, Problem, evaluate
from autopar.solver.intra.simplify import merge_edges
from tests.oracles.brute_force import (
    SCALES,
    brute_force,
    dense_problem,
    disjoint_union,
    random_problem,
)

LIMITS = Limits(time_limit=120.0)


def feasible_problems(first: int, count: int, scale: float) -> tuple[list[Problem], list[float]]:
    problems, optima = [], []
    for seed in range(first, first + count):
        problem = random_problem(np.random.default_rng(seed), scale=scale, combinations=400)
        choices, optimum = brute_force(problem)
        if choices is not None:
            problems.append(problem)
            optima.append(optimum)
    return problems, optima


def split_objectives(problems: list[Problem], choices: tuple[int, ...]) -> list[float]:
    values, start = [], 0
    for problem in problems:
        stop = start + len(problem.sizes)
        values.append(evaluate(problem, choices[start:stop]))
        start = stop
    return values


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("scale", SCALES)
def test_equals_brute_force(backend: str, scale: float, *, full: bool) -> None:
    """Many problems side by side in one model, so that one process solves them all."""
    problems, optima = feasible_problems(0, 330 if full else 60, scale)
    solution = solve_ilp(disjoint_union(problems), backend=backend, limits=LIMITS)
    values = split_objectives(problems, solution.choices)
    assert values == pytest.approx(optima, rel=1e-9, abs=0)
    assert solution.objective == pytest.approx(math.fsum(optima), rel=1e-9, abs=0)
    assert solution.lower_bound <= solution.objective
    assert solution.gap < 1e-8


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("scale", SCALES)
def test_equals_brute_force_without_reductions(backend: str, scale: float, *, full: bool) -> None:
    """The model itself: impossible entries, single choices and dominated ones are all in it."""
    problems, optima = feasible_problems(1000, 330 if full else 40, scale)
    merged = merge_edges(disjoint_union(problems)).problem
    answer = run_backend(merged, BACKENDS[backend], seconds=120.0, grace=GRACE_SECONDS)
    assert answer.choices is not None
    assert split_objectives(problems, answer.choices) == pytest.approx(optima, rel=1e-9, abs=0)
    assert answer.bound == pytest.approx(math.fsum(optima), rel=1e-8, abs=0)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_dense_problems_need_branching_and_come_out_exact(backend: str) -> None:
    problems = [
        dense_problem(np.random.default_rng(s), nodes=6, choices=3, scale=1e-8) for s in range(6)
    ]
    optima = [brute_force(p)[1] for p in problems]
    solution = solve_ilp(disjoint_union(problems), backend=backend, limits=LIMITS)
    values = split_objectives(problems, solution.choices)
    assert values == pytest.approx(optima, rel=1e-9, abs=0)


def test_the_model_has_the_documented_size_and_unique_names() -> None:
    inf = math.inf
    nodes = (np.array([1.0, inf, 2.0]), np.array([0.0, 4.0]))
    problem = Problem(nodes, (Edge(0, 1, np.array([[1.0, inf], [1.0, 1.0], [8.0, 2.0]])),))
    formulation = formulate(problem)
    names = [v.name for v in formulation.model.variables()]
    assert len(names) == len(set(names)) == 2 + 2 + 5
    assert [v is None for v in formulation.x[0]] == [False, True, False]
    assert (0, 1) not in formulation.y[0]
    # One row per node, and one per choice at each end of each edge.
    assert formulation.model.numConstraints() == 2 + 5
    assert all(v.cat == pulp.LpInteger for row in formulation.x for v in row if v is not None)
    assert all(v.cat == pulp.LpContinuous for v in formulation.y[0].values())


def test_the_median_cost_of_a_model_is_one() -> None:
    rng = np.random.default_rng(0)
    for scale in SCALES:
        problem = random_problem(rng, scale=scale)
        formulation = formulate(problem)
        coefficients = [abs(c) for c in formulation.model.objective.values() if c]
        assert np.median(coefficients) == pytest.approx(1.0, rel=1e-12)
    assert cost_scale(Problem(())) == cost_scale(Problem((np.zeros(3),))) == 1.0


def test_decoding_takes_the_largest_value() -> None:
    formulation = formulate(Problem((np.array([1.0, 1.0, math.inf]), np.array([0.0]))))
    for variable, value in zip(formulation.x[0][:2], (1e-7, 1.0 - 1e-7), strict=True):
        assert variable is not None
        variable.varValue = value
    assert decode(formulation) == (1, 0)


def needs_scaling() -> Problem:
    """Costs of 1e-11 s and below, less than the solvers' absolute tolerances of 1e-9."""
    return dense_problem(np.random.default_rng(0), nodes=7, choices=4, scale=1e-14)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_scaling_is_what_makes_small_costs_exact(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = needs_scaling()
    _, optimum = brute_force(problem)
    scaled = ilp.solve(problem, BACKENDS[backend], 60.0)
    assert scaled.choices is not None
    assert evaluate(problem, scaled.choices) == pytest.approx(optimum, rel=1e-9, abs=0)
    monkeypatch.setattr(ilp, "cost_scale", lambda _problem: 1.0)
    unscaled = ilp.solve(problem, BACKENDS[backend], 60.0)
    assert unscaled.choices is not None
    assert evaluate(problem, unscaled.choices) > optimum * 1.3


def too_hard_for_two_seconds() -> Problem:
    return dense_problem(np.random.default_rng(1), nodes=14, choices=7)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_time_out_reports_the_true_bound_and_gap(backend: str) -> None:
    problem = too_hard_for_two_seconds()
    solution = solve_ilp(problem, backend=backend, limits=Limits(time_limit=2.0))
    assert "time limit" in solution.notes[0].lower()
    assert 0 < solution.lower_bound < solution.objective
    assert solution.objective == evaluate(problem, solution.choices)
    assert solution.gap == pytest.approx(1 - solution.lower_bound / solution.objective)
    assert solution.gap > 0.01
