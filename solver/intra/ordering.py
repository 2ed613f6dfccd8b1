"""Elimination orders, found on the graph alone before any table is made.

Eliminating a node joins all its neighbours. Finding the order with the smallest tables is
NP-hard; two greedy rules are tried and the cheaper order is kept:

    min-fill   the node that adds the fewest edges, then the smallest bag (Kjaerulff 1990)
    min-size   the node with the smallest bag (product of the choices of it and its neighbours)

Ties break by node index, and scores are updated only where the graph changed.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.solver.intra.problem import Problem
from autopar.solver.intra.tables import argmin_dtype

Score = Callable[[int, int], tuple[int, int]]

TABLE_ENTRY_BYTES = 8  # float64


@dataclass(frozen=True, slots=True)
class Order:
    """An elimination order and what it costs.

    Attributes:
        nodes: every node that is eliminated, first to last.
        fixed: nodes that are not eliminated but held at one choice; empty for an exact order.
        entries: table entries looked at in total, the measure of time.
        peak_bytes: the most bytes of tables and argmins alive at once.
        width: the most neighbours a node has when it is eliminated.
    """

    nodes: tuple[int, ...]
    fixed: tuple[int, ...]
    entries: int
    peak_bytes: int
    width: int


def min_fill(fill: int, bag: int) -> tuple[int, int]:
    """Fewest new edges first."""
    return fill, bag


def min_size(fill: int, bag: int) -> tuple[int, int]:
    """Smallest bag first."""
    return bag, fill


def best_order(problem: Problem) -> Order:
    """The cheaper of the min-fill and the min-size order, by table entries."""
    orders = [_eliminate(problem, score, None, ()) for score in (min_fill, min_size)]
    return min(orders, key=lambda order: order.entries)


def conditioned_order(problem: Problem, bag_entries: int, times_fixed: Sequence[int]) -> Order:
    """An order whose bags stay within `bag_entries`, by holding some nodes fixed.

    Whenever the next bag is too large, the node in it that was fixed least often before
    (`times_fixed`, one count per node), then the one with the most choices, is taken out.
    """
    return _eliminate(problem, min_size, bag_entries, times_fixed)


class _Graph:
    """The graph under elimination, with a heap of scores."""

    def __init__(self, problem: Problem, score: Score) -> None:
        self.sizes = problem.sizes
        # Sets are only asked for membership or sorted before use: their order decides nothing.
        self.near: list[set[int]] = [set() for _ in self.sizes]
        for edge in problem.edges:
            self.near[edge.a].add(edge.b)
            self.near[edge.b].add(edge.a)
        self.score = score
        self.current: dict[int, tuple[int, int]] = {}
        self.heap: list[tuple[tuple[int, int], int]] = []
        for v in range(len(self.sizes)):
            self.update(v)

    def bag(self, v: int) -> int:
        return self.sizes[v] * math.prod(self.sizes[a] for a in self.near[v])

    def update(self, v: int) -> None:
        scope = self.near[v]
        # Each missing edge is seen from both ends, and each node misses itself once.
        missing = sum(len(scope - self.near[a]) - 1 for a in scope) // 2
        self.current[v] = self.score(missing, self.bag(v))
        heapq.heappush(self.heap, (self.current[v], v))

    def pop(self) -> int | None:
        while self.heap:
            score, v = heapq.heappop(self.heap)
            if self.current.get(v) == score:
                return v
        return None

    def take(self, v: int) -> tuple[int, ...]:
        """Remove `v`; returns its neighbours, ascending."""
        scope = tuple(sorted(self.near[v]))
        for a in scope:
            self.near[a].discard(v)
        del self.current[v]
        return scope

    def join(self, scope: tuple[int, ...]) -> None:
        """Make `scope` a clique and refresh every score that this changes."""
        touched = set(scope)
        for a, b in itertools.combinations(scope, 2):
            if b not in self.near[a]:
                touched |= self.near[a] & self.near[b]
                self.near[a].add(b)
                self.near[b].add(a)
        for a in sorted(touched):
            self.update(a)


def _eliminate(
    problem: Problem, score: Score, bag_entries: int | None, times_fixed: Sequence[int]
) -> Order:
    graph = _Graph(problem, score)
    nodes: list[int] = []
    fixed: list[int] = []
    scopes: list[tuple[int, ...]] = []
    while (v := graph.pop()) is not None:
        if bag_entries is not None and graph.near[v] and graph.bag(v) > bag_entries:
            members = (v, *sorted(graph.near[v]))
            worst = min(members, key=lambda a: (times_fixed[a], -graph.sizes[a], a))
            fixed.append(worst)
            for a in graph.take(worst):
                graph.update(a)
            if worst != v:
                graph.update(v)
            continue
        nodes.append(v)
        scopes.append(graph.take(v))
        graph.join(scopes[-1])
    return _price(problem.sizes, nodes, fixed, scopes)


def _price(
    sizes: Sequence[int], nodes: list[int], fixed: list[int], scopes: list[tuple[int, ...]]
) -> Order:
    position = {v: i for i, v in enumerate(nodes)}
    freed = [0] * (len(nodes) + 1)
    entries = live = peak = 0
    for i, (v, scope) in enumerate(zip(nodes, scopes, strict=True)):
        rows = math.prod(sizes[a] for a in scope)
        entries += rows * sizes[v]
        table = rows * TABLE_ENTRY_BYTES
        live += table + rows * argmin_dtype(sizes[v])().itemsize
        peak = max(peak, live)
        live -= freed[i]
        # The table is used up when the first node of its scope goes; the argmin stays.
        freed[min((position[a] for a in scope if a in position), default=len(nodes))] += table
    width = max((len(scope) for scope in scopes), default=0)
    return Order(tuple(nodes), tuple(fixed), entries, peak, width)
