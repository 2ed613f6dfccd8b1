"""GPipe (Huang et al., NeurIPS 2019): all forwards, then all backwards.

    rank 0: 0F0 0F1 0F2  .   .  0B0 0B1 0B2
    rank 1:  .  1F0 1F1 1F2 1B0 1B1 1B2

The bubble is (p - 1)(F + B) for p stages, and every stage holds all micro-batches.
"""

from __future__ import annotations

from autopar.plan.schedule import Action, Schedule


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """The schedule; rank `s` runs stage `s`."""
    rows = tuple(
        tuple(Action(stage, kind, micro) for kind in "FB" for micro in range(micro_batches))
        for stage in range(stages)
    )
    return Schedule("gpipe", stages, micro_batches, rows)
