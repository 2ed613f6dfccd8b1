from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.errors import SolveError
from autopar.solver.intra.elimination import solve_elimination
from autopar.solver.intra.problem import Edge, Limits, Problem
from autopar.solver.intra.solve import SOLVERS, solve_problem
from tests.oracles.brute_force import brute_force, dense_problem, random_problem


@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_all_solvers_agree(solver: str) -> None:
    problem = dense_problem(np.random.default_rng(2), nodes=6, choices=3)
    _, optimum = brute_force(problem)
    solution = solve_problem(problem, solver=solver)
    assert solution.objective == optimum
    assert solution.gap < 1e-8
    assert solution.seconds > 0
    assert solution.name == {"auto": "elimination"}.get(solver, solver)


@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_infeasible_problems_name_the_place(solver: str) -> None:
    edge = Edge(0, 1, np.full((2, 2), math.inf))
    problem = Problem((np.zeros(2), np.zeros(2)), (edge,), ("dot", "add"))
    with pytest.raises(SolveError, match=r"(?s)infeasible.*edge dot - add"):
        solve_problem(problem, solver=solver)


def test_unknown_solvers_are_refused() -> None:
    with pytest.raises(SolveError, match=r"(?s)unknown solver.*gurobi.*ilp-highs"):
        solve_problem(Problem(()), solver="gurobi")


def test_auto_asks_the_ilp_where_tables_do_not_fit() -> None:
    problem = dense_problem(np.random.default_rng(0), nodes=8, choices=3)
    limits = Limits(table_bytes=1)
    bounded = solve_elimination(problem, limits=limits)
    assert bounded.gap > 0
    solution = solve_problem(problem, limits=limits)
    exact = solve_problem(problem)
    assert solution.gap < 1e-8
    assert solution.objective == exact.objective
    assert any("bounded, not exact" in note for note in solution.notes)
    assert any(note.startswith("ilp-highs: highs: Optimal") for note in solution.notes)


def test_auto_is_exact_by_default() -> None:
    for seed in range(20):
        problem = random_problem(np.random.default_rng(seed), combinations=300)
        choices, optimum = brute_force(problem)
        if choices is not None:
            assert solve_problem(problem).objective == pytest.approx(optimum, rel=1e-12)
