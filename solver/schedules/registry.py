"""Schedules by name."""

from __future__ import annotations

from autopar.plan.schedule import Action, Schedule


def make_schedule(name: str, stages: int, micro_batches: int) -> Schedule:
    """The schedule of that name."""
    ranks = []
    for s in range(stages):
        warm = min(micro_batches, stages - 1 - s) if name == "1f1b" else micro_batches
        row = [Action(s, "F", i) for i in range(warm)]
        f, b = warm, 0
        while f < micro_batches:
            row += [Action(s, "F", f), Action(s, "B", b)]
            f, b = f + 1, b + 1
        if name != "inference":
            row += [Action(s, "B", i) for i in range(b, micro_batches)]
        ranks.append(tuple(row))
    return Schedule(name, stages, micro_batches, tuple(ranks))
