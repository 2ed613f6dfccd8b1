from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from autopar.errors import SolveError
from autopar.solver.intra.elimination import solve_elimination
from autopar.solver.intra.ilp_process import solve_ilp
from autopar.solver.intra.memory_rows import solve_with_resources
from autopar.solver.intra.problem import Edge, Limits, Problem, Resource, evaluate
from autopar.solver.intra.simplify import EXACT_PASSES, simplify
from autopar.solver.intra.solve import SOLVERS, solve_problem
from tests.oracles.brute_force import (
    SCALES,
    brute_force,
    dense_problem,
    random_problem,
    with_resources,
)

relaxed = functools.partial(solve_elimination, limits=Limits())


def limited(seed: int, *, count: int, scale: float = 1.0) -> Problem:
    rng = np.random.default_rng(seed)
    if seed % 2:
        return with_resources(random_problem(rng, scale=scale, combinations=400), rng, count=count)
    problem = dense_problem(rng, nodes=5, choices=3, scale=scale)
    return with_resources(problem, rng, count=count)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_lagrangian_bound_and_answer_enclose_the_optimum(count: int, scale: float) -> None:
    feasible = found = closed = binding = 0
    for seed in range(30):
        problem = limited(seed, count=count, scale=scale)
        expected, optimum = brute_force(problem)
        try:
            choices, bound = solve_with_resources(problem, relaxed=relaxed)
        except SolveError:  # raised only with a proof
            assert expected is None
            continue
        assert bound <= optimum * (1 + 1e-9)
        cost = evaluate(problem, choices)
        assert cost >= optimum * (1 - 1e-12)
        if expected is not None:
            feasible += 1
            unlimited = brute_force(Problem(problem.node_costs, problem.edges))[1]
            binding += unlimited < optimum
            found += cost < math.inf
            closed += cost == pytest.approx(optimum, rel=1e-9)
    # The limits bind, and most answers are found and optimal all the same.
    assert binding > 8
    assert found >= 0.9 * feasible
    assert closed >= 0.8 * feasible


def test_reductions_keep_the_limited_optimum() -> None:
    for seed in range(60):
        problem = limited(seed, count=2)
        _, optimum = brute_force(problem)
        if math.isinf(optimum):
            continue
        reduced = simplify(problem, EXACT_PASSES)
        choices, value = brute_force(reduced.problem)
        assert choices is not None
        assert value + reduced.offset == pytest.approx(optimum, rel=1e-12)
        assert evaluate(problem, reduced.decode(choices)) == pytest.approx(optimum, rel=1e-12)


@pytest.mark.parametrize("backend", ["highs", "cbc"])
def test_the_ilp_keeps_resources_exactly(backend: str, *, full: bool) -> None:
    for seed in range(100 if full else 6):
        problem = limited(seed, count=1 + seed % 3, scale=SCALES[seed % 3])
        expected, optimum = brute_force(problem)
        if expected is None:
            with pytest.raises(SolveError, match="infeasible"):
                solve_ilp(problem, backend=backend, limits=Limits())
            continue
        solution = solve_ilp(problem, backend=backend, limits=Limits())
        assert solution.objective == pytest.approx(optimum, rel=1e-9, abs=0)
        assert all(r.used(solution.choices) <= r.limit for r in problem.resources)


def test_auto_closes_the_gap_that_the_relaxation_leaves() -> None:
    gaps = 0
    for seed in range(0, 16, 2):
        problem = limited(seed, count=1)
        _, optimum = brute_force(problem)
        if solve_elimination(problem, limits=Limits()).gap == 0:
            continue
        gaps += 1
        solution = solve_problem(problem)
        assert solution.objective == pytest.approx(optimum, rel=1e-12)
        assert solution.gap < 1e-8
    assert gaps > 0


def one_byte_apart(limit: float) -> Problem:
    """The cheap choice of the node needs one byte more than the dear one, out of 80 GB."""
    weights = (np.array([80e9 + 1, 80e9]),)
    return Problem((np.array([1.0, 2.0]),), resources=(Resource(weights, limit, "hbm"),))


def test_limits_hold_to_the_byte() -> None:
    """Far below the tolerance of any solver: such choices are dropped before it starts."""
    for solver in sorted(SOLVERS):
        assert solve_problem(one_byte_apart(80e9 + 1), solver=solver).objective == 1.0
        assert solve_problem(one_byte_apart(80e9), solver=solver).objective == 2.0
        with pytest.raises(SolveError, match=r"(?s)infeasible.*where: hbm"):
            solve_problem(one_byte_apart(80e9 - 1), solver=solver)


@pytest.mark.parametrize("solver", ["elimination", "ilp-highs", "ilp-cbc", "auto"])
def test_an_impossible_limit_is_named(solver: str) -> None:
    weights = (np.array([3.0, 2.0]), np.array([5.0]))
    problem = Problem(
        (np.array([0.0, 5.0]), np.array([1.0])),
        (Edge(0, 1, np.zeros((2, 1))),),
        ("a", "b"),
        (Resource(weights, 6.0, "memory at b"),),
    )
    with pytest.raises(SolveError, match="infeasible"):
        solve_problem(problem, solver=solver)


@pytest.mark.parametrize(
    "resource",
    [
        Resource((np.zeros(2), np.zeros(2)), 1.0),
        Resource((np.zeros(3),), 1.0),
        Resource((np.array([0.0, math.inf]),), 1.0),
        Resource((np.zeros(2),), math.nan),
    ],
)
def test_malformed_resources_are_refused(resource: Resource) -> None:
    with pytest.raises(SolveError, match="resource"):
        Problem((np.zeros(2),), resources=(resource,))
