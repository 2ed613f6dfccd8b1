"""What a driver knows of one of its workers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from autopar.ir.mesh import Mesh
from autopar.lower.cross_mesh import TilePlan
from autopar.lower.instruction_text import instruction_text
from autopar.lower.instructions import BufferSpec, Key, Recv, Run, WorkerProgram
from autopar.runtime.remote_worker import feed_plan


@dataclass
class Peer:
    """One worker.

    Attributes:
        rank, stage: which.
        mesh: its devices.
        feeds, plans: what it is fed in a step, in order, and by which tiles.
        results: what it keeps of a step, in order.
        texts: of its instructions.
        waits: per instruction, the workers whose arrays it may have to wait for.
        unwanted: handles it may forget.
    """

    rank: int
    stage: str
    mesh: Mesh
    feeds: tuple[tuple[Key, BufferSpec], ...]
    plans: tuple[TilePlan, ...]
    results: tuple[tuple[int, BufferSpec], ...]
    texts: tuple[str, ...]
    waits: tuple[frozenset[int], ...]
    unwanted: deque[int] = field(default_factory=deque)

    def take_unwanted(self, most: int | None = None) -> list[int]:
        """Up to so many of the unwanted handles, which it then forgets.

        Handles come in from finalizers, in any thread at any allocation: one by one is atomic.
        """
        count = len(self.unwanted)
        return [self.unwanted.popleft() for _ in range(count if most is None else min(count, most))]


def peer_of(worker: WorkerProgram) -> Peer:
    """What the driver has to know of a worker."""
    feeds = worker.feeds()
    return Peer(
        worker.rank,
        worker.stage,
        worker.mesh,
        feeds,
        tuple(feed_plan(spec, worker.mesh) for _, spec in feeds),
        worker.results(),
        tuple(map(instruction_text, worker.instructions)),
        _waits(worker),
    )


def _waits(worker: WorkerProgram) -> tuple[frozenset[int], ...]:
    """A RECV only posts; who reads its buffer first waits for it."""
    coming: dict[str, int] = {}
    found = []
    for item in worker.instructions:
        if isinstance(item, Recv):
            coming[item.buffer] = item.peer
        reads = item.inputs if isinstance(item, Run) else (getattr(item, "buffer", ""),)
        waited = () if isinstance(item, Recv) else reads
        found.append(frozenset(coming.pop(name) for name in waited if name in coming))
    return tuple(found)
