"""The pairwise problem that every intra-op solver takes, and the answer that each returns.

A problem has nodes `i` with `K_i` choices each, a cost vector `c_i [K_i]` per node and a cost
table `E_ab [K_a, K_b]` per edge, all in seconds:

    minimise   sum_i c_i[s_i] + sum_(a,b) E_ab[s_a, s_b]   over   s_i in {0, ..., K_i - 1}

An entry of `inf` is an impossible combination. Resources, if any, are limits on sums over nodes
(bytes that are alive together, say): `sum_i w_i[s_i] <= limit`. Nothing here knows what a node
stands for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.errors import SolveError

Array = NDArray[np.float64]
Choices = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """A cost between two nodes.

    Attributes:
        a: index of the first node.
        b: index of the second node; may equal `a`, and edges may be parallel.
        costs: seconds `[K_a, K_b]`; `inf` where the pair is impossible.
    """

    a: int
    b: int
    costs: Array

    def __post_init__(self) -> None:
        object.__setattr__(self, "costs", frozen_array(self.costs))


@dataclass(frozen=True, slots=True)
class Resource:
    """A limit on a sum over the nodes: `sum_i weights[i][s_i] <= limit`.

    Attributes:
        weights: one vector `[K_i]` per node, in the unit of `limit` (bytes, for memory); finite.
        limit: the most that may be used.
        name: for errors, such as "memory at dot_general.7".
    """

    weights: tuple[Array, ...]
    limit: float
    name: str = "resource"

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", tuple(frozen_array(w) for w in self.weights))

    def used(self, choices: Sequence[int]) -> float:
        """The sum for these choices, exactly rounded."""
        return math.fsum(float(w[s]) for w, s in zip(self.weights, choices, strict=True))


@dataclass(frozen=True, slots=True)
class Problem:
    """Nodes with choices and pairwise costs; arrays are made read-only.

    Attributes:
        node_costs: one vector `[K_i]` of seconds per node, `K_i >= 1`.
        edges: pairwise costs, in any order and orientation.
        names: one name per node, for errors and reports.
        resources: limits on sums over the nodes.

    Raises:
        SolveError: a shape does not fit, an index is out of range, or a cost is NaN or `-inf`.
    """

    node_costs: tuple[Array, ...]
    edges: tuple[Edge, ...] = ()
    names: tuple[str, ...] = ()
    resources: tuple[Resource, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "node_costs", tuple(frozen_array(c) for c in self.node_costs))
        names = self.names or tuple(f"node {i}" for i in range(len(self.node_costs)))
        object.__setattr__(self, "names", names)
        _verify(self)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of choices of each node."""
        return tuple(len(c) for c in self.node_costs)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one solve may spend.

    Attributes:
        time_limit: seconds. Elimination turns it into a number of table entries, so that its
            answer does not depend on the clock; the ILP back-ends stop by the clock.
        table_bytes: the most bytes that elimination holds in tables at once.
    """

    time_limit: float = 60.0
    table_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        if not (self.time_limit > 0 and self.table_bytes > 0):
            raise SolveError(
                "solver limits must be positive",
                got=f"time_limit={self.time_limit}, table_bytes={self.table_bytes}",
            )


@dataclass(frozen=True, slots=True)
class Solution:
    """A feasible answer and how good it is known to be.

    Attributes:
        choices: one choice index per node.
        objective: seconds, recomputed from `choices` by `evaluate`.
        lower_bound: seconds; no answer can cost less.
        gap: `(objective - lower_bound) / |objective|`; 0 when proven optimal.
        name: the solver, such as "elimination".
        seconds: wall-clock time of the solve.
        notes: what a reader should know, such as a limit that was hit.
    """

    choices: Choices
    objective: float
    lower_bound: float
    gap: float
    name: str
    seconds: float
    notes: tuple[str, ...] = ()


def frozen_array(values: Array) -> Array:
    """A read-only float64 array; a view where the dtype already fits."""
    array = np.asarray(values, dtype=np.float64).view()
    array.flags.writeable = False
    return array


def evaluate(problem: Problem, choices: Sequence[int]) -> float:
    """Seconds of `choices` by exact summation, independent of any solver.

    `inf` if a combination is impossible or a resource is over its limit.
    """
    if any(r.used(choices) > r.limit for r in problem.resources):
        return math.inf
    node_terms = (float(c[s]) for c, s in zip(problem.node_costs, choices, strict=True))
    edge_terms = (float(e.costs[choices[e.a], choices[e.b]]) for e in problem.edges)
    return math.fsum((*node_terms, *edge_terms))


def make_solution(
    problem: Problem,
    choices: Sequence[int],
    *,
    lower_bound: float,
    name: str,
    seconds: float,
    notes: Iterable[str] = (),
) -> Solution:
    """Price `choices` with `evaluate` and set the gap.

    A bound above the objective is a rounding difference between two orders of summation (callers
    prove their bounds) and is lowered to it; one within 1e-12 of it is taken as equal.
    """
    objective = evaluate(problem, choices)
    bound = min(objective, lower_bound)
    if objective - bound <= 1e-12 * abs(objective):
        bound = objective
    difference = objective - bound
    gap = difference / abs(objective) if objective else (math.inf if difference else 0.0)
    plain = tuple(int(s) for s in choices)
    return Solution(plain, objective, bound, gap, name, seconds, tuple(notes))


def _verify(problem: Problem) -> None:
    count = len(problem.node_costs)
    if len(problem.names) != count:
        raise SolveError(
            "a problem needs one name per node", got=f"{len(problem.names)} names, {count} nodes"
        )
    for name, costs in zip(problem.names, problem.node_costs, strict=True):
        if costs.ndim != 1 or not len(costs):
            raise SolveError(
                "node costs must be a vector of at least one choice",
                where=name,
                got=f"shape {costs.shape}",
            )
        _verify_values(costs, name)
    for edge in problem.edges:
        _verify_edge(problem, edge)
    for resource in problem.resources:
        if tuple(w.shape for w in resource.weights) != tuple((n,) for n in problem.sizes):
            raise SolveError("a resource needs one weight per choice", where=resource.name)
        values = [float(w.sum()) for w in resource.weights]
        if not all(math.isfinite(v) for v in (*values, resource.limit)):
            raise SolveError("a resource weight or limit is not finite", where=resource.name)


def _verify_edge(problem: Problem, edge: Edge) -> None:
    count = len(problem.node_costs)
    if not (0 <= edge.a < count and 0 <= edge.b < count):
        raise SolveError("an edge names a node that is not there", got=f"{edge.a} - {edge.b}")
    where = edge_name(problem, edge)
    expected = (len(problem.node_costs[edge.a]), len(problem.node_costs[edge.b]))
    if edge.costs.shape != expected:
        raise SolveError(
            "an edge table does not fit its nodes",
            where=where,
            got=f"shape {edge.costs.shape}, expected {expected}",
        )
    _verify_values(edge.costs, where)


def _verify_values(costs: Array, where: str) -> None:
    if not costs.min() > -math.inf:  # a NaN anywhere makes the minimum NaN
        raise SolveError(
            "a cost is NaN or -inf", where=where, remedy="use inf for what is impossible"
        )


def edge_name(problem: Problem, edge: Edge) -> str:
    """How errors name an edge."""
    return f"edge {problem.names[edge.a]} - {problem.names[edge.b]}"
