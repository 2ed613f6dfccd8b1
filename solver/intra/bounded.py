"""A bounded answer where exact tables would not fit: a lower bound and a good feasible answer.

Bound: mini-bucket elimination (Dechter and Rish 2003). The factors of a variable are split into
groups whose tables fit, and each group minimises its own copy of the variable out, which can only
lower the total. Before that, costs of the variable are shifted between its groups so that their
min-marginals agree (Ihler et al. 2012, "join-graph based cost-shifting"), which raises the bound.

Answer: greedy decoding of the mini-buckets, then rounds of conditioning: some nodes are held at
their present choice so that the rest has small tables, and the rest is solved exactly. Each round
holds other nodes and never makes the answer worse.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from autopar.solver.intra.buckets import (
    Buckets,
    Factor,
    Scope,
    align,
    eliminate,
    joint_scope,
)
from autopar.solver.intra.ordering import (
    TABLE_ENTRY_BYTES,
    Order,
    best_order,
    conditioned_order,
)
from autopar.solver.intra.problem import Array, Choices, Edge, Problem, evaluate
from autopar.solver.intra.simplify import fold_single
from autopar.solver.intra.tables import minimise_out

# Work of one conditioning round, in table entries: a fraction of a second.
ROUND_ENTRIES = 1 << 26
# Rounds without improvement before giving up, and rounds in total.
PATIENCE = 8
MAX_ROUNDS = 80
# Impossible pairs cost this many times the sum of the largest finite costs while improving, so
# that an answer with fewer of them is always better.
PENALTY_FACTOR = 4.0


def solve_bounded(kernel: Problem, *, table_bytes: int, entries: int) -> tuple[Choices, float]:
    """Choices and a lower bound for a problem too wide for exact elimination.

    Args:
        kernel: simplified problem with at least one node.
        table_bytes: the most bytes of tables at once; pairwise tables are always allowed.
        entries: the most table entries to look at while improving the answer.

    Returns:
        choices, of which `evaluate` is `inf` if no feasible answer was found, and seconds that no
        answer can be below.
    """
    order = best_order(kernel).nodes
    cap = _message_entries(kernel, order, table_bytes)
    start, bound = _mini_buckets(kernel, order, cap)
    choices = _improve(_soften(kernel), start, bound, (table_bytes, entries))
    return choices, bound


def _message_entries(problem: Problem, order: Sequence[int], table_bytes: int) -> int:
    """The largest cap on one message, by halving, under which all messages fit together."""
    cap = table_bytes // TABLE_ENTRY_BYTES
    while cap > 1 and _message_bytes(problem, order, cap) > table_bytes:
        cap //= 2
    return cap


def _message_bytes(problem: Problem, order: Sequence[int], cap: int) -> int:
    """Bytes of all messages under `cap`, and of the largest sum that one is made from."""
    sizes = problem.sizes
    scopes: list[list[Scope]] = [[(i,)] for i in range(len(sizes))]
    for edge in problem.edges:
        for v in (edge.a, edge.b):
            scopes[v].append((edge.a, edge.b))
    position = {v: i for i, v in enumerate(order)}
    total = largest = 0
    for v in order:
        alive = [s for s in scopes[v] if all(position[a] >= position[v] for a in s)]
        for group in _split(sizes, alive, v, cap):
            scope = joint_scope([alive[i] for i in group], v)
            rows = math.prod(sizes[a] for a in scope)
            total += rows
            largest = max(largest, rows * sizes[v])
            for a in scope:
                scopes[a].append(scope)
    return (total + largest) * TABLE_ENTRY_BYTES


def _mini_buckets(problem: Problem, order: Sequence[int], cap: int) -> tuple[Choices, float]:
    """Greedy choices and the mini-bucket bound, with messages of at most `cap` entries.

    A group of one factor is always allowed: its message is smaller than the factor.
    """
    buckets = Buckets(problem)
    used: list[tuple[int, tuple[Factor, ...]]] = []
    constants: list[float] = []
    for v in order:
        factors = buckets.take(v)
        used.append((v, factors))
        split = _split(problem.sizes, [f.scope for f in factors], v, cap)
        for group in _shift([[factors[i] for i in group] for group in split], v):
            scope = joint_scope([f.scope for f in group], v)
            if scope:
                message = minimise_out([align(f, (v, *scope)) for f in group])
                buckets.add(Factor(scope, message.table))
            else:
                constants.append(float(np.sum([f.table for f in group], axis=0).min()))
    choices = [0] * len(problem.node_costs)
    for v, factors in reversed(used):
        total = np.sum([_row(f, v, choices) for f in factors], axis=0)
        choices[v] = int(total.argmin())
    return tuple(choices), math.fsum(constants)


def _row(factor: Factor, v: int, choices: Sequence[int]) -> Array:
    """The factor as a vector over `v`, every other variable at its choice."""
    index = tuple(slice(None) if a == v else choices[a] for a in factor.scope)
    row: Array = factor.table[index]
    return row


def _split(sizes: Sequence[int], scopes: Sequence[Scope], v: int, cap: int) -> list[list[int]]:
    """Groups of factor numbers: first fit, widest first; what adds no variable joins a group."""
    groups: list[tuple[list[int], Scope]] = []
    for i in sorted(range(len(scopes)), key=lambda i: -len(scopes[i])):
        for position, (members, scope) in enumerate(groups):
            joined = joint_scope([scope, scopes[i]], v)
            if joined == scope or math.prod(sizes[a] for a in joined) <= cap:
                groups[position] = ([*members, i], joined)
                break
        else:
            groups.append(([i], joint_scope([scopes[i]], v)))
    return [members for members, _scope in groups]


def _shift(groups: list[list[Factor]], v: int) -> list[list[Factor]]:
    """Move costs of `v` between its groups until their min-marginals agree."""
    if len(groups) == 1:
        return groups
    marginals = [_marginal(group, v) for group in groups]
    mean = np.sum(marginals, axis=0) / len(groups)
    # A choice impossible in one group is impossible: nothing to move there.
    finite = np.isfinite(mean)
    shifted = []
    for group, marginal in zip(groups, marginals, strict=True):
        moved = np.zeros_like(mean)
        moved[finite] = mean[finite] - marginal[finite]
        shifted.append([*group, Factor((v,), moved)])
    return shifted


def _marginal(group: Sequence[Factor], v: int) -> Array:
    """`[K_v]`: the least total of the group for each choice of `v`."""
    axes = (v, *joint_scope([f.scope for f in group], v))
    total = align(group[0], axes)
    for factor in group[1:]:
        total = total + align(factor, axes)
    least: Array = total.min(axis=tuple(range(1, total.ndim)))
    return least


def _soften(problem: Problem) -> Problem:
    """The problem with a large finite cost in place of `inf`."""
    tables = [*problem.node_costs, *(e.costs for e in problem.edges)]
    finite = math.fsum(float(np.abs(t[np.isfinite(t)]).max(initial=0.0)) for t in tables)
    penalty = PENALTY_FACTOR * finite or 1.0
    nodes = tuple(np.where(np.isinf(c), penalty, c) for c in problem.node_costs)
    edges = tuple(
        Edge(e.a, e.b, np.where(np.isinf(e.costs), penalty, e.costs)) for e in problem.edges
    )
    return Problem(nodes, edges, problem.names)


def _improve(
    problem: Problem,
    choices: Choices,
    bound: float,
    limits: tuple[int, int],
) -> Choices:
    table_bytes, entries = limits
    times_fixed = [0] * len(choices)
    best = evaluate(problem, choices)
    idle = 0
    for _ in range(MAX_ROUNDS):
        if idle == PATIENCE or best <= bound or entries <= 0:
            break
        order = _round_order(problem, times_fixed, table_bytes)
        entries -= order.entries
        for v in order.fixed:
            times_fixed[v] += 1
        candidate = _solve_around(problem, choices, order.fixed, order.nodes)
        value = evaluate(problem, candidate)
        idle = 0 if value < best else idle + 1
        if value < best:
            best, choices = value, candidate
    return choices


def _round_order(problem: Problem, times_fixed: Sequence[int], table_bytes: int) -> Order:
    """The conditioned order with the largest bags that the limits allow, by quartering."""
    bag = ROUND_ENTRIES
    order = conditioned_order(problem, bag, times_fixed)
    while bag > 1 and (order.peak_bytes > table_bytes or order.entries > ROUND_ENTRIES):
        bag //= 4
        order = conditioned_order(problem, bag, times_fixed)
    return order


def _solve_around(
    problem: Problem,
    choices: Choices,
    fixed: Sequence[int],
    order: Sequence[int],
) -> Choices:
    """The best choices of all other nodes while those in `fixed` keep theirs."""
    held = [False] * len(choices)
    for v in fixed:
        held[v] = True
    rows = [slice(s, s + 1) if h else slice(None) for s, h in zip(choices, held, strict=True)]
    narrowed = dataclasses.replace(
        problem,
        node_costs=tuple(c[r] for c, r in zip(problem.node_costs, rows, strict=True)),
        edges=tuple(Edge(e.a, e.b, e.costs[rows[e.a], rows[e.b]]) for e in problem.edges),
    )
    reduced = fold_single(narrowed)
    # fold_single also drops free nodes that have one choice only.
    free = [v for v, n in enumerate(narrowed.sizes) if n > 1]
    index = {v: i for i, v in enumerate(free)}
    solved, _value = eliminate(
        reduced.problem, [index[v] for v in order if v in index], minimise_out
    )
    full = reduced.decode(solved)
    return tuple(s if h else f for s, f, h in zip(choices, full, held, strict=True))
