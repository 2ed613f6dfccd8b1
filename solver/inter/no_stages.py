"""Why no split into stages was found, and what to try."""

from __future__ import annotations

import math

import numpy as np

from autopar.errors import SolveError
from autopar.solver.inter.stage_problem import Discipline, StageSlice
from autopar.solver.inter.stage_tables import Array, BestSplits, Costs, Objective

_FEWER_BYTES = (
    "more devices, more micro-batches (each holds less), rematerialisation, a smaller batch, "
    "or layers cut more finely"
)


def no_stages_error(costs: Costs, *, stopped: bool, work: int) -> SolveError:
    """The error for a search that ended with no split.

    Args:
        costs: the tables of the problem.
        stopped: whether a work limit ended it.
        work: partial splits that were grown.
    """
    problem = costs.problem
    what = f"no split of {problem.layers} layers into stages on {problem.devices} devices"
    got = f"submeshes {problem.submeshes} of a {problem.mesh[0]}x{problem.mesh[1]} mesh"
    needs = least_need(costs)
    if needs is None:
        return SolveError(
            f"{what} uses every device",
            got=got,
            why="the submesh sizes do not add up to the devices for any split whose stages can run",
            remedy="allow more submesh shapes, or fewer devices",
        )
    need, stages = needs
    if need > problem.memory_bytes:
        return _memory_error(costs, what, need, stages)
    if stopped:
        return SolveError(
            f"{what} was found within the limit of the search",
            got=f"{got}; {work} partial splits grown",
            remedy="raise the limits, or give the stages by hand",
        )
    return SolveError(
        f"{what} both fits the memory and tiles the mesh",
        got=got,
        why="the splits that fit use submeshes that cannot be laid side by side on the mesh",
        remedy="allow only shapes (1, 2^k) and whole hosts, which always fit together",
    )


def least_need(costs: Costs) -> tuple[float, tuple[StageSlice, ...]] | None:
    """The split whose fullest device needs the fewest bytes, and these bytes."""

    def stage(in_flight: int) -> Array:
        return np.where(costs.present, costs.need(in_flight), math.inf)

    splits = BestSplits(costs, Objective(stage, np.maximum, np.zeros_like(costs.there)))
    counts = range(1, costs.problem.most_stages + 1)
    return min((best for best in map(splits.best, counts) if best), default=None)


def _memory_error(
    costs: Costs, what: str, need: float, stages: tuple[StageSlice, ...]
) -> SolveError:
    problem = costs.problem
    tail = problem.tail(len(stages))
    needs = [
        costs.need(live)[s.first, s.last + 1, s.submesh]
        for s, live in zip(stages, tail, strict=True)
    ]
    index = int(np.argmax(needs))
    stage, live = stages[index], tail[index]
    shape = problem.submeshes[stage.submesh]
    held = live * costs.activation[stage.first, stage.last + 1, stage.submesh]
    over = need - problem.memory_bytes
    earlier = (
        "a 1F1B schedule (fewer micro-batches in flight), "
        if problem.discipline is Discipline.FORWARDS_FIRST and len(stages) > 1
        else ""
    )
    return SolveError(
        f"{what} fits the memory: the best is {over:,.0f} bytes over on a device",
        got=(
            f"{_count(len(stages), 'stage')}; stage {index}, "
            f"layers {stage.first} to {stage.last} on "
            f"{shape[0]}x{shape[1]} devices, needs {need:,.0f} bytes of {problem.memory_bytes:,.0f}"
        ),
        why=(
            f"{need - held:,.0f} bytes of weights, optimizer state, gradients and temporaries, "
            f"and {held:,.0f} of activations of {_count(live, 'micro-batch')} in flight"
        ),
        remedy=earlier + _FEWER_BYTES,
    )


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("h") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"
