r"""What no schedule can beat: the bound of a partial split, and the tables behind it.

Write F, B, U for a stage's forward, backward and update, m for the micro-batches, and t = F + B. A
schedule runs each stage's m forwards and m backwards on one rank, one at a time; a forward follows
the forward of its micro-batch on the stage before, a backward that on the stage after (the last
stage: its own forward), each after the transfer between the two submeshes.

Three chains hold for stage s under *any* such schedule:

    entry_s   its first forward starts no earlier than sum_{i<s} (F_i + transfer)
    rt_s      a micro-batch returns from the later stages no earlier than
              rt_s = sum_{i>s} (F_i + B_i + transfers both ways) after its forward on s
    tail_s    after its last backward ends, the step goes on for tail_s = max(U_s, transfer back +
              B_{s-1} + tail_{s-1}), as the micro-batch of that backward still has to go down

so the makespan is at least entry_s + span_s + tail_s, where span_s is the time from the first
start to the last end on s, at least

    ANY        max(m t,  m F + rt + B,  F + rt + m B): the rank is busy for m t; the last forward
               to run ends after m F and has its return and backward ahead; the first backward to
               run starts after F + rt and has m B ahead. Holds for GPipe and 1F1B alike.
    CAPPED     besides, if at most c < m micro-batches are in flight (1F1B: c = min(m, p - s)):
               before the first backward at most c forwards can run, so the rank idles for at least
               rt - (c-1) F before it; after the last forward at most c backwards are left, so it
               idles at least rt - (c-1) B there; c < m puts the first backward before the last
               forward, so the idle times are disjoint and add up:
               m t + max(0, rt - (c-1) F) + max(0, rt - (c-1) B).
               And the (qc+1)-th forward starts only after q rounds of t + rt: of the first qc+1 at
               least (q-1)c+1 have returned by then, one of which started no earlier than the
               ((q-1)c+1)-th. With q = ceil(m/c) - 1: span >= q (t + rt) + (m - qc) F + rt + B.

    FORWARDS_FIRST (GPipe)   the last stage starts no backward before it has run m forwards, and
               for any stage s that is no earlier than the path of one micro-batch to its end plus
               (m-1) F_s; from then on it is the same with backwards. So the makespan is at least
               the path of one micro-batch there and back + (m-1) (max_s F_s + max_s B_s).

A split that is begun is bounded by what is known of it, and for the layers and devices left by
tables over (layers done, devices left, submesh), computed from the last stage to the first:
least rt, least worst entry + span + tail, least max F and max B, each minimised by itself. Every
span grows with rt, so the least rt of the rest keeps it a bound.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.solver.inter.stage_problem import Discipline, StageProblem
from autopar.solver.inter.stage_tables import Array, Costs, fold, hop, no_rest


def span(
    problem: StageProblem, forward: Array, backward: Array, round_trip: Array, in_flight: Any
) -> Array:
    """Least seconds from the first start to the last end on a stage.

    Args:
        problem: gives m and the discipline.
        forward, backward, round_trip: seconds; any shapes that broadcast.
        in_flight: the cap c of the stage: a number or an array of them, at least 1.
    """
    m = problem.micro_batches
    both = forward + backward
    least = np.maximum(m * both, round_trip + both + (m - 1) * np.maximum(forward, backward))
    if problem.discipline is not Discipline.CAPPED:
        return np.asarray(least)
    filling = np.maximum(0.0, round_trip - (in_flight - 1) * forward)
    draining = np.maximum(0.0, round_trip - (in_flight - 1) * backward)
    idle = np.where(np.less(in_flight, m), filling + draining, 0.0)
    rounds = np.ceil(m / np.asarray(in_flight)) - 1
    # Written without 0 * infinity, as round trips that cannot be are infinite.
    cycles = rounds * both + (rounds + 1) * round_trip
    cycles = cycles + (m - rounds * in_flight) * forward + backward
    return np.asarray(np.maximum(np.maximum(least, cycles), m * both + idle))


@dataclass(frozen=True, slots=True, eq=False)
class Rest:
    """Bounds for the stages still to be chosen: `[L+1, D+1, A]` by layers done, devices left, and
    the submesh of the stage before; transfers from it are in them. Infinite where nothing fits.

    Attributes:
        round_trip: least seconds of a micro-batch through the rest and back.
        drained: least over splits of the greatest, over stages, of seconds from the start of the
            rest to its end there plus the way back to its start.
        updated: the same with the stage's own update in place of the way back.
        forward, backward: least over splits of the greatest F, and of the greatest B.
    """

    round_trip: Array
    drained: Array
    updated: Array
    forward: Array
    backward: Array


class Bounds:
    """The tables of the rest, by the in-flight micro-batches of its stages; computed once each."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._rest: dict[tuple[int, ...], Rest] = {}

    def rest(self, tail: tuple[int, ...]) -> Rest:
        """Tables for `len(tail)` more stages, with that many micro-batches in flight."""
        found = self._rest.get(tail)
        if found is None:
            found = self._extend(tail) if tail else Rest(*[no_rest(self.costs)] * 5)
            self._rest[tail] = found
        return found

    def _extend(self, tail: tuple[int, ...]) -> Rest:
        costs, after, in_flight = self.costs, self.rest(tail[1:]), tail[0]
        absent = np.where(costs.fits(in_flight), 0.0, math.inf)[:, :, None, :]
        forward, backward = costs.forward[:, :, None, :], costs.backward[:, :, None, :]
        update = costs.update[:, :, None, :]

        def spans(a: int, s: slice) -> Array:
            trip = after.round_trip[:, s, a]
            return span(costs.problem, forward[..., a], backward[..., a], trip, in_flight)

        def round_trip(a: int, s: slice) -> Array:
            both = forward[..., a] + backward[..., a] + absent[..., a]
            return np.asarray(both + after.round_trip[:, s, a])

        def drained(a: int, s: slice) -> Array:
            through = forward[..., a] + backward[..., a] + after.drained[:, s, a]
            return np.asarray(np.maximum(spans(a, s), through) + absent[..., a])

        def updated(a: int, s: slice) -> Array:
            own = spans(a, s) + update[..., a]
            return (
                np.asarray(np.maximum(own, forward[..., a] + after.updated[:, s, a]))
                + (absent[..., a])
            )

        def greatest(seconds: Array, rest: Array, a: int, s: slice) -> Array:
            return np.asarray(np.maximum(seconds[..., a], rest[:, s, a]) + absent[..., a])

        free = np.zeros_like(costs.there)
        both_ways = costs.there + costs.back
        most_forward = functools.partial(greatest, forward, after.forward)
        most_backward = functools.partial(greatest, backward, after.backward)
        return Rest(
            hop(fold(costs, round_trip), both_ways),
            hop(fold(costs, drained), both_ways),
            hop(fold(costs, updated), costs.there),
            hop(fold(costs, most_forward), free),
            hop(fold(costs, most_backward), free),
        )
