"""What a driver knows of one of its workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.lower.cross_mesh import TilePlan
from autopar.lower.instruction_text import instruction_text
from autopar.lower.instructions import BufferSpec, WorkerProgram
from autopar.runtime.remote_worker import Key, feed_plan, feeds_of, results_of


@dataclass
class Peer:
    """One worker.

    Attributes:
        rank, stage: which.
        feeds, plans: what it is fed in a step, in order, and by which tiles.
        results: what it keeps of a step, in order.
        texts: of its instructions.
        unwanted: handles it may forget.
    """

    rank: int
    stage: str
    feeds: tuple[tuple[Key, BufferSpec], ...]
    plans: tuple[TilePlan, ...]
    results: tuple[tuple[int, BufferSpec], ...]
    texts: tuple[str, ...]
    unwanted: list[int] = field(default_factory=list)


def peer_of(worker: WorkerProgram) -> Peer:
    """What the driver has to know of a worker."""
    feeds = feeds_of(worker)
    return Peer(
        worker.rank,
        worker.stage,
        feeds,
        tuple(feed_plan(spec, worker.mesh) for _, spec in feeds),
        results_of(worker),
        tuple(map(instruction_text, worker.instructions)),
    )
