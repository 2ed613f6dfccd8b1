"""All workers of a pipeline in this process, on parts of its devices, in one thread.

The workers' lists are advanced in turn: each runs until it has to wait for another. One thread,
because two submeshes in two threads abort the CPU client; elsewhere programs are asynchronous and
stages overlap by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
import numpy as np

from autopar.errors import WorkerError
from autopar.lower.instructions import WHOLE, ArgumentUse, BufferSpec, Key, StepProgram
from autopar.runtime.executor import Event, Step
from autopar.runtime.transport.in_process import InProcessHub
from autopar.runtime.worker import Code, Worker, put_array, sharding_of

CONNECT_SECONDS = 10.0


def micro_part(array: Any, position: tuple[int, int], count: int, micro: int) -> Any:
    """The slice of a whole argument that belongs to a micro-batch, on host or device.

    Args:
        array: of numpy or JAX.
        position: (dim, inner): the dim is (outer, count, inner), major to minor.
        count: number of micro-batches.
        micro: which.
    """
    dim, inner = position
    shape = array.shape
    outer = shape[dim] // (inner * count)
    if outer == 1:
        where = [slice(None)] * len(shape)
        where[dim] = slice(micro * inner, (micro + 1) * inner)
        return array[tuple(where)]
    cut = array.reshape((*shape[:dim], outer, count, inner, *shape[dim + 1 :]))
    part = cut[(slice(None),) * (dim + 1) + (micro,)]
    return part.reshape((*shape[:dim], outer * inner, *shape[dim + 1 :]))


class LocalPipeline:
    """A step program on devices of this process.

    Args:
        step: verified.
        code: per worker, per task name its function (or `jax.export` bytes).
        devices: per worker, row-major over its mesh.
        hidden: closed-over arrays.
        timeout: seconds that a wait may take.
    """

    def __init__(
        self,
        step: StepProgram,
        code: Sequence[Mapping[str, Code]],
        devices: Sequence[Sequence[Any]],
        hidden: Sequence[Any] = (),
        *,
        timeout: float = 60.0,
    ) -> None:
        self.step = step
        self._events: list[list[Event]] | None = None
        hub = InProcessHub()
        self._transports = [hub.transport(worker.rank) for worker in step.workers]
        self._workers = [
            Worker(timeout=timeout, recorder=partial(self._record, worker.rank))
            for worker in step.workers
        ]
        parts = zip(self._workers, step.workers, code, devices, self._transports, strict=True)
        for worker, program, tasks, own, transport in parts:
            worker.load(program, tasks, own, transport, hidden)
        addresses = {t.rank: t.address for t in self._transports}
        for transport in self._transports:
            others = {rank: a for rank, a in addresses.items() if rank != transport.rank}
            transport.connect(others, timeout=CONNECT_SECONDS)
        self._places: list[list[tuple[ArgumentUse, BufferSpec, Any]]] = [
            [
                (use, spec, sharding_of(spec, step.workers[use.rank], devices[use.rank]))
                for use, spec in row
            ]
            for row in step.uses()
        ]
        self._number = 0
        self.closed = False

    def _record(self, rank: int, event: Event) -> None:
        if self._events is not None:
            self._events[rank].append(event)

    def record(self, *, on: bool) -> list[list[Mapping[str, Any]]]:
        """Begin or end timing of instructions; the events so far, per worker."""
        events, self._events = self._events, [[] for _ in self._workers] if on else None
        return [[asdict(event) for event in row] for row in events or ()]

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Put leaves where their first worker wants them; what is cut into micro-batches stays."""
        placed = []
        for leaf, row in zip(leaves, self._places, strict=True):
            whole = [entry for entry in row if entry[0].micro == WHOLE]
            if len(whole) == len(row) and whole:
                placed.append(put_array(leaf, whole[0][1], whole[0][2]))
            else:
                placed.append(leaf)
        return placed

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """One step: argument leaves to results, as arrays on their stages' devices.

        Raises:
            WorkerError: naming worker, stage, step and instruction.
        """
        args, given_away = self._arguments(leaves)
        found = self._drive(args, given_away)
        jax.block_until_ready(list(found.values()))
        self._give_away(leaves, found)
        self._number += 1
        return [found[index] for index in range(len(self.step.results))]

    def _arguments(self, leaves: Sequence[Any]) -> tuple[list[dict[Key, Any]], list[set[Key]]]:
        args: list[dict[Key, Any]] = [{} for _ in self._workers]
        gone: list[set[Key]] = [set() for _ in self._workers]
        for number, (leaf, row) in enumerate(zip(leaves, self._places, strict=True)):
            array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
            for use, spec, sharding in row:
                part = array
                if use.micro != WHOLE:
                    assert use.position is not None
                    part = micro_part(array, use.position, self.step.micro_batches, use.micro)
                elif array.dtype != spec.dtype:
                    part = array.astype(spec.dtype)
                key = (number, use.micro)
                args[use.rank][key] = put_array(part, spec, sharding)
                # A moved array may share memory with the caller's: it is not ours to hand on.
                if use.donated and args[use.rank][key] is leaf:
                    gone[use.rank].add(key)
        return args, gone

    def _drive(
        self,
        args: Sequence[dict[Key, Any]],
        given_away: Sequence[set[Key]],
    ) -> dict[int, Any]:
        """Advance all lists in turn until all are done."""
        running: dict[int, tuple[Step, Any]] = {}
        for rank, worker in enumerate(self._workers):
            steps = worker.start(self._number, args[rank], {}, given_away[rank])
            running[rank] = (steps, ())
        try:
            return self._advance(running)
        except BaseException:
            # Also if it was interrupted: its messages must not be taken for those of another step.
            for steps, _ in running.values():
                steps.close()
            self.close()
            raise

    def _advance(self, running: dict[int, tuple[Step, Any]]) -> dict[int, Any]:
        found: dict[int, Any] = {}
        while running:
            moved = False
            for rank in list(running):
                steps, waits = running[rank]
                if not all(request.done() for request in waits):
                    continue
                moved = True
                try:
                    running[rank] = (steps, next(steps))
                except StopIteration as end:
                    found.update(end.value)
                    del running[rank]
            if not moved:
                raise WorkerError(
                    "all workers wait for each other",
                    got="; ".join(str(worker.progress()) for worker in self._workers),
                )
        return found

    def _give_away(self, leaves: Sequence[Any], found: Mapping[int, Any]) -> None:
        """Delete donated arguments, as jax.jit does."""
        kept = {id(array) for array in found.values()}
        for leaf, row in zip(leaves, self._places, strict=True):
            donated = any(use.donated for use, _, _ in row)
            if donated and isinstance(leaf, jax.Array) and id(leaf) not in kept:
                if not leaf.is_deleted():
                    leaf.delete()

    def close(self) -> None:
        """Forget all arrays and programs."""
        self.closed = True
        for worker in self._workers:
            worker.close()
        for transport in self._transports:
            transport.close()
