"""Small worker programs written as the text of their instructions.

Names of buffers stand for their specs: all are `float32[4]` on one device, where nothing else is
said. Tasks and transfers are what the instructions need, so a test shows its list and no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autopar.ir.mesh import Mesh
from autopar.ir.sharding import parse_sharding, replicated
from autopar.lower.cross_mesh import TilePlan, plan_tiles
from autopar.lower.instruction_text import parse_instructions
from autopar.lower.instructions import (
    ArgumentUse,
    BufferSpec,
    Fetch,
    Instruction,
    Recv,
    ResultSource,
    Run,
    Send,
    StepProgram,
    Task,
    WorkerProgram,
)

ONE = Mesh.of(1)


def spec(*shape: int, dtype: str = "float32", sharding: str = "") -> BufferSpec:
    """An array; replicated where no sharding such as `[x,-]` is given."""
    laid = parse_sharding(sharding) if sharding else replicated(len(shape))
    return BufferSpec(shape, dtype, laid)


FOUR = spec(4)


def four(start: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Values of a `float32[4]`: start, start + 1, ..."""
    return np.arange(4, dtype=np.float32) + np.float32(start)


def worker_program(  # noqa: PLR0913 - a keyword each
    text: str,
    *,
    rank: int = 0,
    specs: Mapping[str, BufferSpec] | None = None,
    donated: Mapping[str, tuple[int, ...]] | None = None,
    constants: Sequence[tuple[str, int]] = (),
    hidden: Sequence[tuple[str, int]] = (),
    mesh: Mesh = ONE,
) -> WorkerProgram:
    """A worker whose instructions are the lines of a text.

    Args:
        text: of the instructions.
        rank: of the worker; its stage is called after it.
        specs: of the buffers that are not FOUR.
        donated: per task the positions of what it takes over.
        constants, hidden: buffers that exist from the start.
        mesh: of the worker; both ends of its transfers are laid out alike on it.
    """
    code = parse_instructions(text)
    known = {name: spec(dtype="int32") for name, _ in constants}
    known.update(specs or {})
    names = dict.fromkeys([*(n for n, _ in (*constants, *hidden)), *_names(code)])
    of = {name: known.get(name, FOUR) for name in names}
    return WorkerProgram(
        rank,
        f"stage {rank}",
        mesh,
        _tasks(code, of, donated or {}),
        tuple(of.items()),
        tuple(constants),
        tuple(hidden),
        _transfers(code, of, mesh),
        code,
    )


def _names(code: Sequence[Instruction]) -> list[str]:
    names: list[str] = []
    for item in code:
        if isinstance(item, Run):
            names += [*item.inputs, *item.outputs]
        elif (buffer := getattr(item, "buffer", None)) is not None:
            names.append(buffer)
    return names


def _tasks(
    code: Sequence[Instruction],
    of: Mapping[str, BufferSpec],
    donated: Mapping[str, tuple[int, ...]],
) -> tuple[Task, ...]:
    tasks: dict[str, Task] = {}
    for item in code:
        if isinstance(item, Run):
            ins, outs = (tuple(of[name] for name in names) for names in (item.inputs, item.outputs))
            made = Task(item.task, ins, outs, donated.get(item.task, ()))
            assert tasks.setdefault(item.task, made) == made
    return tuple(tasks.values())


def _transfers(
    code: Sequence[Instruction], of: Mapping[str, BufferSpec], mesh: Mesh
) -> tuple[TilePlan, ...]:
    plans: dict[int, TilePlan] = {}
    for item in code:
        if isinstance(item, Send | Recv):
            laid = of[item.buffer]
            plan = plan_tiles(laid.shape, laid.dtype, mesh, laid.sharding, mesh, laid.sharding)
            assert plans.setdefault(item.transfer, plan) == plan
    return tuple(plans[number] for number in range(len(plans)))


def step_program(
    *workers: WorkerProgram,
    arguments: Sequence[Sequence[ArgumentUse]] = (),
    micro_batches: int = 1,
) -> StepProgram:
    """A step of some workers; its results are those that their lists fetch."""
    found: dict[int, ResultSource] = {}
    for worker in workers:
        for item, (index, laid) in zip(_fetched(worker), worker.results(), strict=True):
            found[index] = ResultSource(worker.rank, item, laid.shape, laid.dtype)
    results = tuple(found[index] for index in range(len(found)))
    return StepProgram(micro_batches, workers, tuple(map(tuple, arguments)), results)


def _fetched(worker: WorkerProgram) -> list[str]:
    return [item.buffer for item in worker.instructions if isinstance(item, Fetch)]
