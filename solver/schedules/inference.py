"""Inference: forwards only, one micro-batch behind the other."""

from __future__ import annotations

from autopar.plan.schedule import Action, Schedule


def inference(stages: int, micro_batches: int) -> Schedule:
    """The schedule; rank `s` runs stage `s`."""
    rows = tuple(
        tuple(Action(stage, "F", micro) for micro in range(micro_batches))
        for stage in range(stages)
    )
    return Schedule("inference", stages, micro_batches, rows)
