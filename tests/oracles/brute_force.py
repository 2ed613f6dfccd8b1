"""Brute force over all choices, and random pairwise problems made to be awkward."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
from numpy.typing import NDArray

from autopar.solver.intra.problem import Edge, Problem, Resource

Array = NDArray[np.float64]

SCALES = (1e-9, 1.0, 1e6)


def brute_force(problem: Problem) -> tuple[tuple[int, ...] | None, float]:
    """The first cheapest choices in lexicographic order, by trying all; None if infeasible."""
    best: tuple[int, ...] | None = None
    least = math.inf
    for choices in itertools.product(*(range(len(c)) for c in problem.node_costs)):
        total = sum(float(c[s]) for c, s in zip(problem.node_costs, choices, strict=True))
        total += sum(float(e.costs[choices[e.a], choices[e.b]]) for e in problem.edges)
        if total < least and _within(problem, choices):
            best, least = choices, total
    return best, least


def _within(problem: Problem, choices: tuple[int, ...]) -> bool:
    for resource in problem.resources:
        if (
            sum(float(w[s]) for w, s in zip(resource.weights, choices, strict=True))
            > resource.limit
        ):
            return False
    return True


def with_resources(problem: Problem, rng: np.random.Generator, *, count: int) -> Problem:
    """The problem with `count` limits somewhere between the least and the most that it can use."""
    resources = []
    for r in range(count):
        weights = tuple(
            rng.integers(0, 100, size=len(c)).astype(np.float64) * 1e7 for c in problem.node_costs
        )
        least = sum(float(w.min()) for w in weights)
        most = sum(float(w.max()) for w in weights)
        limit = float(np.floor(least + rng.uniform(0.1, 0.6) * (most - least)))
        resources.append(Resource(weights, limit, f"memory {r}"))
    return dataclasses.replace(problem, resources=tuple(resources))


def random_problem(
    rng: np.random.Generator, *, scale: float = 1.0, nodes: int = 6, combinations: int = 3000
) -> Problem:
    """A chain with skips, strays and awkward tables, small enough for `brute_force`.

    Args:
        rng: seeded source.
        scale: factor on all costs.
        nodes: the most nodes.
        combinations: the most combinations of choices.
    """
    count = int(rng.integers(1, nodes + 1))
    sizes = rng.integers(1, 6, size=count)
    while math.prod(int(k) for k in sizes) > combinations:
        sizes[int(rng.integers(count))] = 1
    pairs = _pairs(rng, count)
    node_costs = tuple(_node_costs(rng, int(k)) * scale for k in sizes)
    edges = tuple(Edge(a, b, _table(rng, int(sizes[a]), int(sizes[b])) * scale) for a, b in pairs)
    return Problem(node_costs, edges, tuple(f"op{i}" for i in range(count)))


def disjoint_union(problems: list[Problem]) -> Problem:
    """One problem that is all of `problems` side by side; its optimum is the sum of theirs."""
    costs: list[Array] = []
    edges: list[Edge] = []
    for problem in problems:
        shift = len(costs)
        costs.extend(problem.node_costs)
        edges.extend(Edge(e.a + shift, e.b + shift, e.costs) for e in problem.edges)
    return Problem(tuple(costs), tuple(edges), tuple(f"op{i}" for i in range(len(costs))))


def _pairs(rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
    chain = [(i, i + 1) for i in range(count - 1) if rng.random() < 0.85]
    skips = [(i, j) for i in range(count) for j in range(i + 2, count) if rng.random() < 0.35]
    pairs = chain + skips
    pairs += [pairs[int(rng.integers(len(pairs)))]] if pairs and rng.random() < 0.3 else []
    pairs += [(int(rng.integers(count)),) * 2] if rng.random() < 0.2 else []
    return [(b, a) if rng.random() < 0.5 else (a, b) for a, b in pairs]


def _node_costs(rng: np.random.Generator, size: int) -> Array:
    costs = rng.integers(0, 6, size=size).astype(np.float64)
    if rng.random() < 0.4:
        costs = costs + rng.random(size)
    if size > 1 and rng.random() < 0.15:
        costs[int(rng.integers(size))] = math.inf
    return costs


def _table(rng: np.random.Generator, rows: int, columns: int) -> Array:
    kind = rng.integers(5)
    if kind == 0:  # integers: many ties
        table = rng.integers(0, 4, size=(rows, columns)).astype(np.float64)
    elif kind == 1:  # floats
        table = rng.random((rows, columns)) * 5
    elif kind == 2:  # free along a diagonal, dear elsewhere: a follower
        table = np.where(np.arange(rows)[:, None] == np.arange(columns) % rows, 0.0, 7.5)
    elif kind == 3:  # a pending sum: leaving it is free, finishing it is dear, making one is not
        table = rng.integers(0, 3, size=(rows, columns)).astype(np.float64)
        table[-1, :] = 9.0
        table[-1, -1] = 0.0
    else:  # equal rows
        table = np.repeat(rng.integers(0, 5, size=(1, columns)), rows, axis=0).astype(np.float64)
    if rng.random() < 0.3:
        table[rng.random((rows, columns)) < 0.25] = math.inf
    return table


def dense_problem(
    rng: np.random.Generator,
    *,
    nodes: int,
    choices: int,
    scale: float = 1.0,
    levels: int = 1000,
) -> Problem:
    """Every node joined to every other, integer costs below `levels`: nothing is dominated."""
    pairs = list(itertools.combinations(range(nodes), 2))
    edges = tuple(Edge(a, b, _integers(rng, levels, (choices, choices)) * scale) for a, b in pairs)
    return Problem(tuple(_integers(rng, 2, (choices,)) * scale for _ in range(nodes)), edges)


def _integers(rng: np.random.Generator, high: int, shape: tuple[int, ...]) -> Array:
    return rng.integers(0, high, shape).astype(np.float64)
