from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.errors import SolveError
from autopar.solver.intra.problem import Edge, Limits, Problem, evaluate, make_solution


def two_nodes() -> Problem:
    table = np.array([[0.5, 1.0, math.inf], [2.0, 0.25, 4.0]])
    return Problem(
        (np.array([1.0, 2.0]), np.array([0.0, 3.0, 5.0])), (Edge(0, 1, table),), ("dot", "add")
    )


def test_evaluate_adds_nodes_and_edges() -> None:
    problem = two_nodes()
    assert evaluate(problem, (1, 1)) == 2.0 + 3.0 + 0.25
    assert evaluate(problem, (0, 2)) == math.inf


def test_evaluate_orients_edges_and_counts_parallel_and_self_edges() -> None:
    table = np.array([[1.0, 10.0], [100.0, 1000.0]])
    edges = (Edge(1, 0, table), Edge(0, 1, table), Edge(0, 0, table))
    problem = Problem((np.zeros(2), np.zeros(2)), edges)
    assert evaluate(problem, (0, 1)) == 100.0 + 10.0 + 1.0


def test_evaluate_is_exact_where_plain_sums_are_not() -> None:
    problem = Problem(tuple(np.array([0.1]) for _ in range(10)))
    assert evaluate(problem, (0,) * 10) == 1.0
    assert np.cumsum([0.1] * 10)[-1] != 1.0


def test_arrays_are_read_only_and_converted() -> None:
    costs = np.array([1, 2])
    problem = Problem((costs.astype(np.float64),), (Edge(0, 0, np.ones((2, 2))),))
    with pytest.raises(ValueError, match="read-only"):
        problem.node_costs[0][0] = 5.0
    with pytest.raises(ValueError, match="read-only"):
        problem.edges[0].costs[0, 0] = 5.0
    assert Problem((costs,)).node_costs[0].dtype == np.float64


def test_an_empty_problem_costs_nothing() -> None:
    assert evaluate(Problem(()), ()) == 0.0


@pytest.mark.parametrize(
    ("costs", "edge", "text"),
    [
        ([np.empty(0)], None, "at least one choice"),
        ([np.zeros((2, 2))], None, "vector"),
        ([np.array([math.nan])], None, "NaN"),
        ([np.array([0.0, -math.inf])], None, "-inf"),
        ([np.zeros(2)], Edge(0, 1, np.zeros((2, 2))), "not there"),
        ([np.zeros(2), np.zeros(3)], Edge(0, 1, np.zeros((3, 2))), r"expected \(2, 3\)"),
        ([np.zeros(1), np.zeros(1)], Edge(0, 1, np.array([[math.nan]])), "NaN"),
    ],
)
def test_malformed_problems_are_refused(
    costs: list[np.ndarray], edge: Edge | None, text: str
) -> None:
    with pytest.raises(SolveError, match=text):
        Problem(tuple(costs), () if edge is None else (edge,))


def test_names_must_fit() -> None:
    with pytest.raises(SolveError, match="one name per node"):
        Problem((np.zeros(1),), (), ("a", "b"))


@pytest.mark.parametrize("limits", [{"time_limit": 0.0}, {"table_bytes": 0}])
def test_limits_must_be_positive(limits: dict[str, float]) -> None:
    with pytest.raises(SolveError, match="positive"):
        Limits(**limits)  # type: ignore[arg-type]


def test_solution_gap_is_relative_and_never_negative() -> None:
    problem = two_nodes()
    solution = make_solution(problem, (1, 1), lower_bound=4.2, name="x", seconds=0.0)
    assert solution.objective == 5.25
    assert solution.gap == pytest.approx((5.25 - 4.2) / 5.25)
    exact = make_solution(problem, (1, 1), lower_bound=math.inf, name="x", seconds=0.0)
    assert (exact.lower_bound, exact.gap) == (5.25, 0.0)


def test_a_zero_objective_has_no_gap_unless_the_bound_is_lower() -> None:
    problem = Problem((np.zeros(1),))
    assert make_solution(problem, (0,), lower_bound=0.0, name="x", seconds=0.0).gap == 0.0
    assert make_solution(problem, (0,), lower_bound=-1.0, name="x", seconds=0.0).gap == math.inf
