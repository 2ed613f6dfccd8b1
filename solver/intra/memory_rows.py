"""Resource limits by Lagrangian relaxation over elimination (Geoffrion 1974).

A resource ties all nodes together, which elimination cannot take. Moved into the costs it can:

    L(m) = min_s  cost(s) + sum_r m_r (used_r(s) - limit_r)      m_r >= 0, seconds per unit

is a lower bound for every `m`, and the minimisers are candidates. One resource: the two lines of
the best feasible and the best infeasible minimiser cross at the next `m`, until no minimiser is
below the crossing; that is the greatest bound, after finitely many steps. Several: subgradient
steps of Polyak's length. Candidates are repaired and polished one node at a time. Between bound
and candidate a gap can remain, which the ILP closes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import SolveError
from autopar.solver.intra.problem import Choices, Edge, Problem, Resource, Solution, evaluate
from autopar.solver.intra.simplify import incident, merge_edges

Relaxed = Callable[[Problem], Solution]

MAX_STEPS = 40
# Polyak's factor is halved after this many steps without a better bound.
HALVE_AFTER = 3
# Without a feasible answer yet, Polyak's target is this much above the bound.
TARGET_RISE = 0.05


# Sweeps over all nodes when a candidate is repaired.
REPAIR_SWEEPS = 8


@dataclass(frozen=True, slots=True)
class _State:
    """The best so far: the bound, and feasible choices with their cost (`inf` if none)."""

    bound: float
    choices: Choices
    cost: float

    def with_answer(self, problem: Problem, bound: float, choices: Choices) -> _State:
        """Take in a bound and a candidate, the latter also as repaired."""
        best, least = self.choices, self.cost
        for candidate in (choices, _repair(problem, choices)):
            cost = evaluate(problem, candidate)
            if cost < least:
                best, least = candidate, cost
        return _State(max(self.bound, bound), best, least)

    @property
    def closed(self) -> bool:
        """Whether the answer meets the bound."""
        return self.cost <= self.bound


def _repair(problem: Problem, choices: Choices) -> Choices:
    """Change one node at a time: less over the limits first, then cheaper, until nothing moves."""
    near = incident(problem)
    weights = [np.array([r.weights[i] for r in problem.resources]) for i in range(len(choices))]
    limits = np.array([r.limit for r in problem.resources])
    units = np.maximum(np.abs(limits), 1.0)
    used = np.array([r.used(choices) for r in problem.resources])
    current = list(choices)
    for _ in range(REPAIR_SWEEPS):
        before = tuple(current)
        for i, costs in enumerate(problem.node_costs):
            others = used - weights[i][:, current[i]]
            over = np.maximum(0.0, others[:, None] + weights[i] - limits[:, None])
            excess = (over / units[:, None]).sum(axis=0)
            total = costs + sum(table[:, current[j]] for j, table in near[i])
            excess[np.isinf(total)] = math.inf
            current[i] = int(np.lexsort((total, excess))[0])
            used = others + weights[i][:, current[i]]
        if tuple(current) == before:
            break
    return tuple(current)


def solve_with_resources(problem: Problem, *, relaxed: Relaxed) -> tuple[Choices, float]:
    """Choices within all resources and a lower bound in seconds.

    Args:
        problem: with resources.
        relaxed: solves problems without resources.

    Returns:
        Choices, of which `evaluate` is `inf` if none within the resources were found, and the
        bound.

    Raises:
        SolveError: the problem is infeasible without its resources, or one resource alone cannot
            be kept; the error names it.
    """
    problem = merge_edges(problem).problem
    free = relaxed(dataclasses.replace(problem, resources=()))
    state = _State(free.lower_bound, free.choices, evaluate(problem, free.choices))
    if state.cost < math.inf:  # the limits do not bind
        return state.choices, state.bound
    for resource in problem.resources:
        if resource.used(free.choices) > resource.limit:
            least = _least_use(problem, resource, relaxed)
            state = state.with_answer(problem, -math.inf, least)
    if len(problem.resources) == 1 and state.cost < math.inf:
        state = _crossing_lines(problem, free.choices, state, relaxed)
    else:
        state = _subgradient(problem, free.choices, state, relaxed)
    return state.choices, state.bound


def _least_use(problem: Problem, resource: Resource, relaxed: Relaxed) -> Choices:
    """Choices that use least of one resource, among those of finite cost."""
    nodes = tuple(
        np.where(np.isinf(c), math.inf, w)
        for c, w in zip(problem.node_costs, resource.weights, strict=True)
    )
    edges = tuple(Edge(e.a, e.b, np.where(np.isinf(e.costs), math.inf, 0.0)) for e in problem.edges)
    solution = relaxed(Problem(nodes, edges, problem.names))
    if solution.lower_bound > resource.limit:
        raise SolveError(
            "the problem is infeasible",
            where=resource.name,
            got=f"a limit of {resource.limit:g}",
            why=f"no choices use less than {solution.lower_bound:g}",
            remedy="raise the limit, use more devices, or smaller micro-batches",
        )
    return solution.choices


def _relax(
    problem: Problem, multipliers: Sequence[float], relaxed: Relaxed
) -> tuple[float, Choices]:
    """`L(multipliers)` (or what is proven of it) and its minimiser."""
    nodes = list(problem.node_costs)
    for multiplier, resource in zip(multipliers, problem.resources, strict=True):
        if multiplier > 0:
            nodes = [c + multiplier * w for c, w in zip(nodes, resource.weights, strict=True)]
    solution = relaxed(dataclasses.replace(problem, node_costs=tuple(nodes), resources=()))
    paid = (m * r.limit for m, r in zip(multipliers, problem.resources, strict=True))
    return solution.lower_bound - math.fsum(paid), solution.choices


def _crossing_lines(problem: Problem, over: Choices, state: _State, relaxed: Relaxed) -> _State:
    """One resource: `over` uses too much of it, `state.choices` does not."""
    (resource,) = problem.resources
    free = dataclasses.replace(problem, resources=())
    under = state.choices
    for _ in range(MAX_STEPS):
        rise = evaluate(free, under) - evaluate(free, over)
        run = resource.used(over) - resource.used(under)
        if state.closed or rise <= 0 or run <= 0:
            break
        multiplier = rise / run
        crossing = evaluate(free, over) + multiplier * (resource.used(over) - resource.limit)
        bound, choices = _relax(problem, [multiplier], relaxed)
        state = state.with_answer(problem, bound, choices)
        value = evaluate(free, choices) + multiplier * (resource.used(choices) - resource.limit)
        if value >= crossing - 1e-12 * abs(crossing):
            break  # no third line is below the crossing: the bound is the greatest
        if resource.used(choices) > resource.limit:
            over = choices
        else:
            under = choices
    return state


def _subgradient(problem: Problem, over: Choices, state: _State, relaxed: Relaxed) -> _State:
    """Several resources, from multipliers of zero, whose minimiser is `over`."""
    # In units of its own size each resource pulls equally.
    units = np.array([max(abs(r.limit), r.used(over), 1e-300) for r in problem.resources])
    multipliers = np.zeros(len(units))
    value, choices = state.bound, over
    factor, idle = 1.0, 0
    for _ in range(MAX_STEPS):
        excess = [r.used(choices) - r.limit for r in problem.resources]
        slope = np.array(excess) / units
        slope[(slope < 0) & (multipliers <= 0)] = 0.0
        length = float(slope @ slope)
        if state.closed or length == 0:
            break
        rise = state.cost if state.cost < math.inf else state.bound + TARGET_RISE * abs(state.bound)
        step = factor * max(rise - value, 0.0) / length
        multipliers = np.maximum(0.0, multipliers + step * slope)
        value, choices = _relax(problem, (multipliers / units).tolist(), relaxed)
        better = value > state.bound
        state = state.with_answer(problem, value, choices)
        idle = 0 if better else idle + 1
        if idle == HALVE_AFTER:
            factor, idle = factor / 2, 0
    return state
