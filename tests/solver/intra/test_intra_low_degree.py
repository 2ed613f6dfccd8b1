from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autopar.errors import SolveError
from autopar.solver.intra.low_degree import eliminate_low_degree
from autopar.solver.intra.problem import Edge, Problem, evaluate
from tests.oracles.brute_force import brute_force


def on_graph(pairs: list[tuple[int, int]], count: int, size: int = 3) -> Problem:
    rng = np.random.default_rng(0)
    edges = tuple(Edge(a, b, rng.random((size, size))) for a, b in pairs)
    return Problem(tuple(rng.random(size) for _ in range(count)), edges)


COMPLETE = list(itertools.combinations(range(4), 2))


@pytest.mark.parametrize(
    ("pairs", "count", "left"),
    [
        ([], 3, 0),
        ([(0, 1), (1, 2), (2, 3)], 4, 0),
        ([(0, 1), (0, 2), (0, 3), (0, 4)], 5, 0),
        ([(0, 1), (1, 2), (2, 3), (0, 3)], 4, 0),
        ([(i, i + d) for d in (1, 2) for i in range(8 - d)], 8, 0),  # one level of skips
        (COMPLETE, 4, 4),
        ([*COMPLETE, (3, 4), (4, 5)], 6, 4),
        # A node in the middle of an edge of the complete graph disappears again.
        ([*COMPLETE[1:], (0, 4), (1, 4)], 5, 4),
    ],
)
def test_what_is_left_and_what_it_costs(
    pairs: list[tuple[int, int]], count: int, left: int
) -> None:
    problem = on_graph(pairs, count)
    reduced = eliminate_low_degree(problem)
    assert len(reduced.problem.sizes) == left
    choices, value = brute_force(reduced.problem)
    expected, optimum = brute_force(problem)
    assert choices is not None
    assert value + reduced.offset == pytest.approx(optimum, rel=1e-13)
    assert reduced.decode(choices) == expected
    assert evaluate(problem, reduced.decode(choices)) == pytest.approx(optimum, rel=1e-13)


def test_a_kernel_is_returned_as_it_is() -> None:
    problem = on_graph(COMPLETE, 4)
    assert eliminate_low_degree(problem).problem is problem


def test_infeasibility_along_a_chain_is_named() -> None:
    inf = math.inf
    # Each edge has finite pairs and so has each choice, but the odd cycle cannot be two-coloured.
    differ = np.array([[inf, 0.0], [0.0, inf]])
    edges = tuple(Edge(a, b, differ) for a, b in ((0, 1), (1, 2), (0, 2)))
    problem = Problem((np.zeros(2),) * 3, edges, ("a", "b", "c"))
    with pytest.raises(SolveError, match=r"(?s)infeasible.*where: [abc]"):
        eliminate_low_degree(problem)
