"""Exact elimination of nodes with at most two neighbours (series and leaf reductions).

A node `v` with neighbours `a` and `b` becomes a cost between them,

    E'_ab[i, j] = E_ab[i, j] + min_k (c_v[k] + E_va[k, i] + E_vb[k, j])

a leaf becomes a cost of its one neighbour, and a node without neighbours a constant. The rest is
the *kernel*: every node left has three neighbours or more. Graphs of treewidth 2 (chains, trees,
chains with one level of skips) vanish entirely. Cheapest node first, ties by index.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from autopar.errors import SolveError
from autopar.solver.intra.problem import Array, Choices, Problem
from autopar.solver.intra.simplify import Reduced, identity, select_nodes
from autopar.solver.intra.tables import Argmin, Message, minimise_out

Minimise = Callable[[Sequence[Array]], Message]


class _Graph:
    """The problem while nodes leave it: costs, neighbours' tables, and what was removed."""

    def __init__(self, problem: Problem) -> None:
        self.costs = list(problem.node_costs)
        # near[v][a] is the table with v's choices as rows; both directions share memory.
        self.near: list[dict[int, Array]] = [{} for _ in self.costs]
        for edge in problem.edges:
            self.near[edge.a][edge.b] = edge.costs
            self.near[edge.b][edge.a] = edge.costs.T
        self.removed: list[tuple[int, tuple[int, ...], Argmin | int]] = []
        self.constants: list[float] = []

    def work(self, v: int) -> int:
        """Table entries that eliminating `v` looks at."""
        return len(self.costs[v]) * math.prod(len(self.costs[a]) for a in self.near[v])

    def detach(self, v: int) -> tuple[tuple[int, ...], tuple[Array, ...]]:
        """Take `v` out; returns its neighbours, ascending, and their tables."""
        scope = tuple(sorted(self.near[v]))
        tables = tuple(self.near[v][a] for a in scope)
        for a in scope:
            del self.near[a][v]
        self.near[v] = {}
        return scope, tables


def eliminate_low_degree(problem: Problem, minimise: Minimise = minimise_out) -> Reduced:
    """Remove nodes of degree 0, 1 and 2 until none is left.

    Args:
        problem: with merged edges and no resources (a resource ties all its nodes together).
        minimise: how one table is made: `minimise_out`, or a `TableCache`'s.

    Raises:
        SolveError: an eliminated node has no finite choice, whatever its neighbours do.
    """
    assert not problem.resources
    graph = _Graph(problem)
    heap = [(graph.work(v), v) for v, near in enumerate(graph.near) if len(near) <= 2]
    if not heap:
        return Reduced(problem, identity)
    heapq.heapify(heap)
    gone = [False] * len(graph.costs)
    while heap:
        work, v = heapq.heappop(heap)
        if gone[v] or work != graph.work(v):  # an older entry; the node was pushed again since
            continue
        gone[v] = True
        scope = _remove(graph, v, minimise)
        if math.isinf(_least(graph, scope) if scope else graph.constants[-1]):
            raise SolveError(
                "the problem is infeasible",
                where=problem.names[v],
                why="no choice of this node has a finite cost, whatever its neighbours do",
            )
        for a in scope:
            if len(graph.near[a]) <= 2:
                heapq.heappush(heap, (graph.work(a), a))
    return _finish(problem, graph, [v for v, out in enumerate(gone) if not out])


def _least(graph: _Graph, scope: tuple[int, ...]) -> float:
    """The largest, over `scope`, of the least node cost: infinite if one has no choice left."""
    return max(float(graph.costs[a].min()) for a in scope)


def _remove(graph: _Graph, v: int, minimise: Minimise) -> tuple[int, ...]:
    costs = graph.costs[v]
    scope, tables = graph.detach(v)
    if not scope:
        best = int(costs.argmin())
        graph.constants.append(float(costs[best]))
        graph.removed.append((v, scope, best))
        return scope
    if len(scope) == 1:
        message = minimise((costs[:, None], tables[0]))
        graph.costs[scope[0]] = graph.costs[scope[0]] + message.table
    else:
        a, b = scope
        message = minimise((costs[:, None, None], tables[0][:, :, None], tables[1][:, None, :]))
        old = graph.near[a].get(b)
        table = message.table if old is None else old + message.table
        graph.near[a][b] = table
        graph.near[b][a] = table.T
    graph.removed.append((v, scope, message.argmin))
    return scope


def _finish(problem: Problem, graph: _Graph, kept: list[int]) -> Reduced:
    tables = {(a, b): t for a in kept for b, t in graph.near[a].items() if a < b}
    removed = tuple(graph.removed)

    def decode(choices: Choices) -> Choices:
        full = [0] * len(problem.node_costs)
        for i, s in zip(kept, choices, strict=True):
            full[i] = s
        for v, scope, argmin in reversed(removed):
            full[v] = (
                argmin if isinstance(argmin, int) else int(argmin[tuple(full[a] for a in scope)])
            )
        return tuple(full)

    kernel = select_nodes(problem, kept, graph.costs, tables)
    return Reduced(kernel, decode, math.fsum(graph.constants))
