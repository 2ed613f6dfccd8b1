from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autopar.solver.intra.ordering import best_order, conditioned_order
from autopar.solver.intra.problem import Edge, Problem


def graph(pairs: list[tuple[int, int]], sizes: list[int]) -> Problem:
    edges = tuple(Edge(a, b, np.zeros((sizes[a], sizes[b]))) for a, b in pairs)
    return Problem(tuple(np.zeros(n) for n in sizes), edges)


def naive(problem: Problem, nodes: tuple[int, ...], fixed: tuple[int, ...] = ()) -> list[int]:
    """Bag sizes of an order, by eliminating on a plain adjacency matrix."""
    count = len(problem.sizes)
    near = np.zeros((count, count), dtype=bool)
    for edge in problem.edges:
        near[edge.a, edge.b] = near[edge.b, edge.a] = True
    near[list(fixed), :] = near[:, list(fixed)] = False
    bags = []
    for v in nodes:
        scope = np.flatnonzero(near[v])
        bags.append(problem.sizes[v] * math.prod(problem.sizes[a] for a in scope))
        near[np.ix_(scope, scope)] = True
        np.fill_diagonal(near, False)
        near[v, :] = near[:, v] = False
    return bags


def random_graph(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 15))
    pairs = [p for p in itertools.combinations(range(count), 2) if rng.random() < 0.3]
    return graph(pairs, [int(n) for n in rng.integers(1, 5, size=count)])


@pytest.mark.parametrize("seed", range(40))
def test_orders_are_permutations_and_their_work_is_counted(seed: int) -> None:
    problem = random_graph(seed)
    order = best_order(problem)
    assert sorted(order.nodes) == list(range(len(problem.sizes)))
    assert order.entries == sum(naive(problem, order.nodes))
    assert order == best_order(problem)


def test_known_widths() -> None:
    path = graph([(i, i + 1) for i in range(9)], [3] * 10)
    clique = graph(list(itertools.combinations(range(5), 2)), [2] * 5)
    grid = [(4 * i + j, 4 * i + j + 1) for i in range(4) for j in range(3)]
    grid += [(4 * i + j, 4 * i + j + 4) for i in range(3) for j in range(4)]
    assert best_order(path).width == 1
    assert best_order(clique).width == 4
    assert best_order(graph(grid, [2] * 16)).width == 4


def test_peak_bytes_of_a_clique() -> None:
    # First step: 2^3 entries of 8 + 1 bytes; then 4 entries more while the 8 are still there.
    clique = graph(list(itertools.combinations(range(4), 2)), [2] * 4)
    assert best_order(clique).peak_bytes == max(8 * 9, 8 * 9 + 4 * 9)


@pytest.mark.parametrize("seed", range(40))
def test_conditioning_keeps_bags_within_the_cap(seed: int) -> None:
    problem = random_graph(seed)
    order = conditioned_order(problem, 8, [0] * len(problem.sizes))
    assert sorted((*order.nodes, *order.fixed)) == list(range(len(problem.sizes)))
    assert all(bag <= 8 for bag in naive(problem, order.nodes, order.fixed))


def test_conditioning_turns_to_other_nodes() -> None:
    clique = graph(list(itertools.combinations(range(6), 2)), [3] * 6)
    first = conditioned_order(clique, 27, [0] * 6)
    counts = [int(v in first.fixed) for v in range(6)]
    second = conditioned_order(clique, 27, counts)
    assert len(first.fixed) == len(second.fixed) == 3
    assert not set(first.fixed) & set(second.fixed)
