"""Exact reductions: each turns a problem into a smaller one and says how to read its answer back.

A reduction keeps the optimum: `optimum(problem) = optimum(reduced.problem) + reduced.offset`, and
`reduced.decode(optimal choices of the smaller problem)` is optimal for the larger one.

    merge_edges       parallel edges are added, self edges are folded into their node
    drop_absent       choices that can be in no finite answer (arc consistency, Mackworth 1977)
    drop_dominated    choices that another choice beats whatever the neighbours do
                      (Goldstein 1994: c_t + sum_e max_j (E_e[t, j] - E_e[s, j]) <= c_s drops s)
    fold_single       nodes with one choice become part of their neighbours' costs
    eliminate_low_degree (in low_degree.py)   nodes with at most two neighbours

Passes are arguments: `simplify(problem, passes)` runs a tuple of them until none changes anything.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.errors import SolveError
from autopar.solver.intra.problem import Array, Choices, Edge, Problem, Resource, edge_name

Decode = Callable[[Choices], Choices]

# Sweeps of drop_dominated over all nodes: a sweep that follows a change seldom finds more, and
# the passes run again anyway while something changes.
DOMINANCE_SWEEPS = 3


@dataclass(frozen=True, slots=True)
class Reduced:
    """A smaller problem, the way back, and the seconds that left the problem for good."""

    problem: Problem
    decode: Decode
    offset: float = 0.0


Pass = Callable[[Problem], Reduced]


def identity(choices: Choices) -> Choices:
    """The decode of a pass that keeps every node and choice."""
    return choices


def simplify(problem: Problem, passes: Sequence[Pass]) -> Reduced:
    """Run `passes` in order, again and again, until a round changes nothing.

    Raises:
        SolveError: the problem is found to have no finite answer.
    """
    decodes: list[Decode] = []
    offset = 0.0
    current, before = problem, None
    while current is not before:
        before = current
        for reduce in passes:
            reduced = reduce(current)
            if reduced.problem is not current:
                decodes.append(reduced.decode)
                offset += reduced.offset
                current = reduced.problem
    return Reduced(current, _chain(tuple(decodes)), offset)


def _chain(decodes: tuple[Decode, ...]) -> Decode:
    def decode(choices: Choices) -> Choices:
        for step in reversed(decodes):
            choices = step(choices)
        return choices

    return decode


def merge_edges(problem: Problem) -> Reduced:
    """Leave at most one edge per pair, written `a < b` and sorted; no self edges."""
    pairs = [(e.a, e.b) for e in problem.edges]
    if all(a < b for a, b in pairs) and all(p < q for p, q in itertools.pairwise(pairs)):
        return Reduced(problem, identity)
    costs = list(problem.node_costs)
    tables: dict[tuple[int, int], Array] = {}
    for edge in problem.edges:
        if edge.a == edge.b:
            costs[edge.a] = costs[edge.a] + np.diagonal(edge.costs)
            continue
        key = (min(edge.a, edge.b), max(edge.a, edge.b))
        table = edge.costs if edge.a < edge.b else edge.costs.T
        tables[key] = tables[key] + table if key in tables else table
    merged = dataclasses.replace(problem, node_costs=tuple(costs), edges=sorted_edges(tables))
    return Reduced(merged, identity)


def sorted_edges(tables: dict[tuple[int, int], Array]) -> tuple[Edge, ...]:
    """Edges of a dictionary of tables, in the order of their node pairs."""
    return tuple(Edge(a, b, tables[a, b]) for a, b in sorted(tables))


def incident(problem: Problem) -> tuple[tuple[tuple[int, Array], ...], ...]:
    """Per node: (neighbour, table with the node's choices as rows), by edge order."""
    lists: list[list[tuple[int, Array]]] = [[] for _ in problem.node_costs]
    for edge in problem.edges:
        lists[edge.a].append((edge.b, edge.costs))
        lists[edge.b].append((edge.a, edge.costs.T))
    return tuple(tuple(entries) for entries in lists)


def drop_absent(problem: Problem) -> Reduced:
    """Drop choices with an infinite cost, over a resource limit, or without a partner on an edge.

    Takes merged edges.

    Raises:
        SolveError: a node or an edge is left without a finite choice; the error names it.
    """
    alive = [np.isfinite(c) for c in problem.node_costs]
    for resource in problem.resources:
        _drop_oversized(resource, alive)
    for name, mask in zip(problem.names, alive, strict=True):
        if not mask.any():
            raise SolveError(
                "the problem is infeasible",
                where=name,
                why="every choice of this node has an infinite cost",
            )
    finite = [np.isfinite(e.costs) for e in problem.edges]
    # Edges without an infinite entry constrain nothing.
    watched = [i for i, table in enumerate(finite) if not table.all()]
    changed = True
    while changed:
        changed = False
        for i in watched:
            changed |= _revise(problem, problem.edges[i], finite[i], alive)
    return keep_choices(problem, alive)


def _drop_oversized(resource: Resource, alive: list[NDArray[np.bool_]]) -> None:
    """Drop choices too large even if every other node uses least of the resource."""
    nodes = zip(resource.weights, alive, strict=True)
    least = [float(w[mask].min()) if mask.any() else 0.0 for w, mask in nodes]
    total = math.fsum(least)
    if total > resource.limit:
        raise SolveError(
            "the problem is infeasible",
            where=resource.name,
            got=f"a limit of {resource.limit:g}",
            why=f"the smallest choices of all nodes add up to {total:g}",
            remedy="raise the limit, use more devices, or smaller micro-batches",
        )
    for i, weights in enumerate(resource.weights):
        alive[i] = alive[i] & (weights <= resource.limit - (total - least[i]))


def _revise(
    problem: Problem, edge: Edge, finite: NDArray[np.bool_], alive: list[NDArray[np.bool_]]
) -> bool:
    """Narrow both ends of `edge` to choices with a finite partner; tells whether it did."""
    pairs = finite & alive[edge.a][:, None] & alive[edge.b][None, :]
    if not pairs.any():
        raise SolveError(
            "the problem is infeasible",
            where=edge_name(problem, edge),
            why="no pair of choices that is left on this edge has a finite cost",
        )
    changed = False
    for node, axis in ((edge.a, 1), (edge.b, 0)):
        supported: NDArray[np.bool_] = np.any(pairs, axis=axis)
        if not np.array_equal(supported, alive[node]):
            alive[node] = supported
            changed = True
    return changed


def keep_choices(problem: Problem, alive: Sequence[NDArray[np.bool_]]) -> Reduced:
    """The problem with only the choices whose mask is set."""
    if all(mask.all() for mask in alive):
        return Reduced(problem, identity)
    kept = [np.flatnonzero(mask) for mask in alive]
    whole = [bool(mask.all()) for mask in alive]

    def narrow(edge: Edge) -> Edge:
        if whole[edge.a] and whole[edge.b]:
            return edge
        return Edge(edge.a, edge.b, edge.costs[np.ix_(kept[edge.a], kept[edge.b])])

    def decode(choices: Choices) -> Choices:
        return tuple(int(kept[i][s]) for i, s in enumerate(choices))

    nodes = zip(problem.node_costs, kept, whole, strict=True)
    costs = tuple(c if same else c[rows] for c, rows, same in nodes)
    edges = tuple(narrow(e) for e in problem.edges)
    resources = tuple(
        dataclasses.replace(r, weights=tuple(w[k] for w, k in zip(r.weights, kept, strict=True)))
        for r in problem.resources
    )
    return Reduced(Problem(costs, edges, problem.names, resources), decode)


def drop_dominated(problem: Problem) -> Reduced:
    """Drop each choice that another choice of its node beats, ties to the lower index.

    Takes merged edges and no absent choices. Nodes are visited in index order; a later node sees
    only the choices that earlier ones have left. A choice that uses more of any resource beats
    nothing.
    """
    neighbours = incident(problem)
    alive = [np.ones(n, dtype=np.bool_) for n in problem.sizes]
    pending = [True] * len(alive)
    for _ in range(DOMINANCE_SWEEPS):
        for i, costs in enumerate(problem.node_costs):
            if not pending[i] or not (alive[i].sum() > 1):
                continue
            pending[i] = False
            rows = np.flatnonzero(alive[i])
            tables = [_narrow(table, rows, alive[j]) for j, table in neighbours[i]]
            weights = [resource.weights[i][rows] for resource in problem.resources]
            dropped = _dominated(costs[rows], tables, weights)
            if len(dropped):
                alive[i][rows[dropped]] = False
                for j, _table in neighbours[i]:
                    pending[j] = True
    return keep_choices(problem, alive)


def _narrow(table: Array, rows: NDArray[np.intp], columns: NDArray[np.bool_]) -> Array:
    if len(rows) == table.shape[0] and columns.all():
        return table
    return table[np.ix_(rows, np.flatnonzero(columns))]


def _dominated(costs: Array, tables: Sequence[Array], weights: Sequence[Array]) -> list[int]:
    """Choices that can go: `costs [K]`, a table `[K, J_e]` per neighbour, `[K]` per resource."""
    size = len(costs)
    with np.errstate(invalid="ignore"):  # inf - inf: both impossible, so no regret
        least = costs[:, None] - costs[None, :]
        for table in tables:
            least = least + _least_regret(table)
        for weight in weights:
            least[weight[:, None] > weight[None, :]] = math.inf
        np.fill_diagonal(least, math.inf)
        better, worse = np.nonzero(least <= 0)
        if not len(better):
            return []
        regret = costs[better] - costs[worse]
        for table in tables:
            worst = np.fmax.reduce(table[better] - table[worse], axis=1)
            regret = regret + np.where(np.isnan(worst), -math.inf, worst)
    beats = np.zeros((size, size), dtype=np.bool_)
    sure = regret <= 0
    beats[better[sure], worse[sure]] = True
    dropped: list[int] = []
    left = np.ones(size, dtype=np.bool_)
    # From the highest index down, against choices still there: of two equal ones the lower stays,
    # and rounding can never make a ring of choices drop each other entirely.
    for s in np.flatnonzero(beats.any(axis=0))[::-1]:
        if (beats[:, s] & left).any():
            left[s] = False
            dropped.append(int(s))
    return dropped


def _least_regret(table: Array) -> Array:
    """A cheap lower bound `[t, s]` of `max_j (table[t, j] - table[s, j])`.

    Two columns tell most: where `s` is cheapest and where `t` is dearest.
    """
    rows = np.arange(len(table))
    best, worst = table.argmin(axis=1), table.argmax(axis=1)
    at_best = table[:, best] - table[rows, best][None, :]
    at_worst = table[rows, worst][:, None] - table[:, worst].T
    bound = np.fmax(at_best, at_worst)
    return np.where(np.isnan(bound), -math.inf, bound)


def fold_single(problem: Problem) -> Reduced:
    """Remove nodes with one choice; their costs move to the neighbours and to the offset.

    Takes merged edges.
    """
    single = [n == 1 for n in problem.sizes]
    if not any(single):
        return Reduced(problem, identity)
    costs = list(problem.node_costs)
    constants = [float(c[0]) for c, one in zip(costs, single, strict=True) if one]
    tables: dict[tuple[int, int], Array] = {}
    for edge in problem.edges:
        if single[edge.a] and single[edge.b]:
            constants.append(float(edge.costs[0, 0]))
        elif single[edge.a]:
            costs[edge.b] = costs[edge.b] + edge.costs[0, :]
        elif single[edge.b]:
            costs[edge.a] = costs[edge.a] + edge.costs[:, 0]
        else:
            tables[edge.a, edge.b] = edge.costs
    kept = tuple(i for i, one in enumerate(single) if not one)

    def decode(choices: Choices) -> Choices:
        full = [0] * len(single)
        for i, s in zip(kept, choices, strict=True):
            full[i] = s
        return tuple(full)

    resources = tuple(_without_single(r, single) for r in problem.resources)
    folded = select_nodes(problem, kept, costs, tables, resources)
    return Reduced(folded, decode, math.fsum(constants))


def _without_single(resource: Resource, single: Sequence[bool]) -> Resource:
    used = [float(w[0]) for w, one in zip(resource.weights, single, strict=True) if one]
    return dataclasses.replace(resource, limit=resource.limit - math.fsum(used))


def select_nodes(
    problem: Problem,
    kept: Sequence[int],
    costs: Sequence[Array],
    tables: dict[tuple[int, int], Array],
    resources: Sequence[Resource] = (),
) -> Problem:
    """The problem on the nodes `kept` (ascending), with new costs and tables between them."""
    index = {old: new for new, old in enumerate(kept)}
    edges = sorted_edges({(index[a], index[b]): table for (a, b), table in tables.items()})
    names = tuple(problem.names[i] for i in kept)
    resources = tuple(
        dataclasses.replace(r, weights=tuple(r.weights[i] for i in kept)) for r in resources
    )
    return Problem(tuple(costs[i] for i in kept), edges, names, resources)


EXACT_PASSES: tuple[Pass, ...] = (merge_edges, drop_absent, drop_dominated, fold_single)
