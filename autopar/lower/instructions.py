"""What one worker does in one step: a list of instructions over named buffers.

A *worker* is one JAX client that owns the mesh of one stage. Its list is made by the compiler,
verified before anything runs (`lower/verify_instructions.py`), loaded once, and interpreted by one
call per step. Every wait of a worker is a RECV; everything else goes on by itself.

| text                           | meaning                                                       |
|--------------------------------|---------------------------------------------------------------|
| `FEED v3.1 argument 2 micro 1` | the buffer becomes that slice of an argument (`micro -1`: all) |
| `ZERO a7`                      | the buffer becomes zeros                                      |
| `RUN F v1 v3.1 -> v9.1 v10.1`  | run a task; what it donates is gone                           |
| `SEND v9.1 to 1 by 0 tag 17`   | send all tiles of transfer 0; ends when the bytes may change  |
| `RECV v9.1 from 0 by 0 tag 17` | receive all tiles, and put them together                      |
| `FREE v9.1`                    | forget the buffer                                             |
| `FETCH v20 result 4`           | the buffer becomes a result of the step, and leaves the list  |
| `MARK 1F3`                     | from here on the worker works on that action of the schedule  |

Buffers have *boundary* shapes: ordinary global arrays with ordinary shardings, nothing pending. A
value that is held as pending sums has the axes of its sum as leading dims: `lower/boundary.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.lower.cross_mesh import TilePlan

WHOLE = -1
"""In place of a micro-batch: the whole argument."""

Key = tuple[int, int]
"""What a worker is fed: (argument leaf, micro-batch or WHOLE)."""


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One array as a worker holds it.

    Attributes:
        shape: global boundary shape.
        dtype: numpy or JAX dtype name; never a key type.
        sharding: over the worker's mesh, nothing pending.
    """

    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding


@dataclass(frozen=True, slots=True)
class Task:
    """A compiled program of the worker.

    Attributes:
        name: `F`, `B`, `P` (before the micro-batches), `U0`, `U1`, ... (after them).
        inputs, outputs: buffers in flat order.
        donated: positions of inputs whose memory the task may reuse: they are gone afterwards.
    """

    name: str
    inputs: tuple[BufferSpec, ...]
    outputs: tuple[BufferSpec, ...]
    donated: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """Run a task on buffers."""

    task: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Send:
    """Send a buffer to `peer` by `transfer` (index into `WorkerProgram.transfers`)."""

    buffer: str
    peer: int
    transfer: int
    tag: int


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive a buffer from `peer`; the counterpart of a Send with the same tag."""

    buffer: str
    peer: int
    transfer: int
    tag: int


@dataclass(frozen=True, slots=True)
class Free:
    """Forget a buffer."""

    buffer: str


@dataclass(frozen=True, slots=True)
class Zero:
    """Make a buffer of zeros."""

    buffer: str


@dataclass(frozen=True, slots=True)
class Feed:
    """Bind a buffer to an argument of the step: leaf `argument`, its micro-batch or WHOLE."""

    buffer: str
    argument: int
    micro: int = WHOLE


@dataclass(frozen=True, slots=True)
class Fetch:
    """Hand a buffer out as result leaf `result`."""

    buffer: str
    result: int


@dataclass(frozen=True, slots=True)
class Mark:
    """Where the worker is now, for errors and timelines: an action such as `1F3`, or `update`."""

    text: str


Instruction = Run | Send | Recv | Free | Zero | Feed | Fetch | Mark


@dataclass(frozen=True, slots=True)
class WorkerProgram:
    """All that one worker needs to know, except the code of its tasks.

    Attributes:
        rank: of the worker; also the rank of its transport.
        stage: which stage it runs, for people.
        mesh: its devices, row-major.
        tasks: programs it has compiled.
        buffers: spec of every buffer name that occurs, in the order of first use.
        constants: int32 scalars that exist from the start and are never freed: (buffer, value).
        hidden: closed-over arrays that exist from the start and are never freed: (buffer, index).
        transfers: tile plans of sends and receives.
        instructions: of one step.
    """

    rank: int
    stage: str
    mesh: Mesh
    tasks: tuple[Task, ...]
    buffers: tuple[tuple[str, BufferSpec], ...]
    constants: tuple[tuple[str, int], ...]
    hidden: tuple[tuple[str, int], ...]
    transfers: tuple[TilePlan, ...]
    instructions: tuple[Instruction, ...]

    def specs(self) -> Mapping[str, BufferSpec]:
        """The spec of every buffer."""
        return dict(self.buffers)

    def feeds(self) -> tuple[tuple[Key, BufferSpec], ...]:
        """What it is fed in a step, in the order in which both sides speak of it."""
        specs, steps = self.specs(), self.instructions
        feeds = [step for step in steps if isinstance(step, Feed)]
        return tuple(((feed.argument, feed.micro), specs[feed.buffer]) for feed in feeds)

    def results(self) -> tuple[tuple[int, BufferSpec], ...]:
        """The results it keeps after a step: which, and how they lie, in order."""
        specs, steps = self.specs(), self.instructions
        fetches = [step for step in steps if isinstance(step, Fetch)]
        return tuple((fetch.result, specs[fetch.buffer]) for fetch in fetches)


@dataclass(frozen=True, slots=True)
class ArgumentUse:
    """Where an argument leaf goes.

    Attributes:
        rank, buffer: the worker, and the buffer its FEED binds.
        micro: micro-batch, or WHOLE.
        position: for a micro-batch, (dim, inner): see `trace.batch.Position`.
        donated: the caller gives the array away.
    """

    rank: int
    buffer: str
    micro: int = WHOLE
    position: tuple[int, int] | None = None
    donated: bool = False


@dataclass(frozen=True, slots=True)
class ResultSource:
    """Where a result leaf comes from.

    Attributes:
        rank, buffer: the worker, and the buffer its FETCH hands out.
        shape, dtype: of the result as the user knows it (dtype may be a key type's name).
    """

    rank: int
    buffer: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class StepProgram:
    """One step over all workers.

    Attributes:
        micro_batches: their number.
        workers: by rank.
        arguments: per argument leaf, where it goes (nowhere, if nothing uses it).
        results: per result leaf.
    """

    micro_batches: int
    workers: tuple[WorkerProgram, ...]
    arguments: tuple[tuple[ArgumentUse, ...], ...]
    results: tuple[ResultSource, ...]

    def uses(self) -> tuple[tuple[tuple[ArgumentUse, BufferSpec], ...], ...]:
        """Per argument leaf, where it goes and how it lies there."""
        specs = [worker.specs() for worker in self.workers]
        return tuple(
            tuple((use, specs[use.rank][use.buffer]) for use in row) for row in self.arguments
        )
