from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.errors import SolveError
from autopar.solver.intra.low_degree import eliminate_low_degree
from autopar.solver.intra.problem import Edge, Problem, evaluate
from autopar.solver.intra.simplify import (
    EXACT_PASSES,
    Pass,
    drop_absent,
    drop_dominated,
    fold_single,
    merge_edges,
    simplify,
)
from tests.oracles.brute_force import SCALES, brute_force, random_problem

ALL_PASSES = (*EXACT_PASSES, eliminate_low_degree)
PREFIXES = [ALL_PASSES[:n] for n in range(1, len(ALL_PASSES) + 1)]


@pytest.mark.parametrize("passes", PREFIXES, ids=lambda p: p[-1].__name__)
def test_passes_keep_the_optimum_and_decode_to_it(passes: tuple[Pass, ...]) -> None:
    solved = 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, scale=SCALES[seed % 3], combinations=400)
        _, optimum = brute_force(problem)
        if math.isinf(optimum):
            continue
        solved += 1
        reduced = simplify(problem, passes)
        choices, value = brute_force(reduced.problem)
        assert choices is not None
        assert value + reduced.offset == pytest.approx(optimum, rel=1e-12, abs=0)
        decoded = reduced.decode(choices)
        assert evaluate(problem, decoded) == pytest.approx(optimum, rel=1e-12, abs=0)
    assert solved > 100


def test_merged_edges_are_unique_ordered_and_without_loops() -> None:
    for seed in range(50):
        problem = random_problem(np.random.default_rng(seed))
        pairs = [(e.a, e.b) for e in merge_edges(problem).problem.edges]
        assert pairs == sorted(set(pairs))
        assert all(a < b for a, b in pairs)


def test_an_unchanged_problem_is_returned_as_it_is() -> None:
    problem = Problem((np.array([1.0, 0.0]),) * 2, (Edge(0, 1, np.eye(2) * 5),))
    for step in EXACT_PASSES:
        assert step(problem).problem is problem


def chain(*tables: list[list[float]]) -> Problem:
    arrays = [np.array(t) for t in tables]
    sizes = [arrays[0].shape[0], *(a.shape[1] for a in arrays)]
    edges = tuple(Edge(i, i + 1, a) for i, a in enumerate(arrays))
    return Problem(tuple(np.zeros(n) for n in sizes), edges, tuple("abcdef"[: len(sizes)]))


def test_absent_choices_spread_along_a_chain() -> None:
    inf = math.inf
    # Only b=0 has a partner in c, only a=1 has one in b=0.
    problem = chain([[inf, 1.0], [1.0, 1.0]], [[1.0, 1.0], [inf, inf]])
    reduced = drop_absent(problem)
    assert reduced.problem.sizes == (1, 1, 2)
    assert reduced.decode((0, 0, 1)) == (1, 0, 1)


def test_a_node_without_a_finite_choice_is_named() -> None:
    problem = Problem((np.zeros(2), np.full(3, math.inf)), (), ("dot_general.1", "add.2"))
    with pytest.raises(SolveError, match=r"(?s)infeasible.*add\.2.*every choice of this node"):
        drop_absent(problem)


def test_an_edge_without_a_finite_pair_is_named() -> None:
    problem = chain([[1.0, 1.0]], [[math.inf], [math.inf]])
    with pytest.raises(SolveError, match=r"(?s)infeasible.*edge b - c"):
        drop_absent(problem)


def test_dominated_choices_go_and_ties_keep_the_lower_index() -> None:
    # b: 0 and 2 are equal; 1 is dearer than 0 everywhere; 3 is cheaper for one neighbour choice.
    problem = chain([[1.0, 2.0, 1.0, 9.0], [4.0, 4.0, 4.0, 0.0]])
    pinned = Problem((np.array([0.0, 2.0]), problem.node_costs[1]), problem.edges, problem.names)
    reduced = drop_dominated(pinned)
    assert reduced.decode((0, 0)) == (0, 0)
    assert reduced.decode((1, 1)) == (1, 3)
    assert reduced.problem.sizes == (2, 2)


def test_node_costs_count_in_dominance() -> None:
    edges = (Edge(0, 1, np.array([[0.0, 3.0], [2.0, 0.0]])),)
    # t=0 against s=1: c_0 + max(0 - 2, 3 - 0) = 3 <= c_1 just holds at 3, and not at 2.99.
    just = Problem((np.array([0.0, 3.0]), np.array([0.0, 1.0])), edges)
    not_quite = Problem((np.array([0.0, 2.99]), np.array([0.0, 1.0])), edges)
    assert drop_dominated(just).problem.sizes[0] == 1
    assert drop_dominated(not_quite).problem.sizes[0] == 2


def test_impossible_pairs_do_not_dominate_possible_ones() -> None:
    inf = math.inf
    # 0 is cheap but impossible with 1; 1 is dear but always possible; 2 as 0, and dearer.
    edges = (Edge(0, 1, np.array([[0.0, inf], [1.0, 1.0], [0.5, inf]])),)
    problem = Problem((np.zeros(3), np.array([3.0, 0.0])), edges)
    reduced = drop_dominated(problem)
    assert reduced.problem.sizes == (2, 2)
    assert reduced.decode((1, 1)) == (1, 1)


def test_single_choices_fold_into_neighbours_and_offset() -> None:
    problem = chain([[1.0, 2.0]], [[7.0], [3.0]])
    reduced = fold_single(problem)
    assert reduced.problem.sizes == (2,)
    assert reduced.problem.node_costs[0].tolist() == [8.0, 5.0]
    assert reduced.decode((1,)) == (0, 1, 0)
    everything = fold_single(chain([[4.0]]))
    assert (everything.problem.sizes, everything.offset) == ((), 4.0)
    assert everything.decode(()) == (0, 0)
