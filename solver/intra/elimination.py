"""Exact solving by variable elimination of min-plus tables (bucket elimination, Dechter 1999).

The reductions of `simplify` and `low_degree` go first; what is left is a kernel in which every
node has three neighbours or more. For each kernel node `v`, in the order of `ordering`, all
tables that mention `v` are added, `v` is minimised out, and the result is a table over the other
nodes in them (the bag). Read backwards, the kept argmins give the choices. The work is linear in
depth and exponential in the treewidth alone, so models of any depth with skips are solved exactly.

Where the tables would exceed `Limits.table_bytes`, or the work `Limits.time_limit`, the answer is
bounded instead (see `bounded`): a feasible one and a lower bound. Resource limits are relaxed
into the costs (see `memory_rows`), which may leave a gap too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Sequence

from autopar.errors import SolveError
from autopar.solver.intra.bounded import solve_bounded
from autopar.solver.intra.buckets import eliminate
from autopar.solver.intra.low_degree import Minimise, eliminate_low_degree
from autopar.solver.intra.memory_rows import solve_with_resources
from autopar.solver.intra.ordering import Order, best_order
from autopar.solver.intra.problem import (
    Choices,
    Limits,
    Problem,
    Solution,
    evaluate,
    make_solution,
)
from autopar.solver.intra.pruning import CHEAP_ENTRIES, narrow
from autopar.solver.intra.simplify import EXACT_PASSES, Pass, simplify
from autopar.solver.intra.tables import TableCache, minimise_out

NAME = "elimination"

# Table entries per second on one core of a 2024 server, rounded down (1.8 to 2.6 ns an entry were
# measured). It turns the time limit into a work limit, so that answers never depend on the clock.
ENTRIES_PER_SECOND = 3e8

# Share of the table bytes that the cache of shared steps may keep alive.
CACHE_SHARE = 0.25


def solve_elimination(problem: Problem, *, limits: Limits, reuse: bool = True) -> Solution:
    """Solve exactly, or with a bound where the tables would not fit.

    Args:
        problem: any pairwise problem, with resources or without.
        limits: bytes and work that exact elimination may use.
        reuse: compute steps with equal tables once (exact); off only to measure its effect.

    Raises:
        SolveError: the problem is infeasible, or no feasible answer was found within the limits.
    """
    start = time.perf_counter()
    if problem.resources:
        return _with_resources(problem, limits, start)
    cache_bytes = int(limits.table_bytes * CACHE_SHARE) if reuse else 0
    minimise: Minimise = TableCache(cache_bytes).minimise if reuse else minimise_out
    low_degree = functools.partial(eliminate_low_degree, minimise=minimise)
    reduced = simplify(problem, (*EXACT_PASSES, low_degree))
    limits = dataclasses.replace(limits, table_bytes=max(1, limits.table_bytes - cache_bytes))
    kernel, bound, notes = _kernel(reduced.problem, limits, low_degree, minimise)
    solution = make_solution(
        problem,
        reduced.decode(kernel),
        lower_bound=bound + reduced.offset,
        name=NAME,
        seconds=time.perf_counter() - start,
        notes=notes,
    )
    return _checked(solution)


def _checked(solution: Solution) -> Solution:
    """Refuse an impossible answer; say how far a bounded one can be from the optimum."""
    if math.isinf(solution.objective):
        raise SolveError(
            "no feasible choice was found within the limits",
            got="; ".join(solution.notes),
            remedy='raise the table bytes or the time limit, or use solver="ilp-highs"',
        )
    if solution.gap == 0:
        return solution
    notes = (*solution.notes, f"the answer is within {solution.gap:.3%} of the optimum")
    return dataclasses.replace(solution, notes=notes)


def _with_resources(problem: Problem, limits: Limits, start: float) -> Solution:
    relaxed = functools.partial(solve_elimination, limits=limits)
    choices, bound = solve_with_resources(problem, relaxed=relaxed)
    solution = make_solution(
        problem,
        choices,
        lower_bound=bound,
        name=NAME,
        seconds=time.perf_counter() - start,
        notes=("resource limits by Lagrangian relaxation",),
    )
    return _checked(solution)


def fits(order: Order, limits: Limits) -> bool:
    """Whether exact elimination in this order stays within the limits."""
    work = limits.time_limit * ENTRIES_PER_SECOND
    return order.peak_bytes <= limits.table_bytes and order.entries <= work


def _kernel(
    problem: Problem, limits: Limits, low_degree: Pass, minimise: Minimise
) -> tuple[Choices, float, Sequence[str]]:
    """Exact at once where that is cheap; else after pruning, as far as the limits allow."""
    order = best_order(problem)
    if order.entries <= CHEAP_ENTRIES and fits(order, limits):
        return _exact(problem, order, minimise)
    narrowed = narrow(problem)
    reduced = simplify(narrowed.problem, (*EXACT_PASSES, low_degree))
    order = best_order(reduced.problem)
    if fits(order, limits):
        choices, bound, notes = _exact(reduced.problem, order, minimise)
    else:
        choices, bound, notes = _bounded(reduced.problem, order, limits)
        bound = max(bound + reduced.offset, narrowed.bound)
    answers = (narrowed.decode(reduced.decode(choices)), narrowed.decode(narrowed.incumbent))
    return min(answers, key=lambda answer: evaluate(problem, answer)), bound, notes


def _exact(
    kernel: Problem, order: Order, minimise: Minimise
) -> tuple[Choices, float, Sequence[str]]:
    choices, value = eliminate(kernel, order.nodes, minimise)
    if math.isinf(value):
        raise SolveError(
            "the problem is infeasible",
            where=kernel.names[0],
            why=f"no combination of choices of the {len(kernel.names)} nodes from here on that "
            "constrain each other has a finite cost",
        )
    # Proven optimal: the bound is whatever `evaluate` makes of the choices.
    return choices, math.inf, ()


def _bounded(kernel: Problem, order: Order, limits: Limits) -> tuple[Choices, float, Sequence[str]]:
    work = int(limits.time_limit * ENTRIES_PER_SECOND)
    choices, bound = solve_bounded(kernel, table_bytes=limits.table_bytes, entries=work)
    note = (
        f"bounded, not exact: {len(kernel.names)} nodes of width {order.width} need "
        f"{order.peak_bytes} bytes of tables and {order.entries} entries of work; "
        f"the limits are {limits.table_bytes} bytes and {work} entries"
    )
    return choices, bound, (note,)
