"""Between which stages values flow, and the pass that adds sends and receives to a schedule.

When a producer is scheduled, its SEND is appended to its rank's list and the matching RECV to the
consumer's list at that moment: one global order of which every list is a part. Followed in order,
such lists cannot deadlock under any kind of channel (`deadlock.py` tries five).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import ScheduleError
from autopar.plan.schedule import Action, Cell, Schedule, parts


@dataclass(frozen=True, slots=True)
class Edges:
    """Pairs (source stage, target stage) between which values flow.

    Attributes:
        forward: results of F.
        backward: results of B (or I).
    """

    forward: tuple[tuple[int, int], ...]
    backward: tuple[tuple[int, int], ...]


def chain(stages: int) -> Edges:
    """Each stage to the next, and back."""
    pairs = tuple((stage, stage + 1) for stage in range(stages - 1))
    return Edges(pairs, tuple((b, a) for a, b in pairs))


def communicate(schedule: Schedule, edges: Edges | None = None) -> Schedule:
    """The schedule with its sends and receives; stages of one rank need none.

    Raises:
        ScheduleError: the schedule stands still.
    """
    edges = edges or chain(schedule.stages)
    rank_of = schedule.placement
    rows: list[list[Cell]] = [[] for _ in schedule.ranks]
    at = [0] * len(schedule.ranks)
    done: set[tuple[str, int, int]] = set()
    while any(place < len(row) for place, row in zip(at, schedule.ranks, strict=True)):
        moved = False
        for rank, row in enumerate(schedule.ranks):
            if at[rank] == len(row) or not _ready(row[at[rank]], edges, done):
                continue
            cell = row[at[rank]]
            at[rank] += 1
            moved = True
            rows[rank].append(cell)
            for action in parts(cell):
                if action.kind in ("F", "B", "I"):
                    kind = "F" if action.kind == "F" else "B"
                    done.add((kind, action.stage, action.micro))
                    _send(action, kind, edges, rows, rank_of)
        if not moved:
            stuck = [str(r[i]) for i, r in zip(at, schedule.ranks, strict=True) if i < len(r)]
            raise ScheduleError("the schedule stands still", got=f"next: {', '.join(stuck)}")
    return Schedule(
        schedule.name, schedule.stages, schedule.micro_batches, tuple(tuple(row) for row in rows)
    )


def _send(
    action: Action,
    kind: str,
    edges: Edges,
    rows: list[list[Cell]],
    rank_of: Sequence[int],
) -> None:
    for source, target in edges.forward if kind == "F" else edges.backward:
        here, there = rank_of[source], rank_of[target]
        if source == action.stage and here != there:
            rows[here].append(Action(source, f"SEND_{kind}", action.micro, target))
            rows[there].append(Action(target, f"RECV_{kind}", action.micro, source))


def _ready(cell: Cell, edges: Edges, done: set[tuple[str, int, int]]) -> bool:
    for action in parts(cell):
        stage, micro = action.stage, action.micro
        needs: list[tuple[str, int, int]] = []
        if action.kind == "F":
            needs = [("F", a, micro) for a, b in edges.forward if b == stage]
        elif action.kind in ("B", "I"):
            needs = [
                ("F", stage, micro),
                *(("B", a, micro) for a, b in edges.backward if b == stage),
            ]
        elif action.kind == "W":
            needs = [("B", stage, micro)]
        if not done.issuperset(needs):
            return False
    return True
