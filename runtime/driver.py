"""The driver's side of a pipeline whose workers are processes: tells, feeds, fetches, finds faults.

It knows nothing of what starts and ends the processes (`Processes`): Ray does on a cluster.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from autopar.errors import TransportError, WorkerError
from autopar.lower.cross_mesh import source_slice, target_slices
from autopar.lower.instruction_text import worker_program_to_json
from autopar.lower.instructions import WHOLE, ArgumentUse, BufferSpec, StepProgram, WorkerProgram
from autopar.runtime.arrays import DistributedArray
from autopar.runtime.board import Board
from autopar.runtime.control import (
    DELETES,
    FAILED,
    FED,
    FIRST_ARRAY_TAG,
    Kind,
    expect_reply,
    frame_size,
    read_reply,
    send_message,
)
from autopar.runtime.faults import DIED, diagnose
from autopar.runtime.peer import Peer, peer_of
from autopar.runtime.pipeline import micro_part
from autopar.runtime.remote_worker import Key, fetch_plan
from autopar.runtime.transfer import message_tag
from autopar.runtime.transport.base import ArraySpec, Transport

START_SECONDS = 180.0
"""Until all workers are up, connected, and have compiled their tasks."""

HANG_SECONDS = 300.0
"""When no worker's position has changed for so long, one of them hangs."""

WAIT_SECONDS = 600.0
"""That a worker waits for another inside a step: longer than anything that is no fault."""

GRACE_SECONDS = 2.0
"""How long workers may take to say what went wrong, once something has."""

POLL_SECONDS = 0.5


class Processes(Protocol):
    """The processes of the workers: started, told about each other, and ended elsewhere."""

    def start(
        self, rank: int, worker: WorkerProgram, secret: bytes, board: str, timeout: float
    ) -> None:
        """Start the process of a worker."""

    def connect(self, secret: bytes, timeout: float) -> Transport:
        """Connect all workers with each other and with the driver, whose end is returned."""

    def load(self, rank: int, program: str, code: Mapping[str, bytes]) -> None:
        """Begin to compile."""

    def loaded(self, timeout: float) -> list[int]:
        """Wait until all have compiled, and let them serve; their process ids."""

    def last_words(self, timeout: float) -> dict[int, str]:
        """What workers that have ended had to say: JSON, or `DIED` and why; others are left out."""

    def end(self) -> None:
        """End all processes; may be called twice."""


