"""The closed formula for a pipeline's time, and the splits that minimise it.

Alpa (arXiv 2201.12023, equation 2): with t_i = F_i + B_i,

    T = sum_i (t_i + transfers both ways) + (m - 1) max_i t_i

It knows nothing of the schedule, nor of what a transfer does to its cycles, so its minimiser
starts the search over simulated times rather than ending it.

The minimum is exact. For a cap on max t, one table gives the least sum; caps go down from the
largest that can still win, each time to the next t below the greatest of the split just found, so
only splits are visited that no other beats in both sum and maximum.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from autopar.solver.inter.stage_problem import StageSlice
from autopar.solver.inter.stage_tables import Array, BestSplits, Costs, Objective


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """A split and the seconds the closed formula gives it."""

    seconds: float
    stages: tuple[StageSlice, ...]


def closed_form_seconds(costs: Costs, stages: tuple[StageSlice, ...]) -> float:
    """The closed formula of a split."""
    times = [_stage_seconds(costs)[s.first, s.last + 1, s.submesh] for s in stages]
    pairs = itertools.pairwise(stages)
    both = costs.there + costs.back
    moves = sum(both[b.first, a.submesh, b.submesh] for a, b in pairs)
    return float(sum(times) + moves + (costs.problem.micro_batches - 1) * max(times))


def closed_form_splits(costs: Costs) -> tuple[ClosedForm, ...]:
    """Good splits under the closed formula: the first is its minimum.

    Returns:
        The minimum, then the best split met of each other number of stages, cheapest first; empty
        if no split fits memory and devices. Whether the submeshes tile the mesh is not looked at.
    """
    rounds = costs.problem.micro_batches - 1
    found: dict[int, ClosedForm] = {}
    narrowest = _least_worst(costs)
    if math.isinf(narrowest):
        return ()
    free = _least_sums(costs, math.inf)
    least_sum = min(value for value, _ in free)
    best = _keep(costs, found, (*_least_sums(costs, narrowest), *free))
    times = np.unique(_stage_seconds(costs)[costs.present])
    cap = math.inf if rounds == 0 else (best - least_sum) / rounds
    while (below := times[times < cap]).size and below[-1] >= narrowest:
        splits = _least_sums(costs, float(below[-1]))
        best = _keep(costs, found, splits)
        _, cheapest = min(splits)
        worst = max(_stage_seconds(costs)[s.first, s.last + 1, s.submesh] for s in cheapest)
        cap = min(float(worst), (best - least_sum) / rounds if rounds else 0.0)
    ranked = sorted(found.values(), key=lambda form: (form.seconds, form.stages))
    return tuple(ranked)


def _keep(
    costs: Costs,
    found: dict[int, ClosedForm],
    splits: tuple[tuple[float, tuple[StageSlice, ...]], ...],
) -> float:
    """Keep the best split of each number of stages; returns the seconds of the best of all."""
    for _, stages in splits:
        form = ClosedForm(closed_form_seconds(costs, stages), stages)
        best = found.get(len(stages))
        if best is None or (form.seconds, stages) < (best.seconds, best.stages):
            found[len(stages)] = form
    return min(form.seconds for form in found.values())


def _stage_seconds(costs: Costs) -> Array:
    return costs.forward + costs.backward


def _least_worst(costs: Costs) -> float:
    """The least, over splits, of the greatest t."""

    def stage(in_flight: int) -> Array:
        return np.where(costs.fits(in_flight), _stage_seconds(costs), math.inf)

    splits = BestSplits(costs, Objective(stage, np.maximum, np.zeros_like(costs.there)))
    counts = range(1, costs.problem.most_stages + 1)
    return min((best[0] for best in map(splits.best, counts) if best), default=math.inf)


def _least_sums(costs: Costs, cap: float) -> tuple[tuple[float, tuple[StageSlice, ...]], ...]:
    """For each number of stages that has one: the split of least sum with every t <= cap."""
    seconds = _stage_seconds(costs)

    def stage(in_flight: int) -> Array:
        return np.where(costs.fits(in_flight) & (seconds <= cap), seconds, math.inf)

    splits = BestSplits(costs, Objective(stage, np.add, costs.there + costs.back))
    counts = range(1, costs.problem.most_stages + 1)
    return tuple(best for best in map(splits.best, counts) if best)
