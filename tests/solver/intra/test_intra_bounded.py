from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autopar.errors import SolveError
from autopar.solver.intra.bounded import solve_bounded
from autopar.solver.intra.elimination import solve_elimination
from autopar.solver.intra.problem import Edge, Limits, Problem, evaluate
from autopar.solver.intra.simplify import merge_edges
from tests.oracles.brute_force import SCALES, brute_force, dense_problem, random_problem

WORK = 1 << 24


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("table_bytes", [1, 1000, 10_000])
def test_bound_and_answer_enclose_the_optimum(table_bytes: int, scale: float) -> None:
    gaps = []
    for seed in range(12):
        problem = dense_problem(np.random.default_rng(seed), nodes=8, choices=4, scale=scale)
        exact = solve_elimination(problem, limits=Limits())
        assert exact.gap == 0
        solution = solve_elimination(problem, limits=Limits(table_bytes=table_bytes))
        assert solution.lower_bound <= exact.objective * (1 + 1e-12)
        assert solution.objective >= exact.objective * (1 - 1e-12)
        assert solution.objective == evaluate(problem, solution.choices)
        bounded = any("bounded, not exact" in note for note in solution.notes)
        assert bounded or solution.gap == 0
        gaps.append(solution.gap)
    # The limits bite, and the answers are not nonsense.
    assert 0 < np.mean(gaps) < 0.8


def test_more_bytes_never_loosen_much_and_enough_are_exact() -> None:
    problem = dense_problem(np.random.default_rng(3), nodes=9, choices=4)
    bounds = [
        solve_elimination(problem, limits=Limits(table_bytes=b)).lower_bound
        for b in (1, 20_000, 1 << 30)
    ]
    assert bounds == sorted(bounds)
    exact = solve_elimination(problem, limits=Limits())
    assert bounds[-1] == exact.objective


def test_with_room_the_bound_is_the_optimum() -> None:
    for seed in range(40):
        problem = random_problem(np.random.default_rng(seed), combinations=300)
        problem = merge_edges(problem).problem
        choices, optimum = brute_force(problem)
        if choices is None:
            continue
        found, bound = solve_bounded(problem, table_bytes=1 << 24, entries=WORK)
        assert bound == pytest.approx(optimum, rel=1e-12)
        assert evaluate(problem, found) == pytest.approx(optimum, rel=1e-12)


def test_rounds_repair_impossible_pairs() -> None:
    """All nodes must agree: a greedy answer from small tables can break that, rounds mend it."""
    same = np.where(np.eye(4, dtype=bool), 0.0, math.inf)
    rng = np.random.default_rng(0)
    edges = tuple(
        Edge(a, b, same + rng.random((4, 4))) for a, b in itertools.combinations(range(7), 2)
    )
    problem = Problem(tuple(rng.random(4) for _ in range(7)), edges)
    found, bound = solve_bounded(problem, table_bytes=1, entries=WORK)
    best = min(evaluate(problem, (k,) * 7) for k in range(4))
    assert bound <= best
    assert evaluate(problem, found) < math.inf


def test_no_feasible_answer_within_the_limits_is_an_error() -> None:
    # Five nodes that must differ with four colours: infeasible, but no small table shows it.
    differ = np.where(np.eye(4, dtype=bool), math.inf, 0.0)
    edges = tuple(Edge(a, b, differ) for a, b in itertools.combinations(range(5), 2))
    problem = Problem((np.zeros(4),) * 5, edges)
    with pytest.raises(SolveError, match=r"(?s)no feasible choice was found.*ilp-highs"):
        solve_elimination(problem, limits=Limits(table_bytes=1))
    with pytest.raises(SolveError, match="infeasible"):
        solve_elimination(problem, limits=Limits())