class ProcessPipeline:
    """A step program on workers in processes of their own, one a stage.

    Args:
        step: verified.
        code: per worker, per task its `jax.export` bytes.
        hidden: closed-over arrays.
        address: of a running Ray; None starts a local one.
        timeout: seconds that a wait inside a step may take.
        hang_seconds: a worker that does not move for so long is given up.
        progress: told what is being done.

    Raises:
        ClusterError: workers did not start.
    """

    def __init__(  # noqa: PLR0913 - a keyword each
        self,
        step: StepProgram,
        code: Sequence[Mapping[str, bytes]],
        processes: Processes,
        hidden: Sequence[Any] = (),
        *,
        timeout: float = WAIT_SECONDS,
        hang_seconds: float = HANG_SECONDS,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.step = step
        self.timeout = timeout
        self.hang_seconds = hang_seconds
        self.pids: tuple[int, ...] = ()
        self._lock = threading.RLock()
        self._closed = ""
        self._pending: dict[int, Any] = {}
        self._number = 0
        self._next = 0
        self._sent = 0
        self.folder = Path(tempfile.mkdtemp(prefix="autopar-"))
        self._board = Board(self.folder, len(step.workers))
        self._processes = processes
        self._transport: Any = None
        # Also when it is simply dropped, or Python ends.
        self._finalizer = weakref.finalize(self, _clean_up, processes, self.folder)
        self._peers = [peer_of(worker) for worker in step.workers]
        try:
            self._start(code, hidden, progress)
        except BaseException:
            self.close()
            raise

    # --- start ---------------------------------------------------------------------------------

    def _start(
        self,
        code: Sequence[Mapping[str, bytes]],
        hidden: Sequence[Any],
        progress: Callable[[str], None],
    ) -> None:
        secret, processes = secrets.token_bytes(32), self._processes
        progress(f"starting {len(self._peers)} workers")
        for worker in self.step.workers:
            processes.start(worker.rank, worker, secret, str(self._board.path), self.timeout)
        progress("connecting workers")
        self._transport = processes.connect(secret, START_SECONDS)
        progress("compiling on the workers")
        for worker, tasks in zip(self.step.workers, code, strict=True):
            processes.load(worker.rank, json.dumps(worker_program_to_json(worker)), tasks)
            self._send_hidden(worker.hidden, worker.rank, hidden)
        self.pids = tuple(processes.loaded(START_SECONDS))

    def _send_hidden(
        self, wanted: Sequence[tuple[str, int]], rank: int, hidden: Sequence[Any]
    ) -> None:
        requests = [
            self._transport.isend(
                rank, message_tag(FIRST_ARRAY_TAG, index), _contiguous(np.asarray(hidden[index]))
            )
            for _, index in wanted
        ]
        self._transport.wait(requests, timeout=START_SECONDS)

    # --- a step --------------------------------------------------------------------------------

    def run(self, leaves: Sequence[Any]) -> list[DistributedArray]:
        """One step: argument leaves to arrays that stay on the workers.

        It returns when all workers have been told; what goes wrong in it is raised by whoever next
        waits for it.

        Raises:
            WorkerError: the step before failed, or an argument was given away already.
        """
        with self._lock:
            self.settle()
            number, self._number = self._number, self._number + 1
            plan = self._arguments(leaves)
            gone = self._given_away(leaves)
            first = self._next
            self._next += max((len(peer.results) for peer in self._peers), default=0)
            try:
                for peer in self._peers:
                    self._tell_step(peer, number, first, plan[peer.rank])
            except TransportError as error:
                raise self._failure(error) from error
            self._pending = {
                peer.rank: expect_reply(self._transport, peer.rank) for peer in self._peers
            }
            # Freed with the next message: this one still reads them.
            for parts in gone:
                self.forget(parts)
            return self._results(first)

    def _arguments(self, leaves: Sequence[Any]) -> list[dict[Key, tuple[int, bool, Any]]]:
        """Per worker, per feed: handle, whether it is given away, and the array if it is fed."""
        found: list[dict[Key, tuple[int, bool, Any]]] = [{} for _ in self._peers]
        for number, (leaf, uses) in enumerate(zip(leaves, self.step.arguments, strict=True)):
            resident = self._resident(leaf, uses)
            whole: Any = None
            for use in uses:
                key = (number, use.micro)
                if resident is not None:
                    found[use.rank][key] = (resident.parts[use.rank], use.donated, None)
                    continue
                whole = np.asarray(leaf) if whole is None else whole
                found[use.rank][key] = (FED, True, self._part(whole, use))
        return found

    def _given_away(self, leaves: Sequence[Any]) -> list[dict[int, int]]:
        """Mark the arguments that are given away; the parts of them that no step takes over."""
        left = []
        for leaf, uses in zip(leaves, self.step.arguments, strict=True):
            if not isinstance(leaf, DistributedArray) or not any(use.donated for use in uses):
                continue
            here = self._resident(leaf, uses) is not None
            taken = {use.rank for use in uses if use.donated} if here else set()
            if leaf.held_by(self):
                left.append({r: handle for r, handle in leaf.parts.items() if r not in taken})
        for leaf, uses in zip(leaves, self.step.arguments, strict=True):
            if isinstance(leaf, DistributedArray) and any(use.donated for use in uses):
                leaf.mark_gone("given away to a step")
        return left

    def _resident(self, leaf: Any, uses: Sequence[ArgumentUse]) -> DistributedArray | None:
        """The leaf, if every worker that wants it has it as it wants it."""
        if not isinstance(leaf, DistributedArray):
            return None
        leaf.check()
        if not leaf.held_by(self):
            return None
        for use in uses:
            if use.micro != WHOLE or leaf.specs.get(use.rank) != self._spec(use):
                return None
        return leaf

    def _spec(self, use: ArgumentUse) -> BufferSpec:
        return dict(self.step.workers[use.rank].buffers)[use.buffer]

    def _part(self, whole: Any, use: ArgumentUse) -> Any:
        if use.micro == WHOLE:
            return whole
        assert use.position is not None
        return micro_part(whole, use.position, self.step.micro_batches, use.micro)

    def _tell_step(
        self, peer: Peer, number: int, first: int, args: Mapping[Key, tuple[int, bool, Any]]
    ) -> None:
        rows = [args[key] for key, _ in peer.feeds]
        unwanted, peer.unwanted = peer.unwanted[:DELETES], peer.unwanted[DELETES:]
        body = [number, first, *(row[0] for row in rows), *(int(row[1]) for row in rows), *unwanted]
        self._tell(peer, Kind.STEP, body)
        for place, (_, _, array) in enumerate(rows):
            if array is not None:
                self._feed(peer, place, array)

    def _tell(self, peer: Peer, kind: Kind, body: Sequence[int]) -> None:
        request = send_message(self._transport, peer.rank, kind, body, frame_size(len(peer.feeds)))
        if not request.done():
            self._transport.wait([request], timeout=self.timeout)

    def _feed(self, peer: Peer, place: int, array: Any) -> None:
        plan, spec = peer.plans[place], peer.feeds[place][1]
        array = np.asarray(array, dtype=jnp.dtype(spec.dtype))
        if array.shape != spec.shape:
            raise WorkerError(
                "an argument does not fit the plan",
                got=f"{array.dtype}{list(array.shape)}",
                why=f"the plan says {spec.dtype}{list(spec.shape)}",
            )
        requests = []
        for index, tile in enumerate(plan.tiles):
            part = _contiguous(array[source_slice(plan, tile)])
            self._sent += part.nbytes
            tag = message_tag(FIRST_ARRAY_TAG + 1 + place, index)
            requests.append(self._transport.isend(peer.rank, tag, part))
        self._transport.wait(requests, timeout=self.timeout)

    def _results(self, first: int) -> list[DistributedArray]:
        made: dict[int, DistributedArray] = {}
        for peer in self._peers:
            for place, (index, spec) in enumerate(peer.results):
                source = self.step.results[index]
                shape, dtype = spec.shape, spec.dtype
                assert source.rank == peer.rank
                made[index] = DistributedArray(
                    self, shape, dtype, {peer.rank: first + place}, {peer.rank: spec}
                )
        return [made[index] for index in range(len(self.step.results))]

    def settle(self) -> None:
        """Wait for the step under way.

        Raises:
            WorkerError: it failed; names worker, stage, step and instruction.
        """
        with self._lock:
            self._check_open()
            pending, self._pending = self._pending, {}
            if not pending:
                return
            try:
                self._await(list(pending.values()))
                for rank, head in pending.items():
                    status, text = read_reply(self._transport, rank, head, self.timeout)
                    if status == FAILED:
                        raise TransportError(json.loads(text)["what"])
            except TransportError as error:
                raise self._failure(error) from error

    def _await(self, requests: Sequence[Any]) -> None:
        """Wait in slices; between them look whether anybody still moves."""
        seen = self._positions()
        since = time.monotonic()
        while True:
            try:
                self._transport.wait(requests, timeout=POLL_SECONDS)
                return
            except TransportError:
                if not self._only_slow(requests):
                    raise
            now = self._positions()
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self.hang_seconds:
                raise TransportError(f"no worker has moved for {self.hang_seconds:g} s")

    def _only_slow(self, requests: Sequence[Any]) -> bool:
        """Whether a wait failed for want of time alone."""
        try:
            for request in requests:
                if request.done():
                    request.result()
        except TransportError:
            return False
        return not self._processes.last_words(0.0)

    def _positions(self) -> list[tuple[int, int]]:
        return [self._board.where(peer.rank) for peer in self._peers]

    # --- faults --------------------------------------------------------------------------------

    def _failure(self, error: Exception) -> WorkerError:
        """Find out who failed, end everything, and say it."""
        step = self._number - 1
        with contextlib.suppress(Exception):
            self._transport.abort(str(error).partition("\n")[0])
        told = self._last_words()
        made = diagnose(self._peers, self._board, told, error, step=step)
        self._closed = made.what
        self.close()
        return made

    def _last_words(self) -> dict[int, Mapping[str, Any]]:
        """What workers say of their end: an error, or that they died; nothing if they hang."""
        told: dict[int, Mapping[str, Any]] = {}
        for rank, text in self._processes.last_words(GRACE_SECONDS).items():
            if text.startswith(DIED):
                told[rank] = {DIED: True, "text": text.removeprefix(DIED).strip(), "aborted": False}
            else:
                told[rank] = json.loads(text) if text else {}
        return told

    def _check_open(self) -> None:
        if self._closed:
            raise WorkerError(
                "the workers were ended",
                got=self._closed,
                remedy="call the parallelised function again: it starts new workers; state that "
                "was on them is lost",
            )

    # --- arrays --------------------------------------------------------------------------------

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Put argument leaves on the workers that want them whole; the others stay."""
        with self._lock:
            self.settle()
            placed = []
            for number, (leaf, uses) in enumerate(zip(leaves, self.step.arguments, strict=True)):
                fits = uses and all(use.micro == WHOLE for use in uses)
                if not fits or self._resident(leaf, uses) is not None:
                    placed.append(leaf)
                    continue
                placed.append(self._place(number, np.asarray(leaf), uses))
            return placed

    def _place(self, number: int, array: Any, uses: Sequence[ArgumentUse]) -> DistributedArray:
        parts, specs = {}, {}
        for use in uses:
            peer = self._peers[use.rank]
            place = [key for key, _ in peer.feeds].index((number, WHOLE))
            handle, self._next = self._next, self._next + 1
            self._tell(peer, Kind.PUT, [place, handle])
            self._feed(peer, place, array)
            self._reply(peer)
            parts[use.rank], specs[use.rank] = handle, peer.feeds[place][1]
        return DistributedArray(self, array.shape, str(array.dtype), parts, specs)

    def fetch(self, array: DistributedArray) -> np.ndarray[Any, Any]:
        """The whole array, from the first worker that has it."""
        with self._lock:
            self.settle()
            rank, handle = next(iter(array.parts.items()))
            peer, spec = self._peers[rank], array.specs[rank]
            plan = fetch_plan(spec, self.step.workers[rank].mesh)
            try:
                requests = [
                    self._transport.irecv(
                        rank, message_tag(FIRST_ARRAY_TAG, index), ArraySpec(tile.shape, spec.dtype)
                    )
                    for index, tile in enumerate(plan.tiles)
                ]
                body = [handle, FIRST_ARRAY_TAG]
                self._tell(peer, Kind.FETCH, body)
                self._reply(peer)
                self._transport.wait(requests, timeout=self.timeout)
            except TransportError as error:
                raise self._failure(error) from error
            whole = np.empty(spec.shape, jnp.dtype(spec.dtype))
            for tile, request in zip(plan.tiles, requests, strict=True):
                whole[target_slices(plan, tile)[0][1]] = request.result()
            return whole

    def _reply(self, peer: Peer) -> str:
        head = expect_reply(self._transport, peer.rank)
        self._transport.wait([head], timeout=self.timeout)
        status, text = read_reply(self._transport, peer.rank, head, self.timeout)
        if status == FAILED:
            raise WorkerError(json.loads(text)["what"])
        return text

    def forget(self, parts: Mapping[int, int]) -> None:
        """Free these with the next step."""
        for rank, handle in parts.items():
            if rank < len(self._peers):
                self._peers[rank].unwanted.append(handle)

    def discard(self, parts: Mapping[int, int]) -> None:
        """Free these now."""
        with self._lock:
            if self._closed:
                return
            self.settle()
            for rank, handle in parts.items():
                self._tell(self._peers[rank], Kind.DELETE, [handle])
                self._reply(self._peers[rank])

    # --- what can be asked -----------------------------------------------------------------------

    def stats(self) -> list[Mapping[str, int]]:
        """Per worker: live handles, their bytes, steps, resident bytes of the process."""
        found: list[Mapping[str, int]] = []
        with self._lock:
            self.settle()
            for peer in self._peers:
                while peer.unwanted:
                    some, peer.unwanted = peer.unwanted[:DELETES], peer.unwanted[DELETES:]
                    self._tell(peer, Kind.DELETE, some)
                    self._reply(peer)
                self._tell(peer, Kind.STATS, [])
                found.append(json.loads(self._reply(peer)))
        return found

    def record(self, *, on: bool) -> list[list[Mapping[str, Any]]]:
        """Begin or end timing of instructions; the events so far, per worker."""
        found = []
        with self._lock:
            self.settle()
            for peer in self._peers:
                self._tell(peer, Kind.EVENTS, [int(on)])
                found.append(json.loads(self._reply(peer)))
        return found

    @property
    def bytes_fed(self) -> int:
        """Bytes that this process has sent to workers."""
        return self._sent

    @property
    def closed(self) -> bool:
        """Whether the workers were ended, by a fault or by `close`."""
        return bool(self._closed)

    def close(self) -> None:
        """End all workers."""
        with self._lock:
            if not self._closed:
                for peer in self._peers:
                    with contextlib.suppress(Exception):
                        self._tell(peer, Kind.END, [])
            self._closed = self._closed or "the runtime was closed"
            if self._transport is not None:
                self._transport.close()
            self._board.close()
            self._finalizer()


def _clean_up(processes: Processes, folder: Path) -> None:
    processes.end()
    shutil.rmtree(folder, ignore_errors=True)


def _contiguous(array: Any) -> np.ndarray[Any, Any]:
    """The array in C order; a scalar stays one (numpy's own function makes it a vector)."""
    made = np.asarray(array)
    return made if made.flags.c_contiguous else made.copy(order="C")
