"""1F1B (PipeDream-flush; Narayanan et al., SOSP 2019, ICML 2021): backwards as soon as they can be.

    rank 0: 0F0 0F1  .   .  0B0 0F2 0B1  .  0B2
    rank 1:  .  1F0 1B0 1F1 1B1  .  1F2 1B2

Rank r does min(m, p - 1 - r) forwards to warm up, then pairs of one forward and one backward, then
the backwards that are left. The bubble is GPipe's; a stage holds at most p - r micro-batches.
"""

from __future__ import annotations

from autopar.plan.schedule import Action, Schedule


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """The schedule; rank `s` runs stage `s`."""
    rows = []
    for stage in range(stages):
        warm = min(micro_batches, stages - 1 - stage)
        row = [Action(stage, "F", micro) for micro in range(warm)]
        for micro in range(micro_batches):
            if warm + micro < micro_batches:
                row.append(Action(stage, "F", warm + micro))
            row.append(Action(stage, "B", micro))
        rows.append(tuple(row))
    return Schedule("1f1b", stages, micro_batches, tuple(rows))
