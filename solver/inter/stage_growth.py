"""Every way to put one more stage after a begun split, each with its bound.

The bound of `stage_bound` on the stages chosen so far, with the least the rest can add, and on the
rest by its tables. All alternatives for the next stage are bounded at once, as arrays over them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.solver.inter.stage_bound import Bounds, span
from autopar.solver.inter.stage_problem import Discipline, StageSlice
from autopar.solver.inter.stage_tables import Array, Costs


@dataclass(frozen=True, slots=True, eq=False)
class Children:
    """The stages that may come next, by where they end, then by submesh.

    Attributes:
        stop, submesh: layer after the stage's last, and submesh `[N]`.
        bound: seconds `[N]` that no completion with that stage can beat.
    """

    stop: NDArray[np.intp]
    submesh: NDArray[np.intp]
    bound: Array


def children(bounds: Bounds, count: int, stages: tuple[StageSlice, ...]) -> Children:
    """The next stages after `stages` in splits into `count` stages that can be completed."""
    costs, depth = bounds.costs, len(stages)
    problem = costs.problem
    tail = problem.tail(count)
    rest = bounds.rest(tail[depth + 1 :])
    sizes = np.asarray(costs.sizes)
    left = problem.devices - sum(costs.sizes[stage.submesh] for stage in stages)
    first = stages[-1].last + 1 if stages else 0
    stop, submesh = np.nonzero(costs.fits(tail[depth])[first] & (sizes <= left))
    possible = np.isfinite(rest.round_trip[stop, left - sizes[submesh], submesh])
    stop, submesh = stop[possible], submesh[possible]
    then = (stop, left - sizes[submesh], submesh)
    chain = _chain(costs, stages, (first, stop, submesh))
    trip = rest.round_trip[then]
    in_flight = np.asarray(tail[: depth + 1])[:, None]
    return_after = chain.path[-1] + trip - chain.path
    spans = span(problem, chain.forward, chain.backward, return_after, in_flight)
    reach = chain.entry[-1] + chain.forward[-1]
    drained = reach + rest.drained[then] + chain.backward[-1] + chain.tail[-1]
    updated = reach + rest.updated[then]
    bound = np.maximum(np.maximum(drained, updated), (chain.entry + spans + chain.tail).max(axis=0))
    if problem.discipline is Discipline.FORWARDS_FIRST:
        slowest = np.maximum(chain.forward.max(axis=0), rest.forward[then])
        slowest += np.maximum(chain.backward.max(axis=0), rest.backward[then])
        phases = chain.path[-1] + trip + (problem.micro_batches - 1) * slowest + chain.tail[0]
        bound = np.maximum(bound, phases)
    return Children(stop, submesh, bound)


@dataclass(frozen=True, slots=True, eq=False)
class _Chain:
    """Stages in a row, the last one in N alternatives; `[stages, N]` each.

    Attributes:
        forward, backward: F and B.
        entry: earliest start of the first forward.
        tail: seconds the step goes on for after the last backward.
        path: seconds of a micro-batch through the stages up to this one, and back.
    """

    forward: Array
    backward: Array
    entry: Array
    tail: Array
    path: Array


def _chain(
    costs: Costs, stages: tuple[StageSlice, ...], alternatives: tuple[int, Any, Any]
) -> _Chain:
    """The chain of `stages` and the alternatives `(first, stop [N], submesh [N])` after them."""
    forward = backward = entry = tail = path = there = back = np.float64(0.0)
    rows: list[tuple[Any, ...]] = []
    before: int | None = None
    chosen = [(stage.first, stage.last + 1, stage.submesh) for stage in stages]
    for first, stop, submesh in (*chosen, alternatives):
        if before is not None:
            there, back = costs.there[first, before, submesh], costs.back[first, before, submesh]
        entry = entry + forward + there
        tail = np.maximum(costs.update[first, stop, submesh], back + backward + tail)
        forward, backward = (
            costs.forward[first, stop, submesh],
            costs.backward[first, stop, submesh],
        )
        path = path + there + forward + backward + back
        rows.append((forward, backward, entry, tail, path))
        before = submesh
    shape = (len(alternatives[1]),)
    columns = (np.stack([np.broadcast_to(row[i], shape) for row in rows]) for i in range(5))
    return _Chain(*columns)
