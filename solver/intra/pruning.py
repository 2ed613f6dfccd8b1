"""Choices that no optimum can contain, proven by reduced costs; what is left has small tables.

Costs are moved between nodes and edges without changing any total (sequential tree-reweighted
message passing: Kolmogorov 2006, in the form of 2015's SRMP for pairwise costs). After each sweep

    bound         = sum of every node's and every edge's least cost
    bound(i = s)  = bound + (cost_i(s) - least_i) + sum over edges e of i (row_e(s) - least_e)

No answer that makes choice s at node i costs less than bound(i = s), so s can go as soon as that
exceeds the cost of an answer in hand. Sweeps alternate with improving that answer on what is left
until exact elimination is cheap. The result is exact: pruning removes no optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from autopar.solver.intra.buckets import eliminate
from autopar.solver.intra.ordering import best_order
from autopar.solver.intra.problem import Array, Choices, Problem, evaluate
from autopar.solver.intra.simplify import Decode, identity, keep_choices
from autopar.solver.intra.tables import minimise_out

# Exact elimination of this many table entries takes a fraction of a second: no need to prune more.
CHEAP_ENTRIES = 1 << 26
SWEEPS_A_ROUND = 12
MAX_ROUNDS = 40
# Looking for an order is worth it once so much of the choices is left since the last look.
FEWER = 0.9
# The core's answer is nearly always the optimum at once: look again seldom.
ROUNDS_A_CORE = 4
# Rounding of a few hundred sweeps over float64, far above what was seen (1e-13).
SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Narrowed:
    """A problem with the same nodes and fewer choices, and what was learnt on the way.

    Attributes:
        problem: what is left; it holds every optimum.
        decode: from its choices to the original ones.
        incumbent: the best answer found, in choices of `problem`.
        bound: seconds; no answer costs less.
    """

    problem: Problem
    decode: Decode
    incumbent: Choices
    bound: float


def narrow(problem: Problem, *, cheap: int = CHEAP_ENTRIES, rounds: int = MAX_ROUNDS) -> Narrowed:
    """Remove choices until exact elimination needs at most `cheap` table entries.

    Args:
        problem: simplified: every choice has a finite partner on every edge.
        cheap: stop when an order of so few entries exists.
        rounds: give up after so many; the result is valid all the same.
    """
    costs = _Reparametrised(problem)
    incumbent = costs.decode()
    decode: Decode = identity
    bound, looked_at = -np.inf, sum(problem.sizes)
    for number in range(rounds):
        for _ in range(SWEEPS_A_ROUND):
            costs.sweep()
        bound = max(bound, costs.bound())
        by_choice = costs.bounds_by_choice()
        answers = [incumbent, costs.decode()]
        if number % ROUNDS_A_CORE == 0:
            answers.append(_solve_core(problem, by_choice, cheap))
        incumbent = min(answers, key=lambda choices: evaluate(problem, choices))
        value = evaluate(problem, incumbent)
        limit = value + SLACK * abs(value)
        alive = [row <= limit for row in by_choice]
        for keep, choice in zip(alive, incumbent, strict=True):
            keep[choice] = True
        if not all(keep.all() for keep in alive):
            reduced = keep_choices(problem, alive)
            decode = _after(decode, reduced.decode)
            incumbent = tuple(
                int(keep[:choice].sum()) for keep, choice in zip(alive, incumbent, strict=True)
            )
            problem = reduced.problem
            costs.keep(alive)
        if bound >= value - SLACK * abs(value):
            break
        if sum(problem.sizes) <= FEWER * looked_at:
            looked_at = sum(problem.sizes)
            if best_order(problem).entries <= cheap:
                break
    return Narrowed(problem, decode, incumbent, bound - SLACK * abs(bound))


def _solve_core(problem: Problem, by_choice: Sequence[Array], cheap: int) -> Choices:
    """The best answer among the most promising choices: as many as cheap elimination allows."""
    excess = [row - row.min() for row in by_choice]
    ranked = np.sort(np.concatenate(excess))
    count = len(ranked)
    while True:
        count //= 2
        alive = [row <= ranked[count] if count else row <= 0 for row in excess]
        core = keep_choices(problem, alive)
        order = best_order(core.problem)
        if order.entries <= cheap:
            return core.decode(eliminate(core.problem, order.nodes, minimise_out)[0])
        if count == 0:
            return core.decode((0,) * len(excess))


def _after(outer: Decode, inner: Decode) -> Decode:
    return lambda choices: outer(inner(choices))


class _Reparametrised:
    """Node and edge costs that are moved about; every total stays what it was."""

    def __init__(self, problem: Problem) -> None:
        self.nodes = [costs.copy() for costs in problem.node_costs]
        self.edges = [edge.costs.copy() for edge in problem.edges]
        self.ends = [(edge.a, edge.b) for edge in problem.edges]
        self.order = _order(problem)
        self._look()

    def _look(self) -> None:
        """Per node, its edges: a table with the node's choices as rows, whether later, whose."""
        position = {node: number for number, node in enumerate(self.order)}
        self.near: list[list[tuple[Array, bool, int]]] = [[] for _ in self.nodes]
        for table, (a, b) in zip(self.edges, self.ends, strict=True):
            self.near[a].append((table, position[b] > position[a], b))
            self.near[b].append((table.T, position[a] > position[b], a))

    def sweep(self) -> None:
        """Once forward and once backward over all nodes."""
        for node in self.order:
            self._visit(node, forward=True)
        for node in reversed(self.order):
            self._visit(node, forward=False)

    def _visit(self, node: int, *, forward: bool) -> None:
        """Gather what the edges know of a node, and hand it on to the edges ahead in shares."""
        near = self.near[node]
        least = [np.minimum.reduce(table, axis=1) for table, _, _ in near]
        total = sum(least, self.nodes[node])
        ahead = sum(later is forward for _, later, _ in near)
        shares = max(ahead, len(near) - ahead)
        share = total / shares if ahead else 0.0
        for (table, later, _), gathered in zip(near, least, strict=True):
            moved = share - gathered if later is forward else -gathered
            table += moved[:, None]
        self.nodes[node] = total - share * ahead

    def decode(self) -> Choices:
        """Choices node by node: each is the least given those before it, as the costs now lie."""
        choices = [-1] * len(self.nodes)
        for node in self.order:
            total = self.nodes[node]
            for table, later, other in self.near[node]:
                total = total + (table.min(axis=1) if later else table[:, choices[other]])
            choices[node] = int(total.argmin())
        return tuple(choices)

    def bound(self) -> float:
        """Seconds that no answer is below."""
        return float(sum(t.min() for t in self.nodes) + sum(t.min() for t in self.edges))

    def bounds_by_choice(self) -> list[Array]:
        """Per node and choice, seconds that no answer with that choice is below."""
        bound = self.bound()
        rows = []
        for costs, near in zip(self.nodes, self.near, strict=True):
            row = costs - costs.min()
            for table, _, _ in near:
                least = table.min(axis=1)
                row = row + (least - least.min())
            rows.append(row + bound)
        return rows

    def keep(self, alive: Sequence[NDArray[np.bool_]]) -> None:
        """Drop choices."""
        self.nodes = [costs[keep] for costs, keep in zip(self.nodes, alive, strict=True)]
        self.edges = [
            table[np.ix_(alive[a], alive[b])]
            for table, (a, b) in zip(self.edges, self.ends, strict=True)
        ]
        self._look()


def _order(problem: Problem) -> tuple[int, ...]:
    """Nodes so that neighbours are near each other (Cuthill and McKee 1969): fewer sweeps."""
    graph = nx.Graph()
    graph.add_nodes_from(range(len(problem.node_costs)))
    graph.add_edges_from((edge.a, edge.b) for edge in problem.edges)
    return tuple(
        node
        for component in sorted(nx.connected_components(graph), key=min)
        for node in nx.utils.cuthill_mckee_ordering(graph.subgraph(component))
    )
