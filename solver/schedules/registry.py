"""Schedules by name: a new one is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.errors import ArgumentError
from autopar.plan.schedule import Schedule
from autopar.solver.schedules.gpipe import gpipe
from autopar.solver.schedules.inference import inference
from autopar.solver.schedules.one_f_one_b import one_f_one_b

SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "inference": inference,
}


def make_schedule(name: str, stages: int, micro_batches: int) -> Schedule:
    """The schedule of that name, compute actions only.

    Raises:
        ArgumentError: there is no such schedule, or a number is below 1.
    """
    if name not in SCHEDULES:
        raise ArgumentError("unknown schedule", got=repr(name), remedy=" | ".join(SCHEDULES))
    if stages < 1 or micro_batches < 1:
        raise ArgumentError(
            "a schedule needs at least one stage and one micro-batch",
            got=f"{stages} stages, {micro_batches} micro-batches",
        )
    return SCHEDULES[name](stages, micro_batches)
