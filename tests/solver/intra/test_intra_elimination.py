from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autopar.errors import SolveError
from autopar.solver.intra.elimination import solve_elimination
from autopar.solver.intra.problem import Edge, Limits, Problem, evaluate
from tests.oracles.brute_force import SCALES, brute_force, dense_problem, random_problem
from tests.oracles.hash_seeds import printed

LIMITS = Limits()


@pytest.mark.parametrize("scale", SCALES)
def test_equals_brute_force(scale: float, *, full: bool) -> None:
    infeasible = 0
    seeds = 1000 if full else 130
    for seed in range(seeds):
        problem = random_problem(np.random.default_rng(seed), scale=scale, combinations=1000)
        choices, optimum = brute_force(problem)
        if choices is None:
            infeasible += 1
            with pytest.raises(SolveError, match="infeasible"):
                solve_elimination(problem, limits=LIMITS)
            continue
        solution = solve_elimination(problem, limits=LIMITS)
        assert solution.objective == pytest.approx(optimum, rel=1e-12, abs=0), seed
        assert solution.objective == evaluate(problem, solution.choices)
        assert (solution.gap, solution.lower_bound) == (0.0, solution.objective)
    assert infeasible < 0.1 * seeds


@pytest.mark.parametrize("scale", SCALES)
def test_equals_brute_force_on_complete_graphs(scale: float) -> None:
    for seed in range(30):
        problem = dense_problem(np.random.default_rng(seed), nodes=6, choices=3, scale=scale)
        _, optimum = brute_force(problem)
        solution = solve_elimination(problem, limits=LIMITS)
        assert solution.objective == pytest.approx(optimum, rel=1e-12, abs=0)


def layers(count: int) -> Problem:
    """Equal layers of four nodes, complete inside and joined one to one: width 4 and more."""
    rng = np.random.default_rng(5)
    inner = {p: rng.integers(0, 9, (4, 4)) / 1.0 for p in itertools.combinations(range(4), 2)}
    outer = {(i, i): rng.integers(0, 9, (4, 4)) / 1.0 for i in range(4)}
    costs = [rng.integers(0, 3, 4).astype(np.float64) for _ in range(4)]
    edges = []
    for layer in range(count):
        edges += [Edge(4 * layer + a, 4 * layer + b, t) for (a, b), t in inner.items()]
        if layer:
            edges += [Edge(4 * layer - 4 + a, 4 * layer + b, t) for (a, b), t in outer.items()]
    return Problem(tuple(costs) * count, tuple(edges))


def test_shared_steps_change_nothing() -> None:
    problem = layers(8)
    shared = solve_elimination(problem, limits=LIMITS, reuse=True)
    alone = solve_elimination(problem, limits=LIMITS, reuse=False)
    assert shared.choices == alone.choices
    assert shared.objective == alone.objective


def test_many_choices() -> None:
    rng = np.random.default_rng(0)
    tables = [rng.random((300, 300)) * 9 for _ in range(6)]
    edges = tuple(
        Edge(a, b, t) for (a, b), t in zip(itertools.combinations(range(4), 2), tables, strict=True)
    )
    # Node 3 can only take its last two choices, so that the rest can be checked by numpy.
    last = np.where(np.arange(300) < 298, math.inf, 0.0)
    few = np.where(np.arange(300) < 296, math.inf, 1.0)
    problem = Problem((np.zeros(300), np.zeros(300), few, last), edges)
    by_pair = []
    for c, d in itertools.product(range(296, 300), range(298, 300)):
        total = tables[0] + (tables[1][:, c] + tables[2][:, d])[:, None]
        total = total + tables[3][:, c] + tables[4][:, d]
        by_pair.append(total.min() + tables[5][c, d] + 1.0)
    solution = solve_elimination(problem, limits=LIMITS)
    assert solution.objective == pytest.approx(min(by_pair), rel=1e-12)


@pytest.mark.parametrize("costs", [[], [[3.0]], [[3.0, 1.0]], [[0.0, 0.0]]])
def test_smallest_problems(costs: list[list[float]]) -> None:
    problem = Problem(tuple(np.array(c) for c in costs))
    solution = solve_elimination(problem, limits=LIMITS)
    assert solution.objective == sum(min(c) for c in costs)
    assert solution.choices == tuple(c.index(min(c)) for c in costs)
    assert solution.gap == 0.0


def test_negative_costs_are_allowed() -> None:
    problem = Problem((np.array([-1.0, -2.0]), np.zeros(2)), (Edge(0, 1, -np.eye(2)),))
    solution = solve_elimination(problem, limits=LIMITS)
    assert solution.objective == -3.0
    assert solution.choices == (1, 1)


def test_infeasible_kernels_are_refused() -> None:
    # Four nodes that must all differ, with three colours; every pair and choice has partners.
    differ = np.where(np.eye(3, dtype=bool), math.inf, 0.0)
    edges = tuple(Edge(a, b, differ) for a, b in itertools.combinations(range(4), 2))
    problem = Problem((np.zeros(3),) * 4, edges, ("a", "b", "c", "d"))
    with pytest.raises(SolveError, match=r"(?s)infeasible.*where: a"):
        solve_elimination(problem, limits=LIMITS)


def test_work_limit_bounds_the_answer_too() -> None:
    problem = dense_problem(np.random.default_rng(0), nodes=8, choices=4)
    solution = solve_elimination(problem, limits=Limits(time_limit=1e-6))
    exact = solve_elimination(problem, limits=LIMITS)
    assert "bounded, not exact" in solution.notes[0]
    assert solution.lower_bound <= exact.objective <= solution.objective
    assert exact.notes == ()


def test_a_gap_is_told_in_the_notes() -> None:
    problem = dense_problem(np.random.default_rng(0), nodes=8, choices=4)
    solution = solve_elimination(problem, limits=Limits(table_bytes=1))
    assert solution.gap > 0
    assert f"within {solution.gap:.3%} of the optimum" in solution.notes[1]


PROGRAM = """
import numpy as np
from autopar.solver.intra.elimination import solve_elimination
from autopar.solver.intra.problem import Limits
from tests.oracles.brute_force import dense_problem, random_problem
for seed in range(8):
    rng = np.random.default_rng(seed)
    # Costs of few distinct values: many optima, so that any wavering would show.
    problem = dense_problem(rng, nodes=9, choices=4, levels=2)
    for table_bytes in (1, 2000, 1 << 30):
        s = solve_elimination(problem, limits=Limits(table_bytes=table_bytes))
        print(s.choices, s.lower_bound, s.notes)
"""


def test_same_answer_under_any_hash_seed() -> None:
    first, second = (printed(PROGRAM, seed=seed) for seed in ("1", "2"))
    assert first.count("\n") == 24
    assert first == second
