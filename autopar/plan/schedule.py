"""A pipeline schedule: per rank, actions in order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Action:
    """One action: `1F3` is stage 1, forward, micro-batch 3."""

    stage: int
    kind: str
    micro: int = -1
    peer: int = -1

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro if self.micro >= 0 else ''}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Rows of actions, one a rank; None is a bubble."""

    name: str
    stages: int
    micro_batches: int
    ranks: tuple[tuple[Action | None, ...], ...]
