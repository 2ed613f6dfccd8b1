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
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autopar.errors import TransportError, WorkerError
from autopar.lower.instruction_text import worker_program_to_json
from autopar.lower.instructions import (
    WHOLE,
    ArgumentUse,
    BufferSpec,
    Key,
    StepProgram,
)
from autopar.runtime.arrays import DistributedArray
from autopar.runtime.board import Board
from autopar.runtime.calls import Calls, Given, fitting
from autopar.runtime.control import FED, Kind
from autopar.runtime.faults import DIED, diagnose
from autopar.runtime.peer import Peer, peer_of
from autopar.runtime.pipeline import micro_part
from autopar.runtime.processes import Processes
from autopar.runtime.transport.base import Request
from autopar.runtime.watch import HANG_SECONDS, Watch

START_SECONDS = 180.0
"""Until all workers are up, connected, and have compiled their tasks."""

WAIT_SECONDS = 600.0
"""That a worker waits for another inside a step: longer than anything that is no fault."""

GRACE_SECONDS = 2.0
"""How long workers may take to say what went wrong, once something has."""


class ProcessPipeline:
    """A step program on workers in processes of their own, one a stage.

    Args:
        step: verified.
        code: per worker, per task its `jax.export` bytes.
        processes: of the workers; ended with the pipeline.
        hidden: closed-over arrays.
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
        self.pids: tuple[int, ...] = ()
        self._lock = threading.RLock()
        self._closed = ""
        self._pending: list[tuple[Peer, Request]] = []
        self._number = 0
        self._next = 0
        self.folder = Path(tempfile.mkdtemp(prefix="autopar-"))
        self._board = Board(self.folder, len(step.workers))
        self._processes = processes
        self._calls: Calls | None = None
        # Also when it is simply dropped, or Python ends.
        self._finalizer = weakref.finalize(self, _clean_up, processes, self.folder)
        self._peers = [peer_of(worker) for worker in step.workers]
        self._uses = step.uses()
        self.watch = Watch(processes, self._board, range(len(self._peers)), hang_seconds)
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
        self._calls = Calls(processes.connect(secret, START_SECONDS), self.watch, self.timeout)
        progress("compiling on the workers")
        for worker, tasks in zip(self.step.workers, code, strict=True):
            processes.load(worker.rank, json.dumps(worker_program_to_json(worker)), tasks)
            wanted = {index: hidden[index] for _, index in worker.hidden}
            self._calls.send_hidden(worker.rank, wanted, START_SECONDS)
        self.pids = tuple(processes.loaded(START_SECONDS))

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
            resident = [
                self._resident(leaf, row) for leaf, row in zip(leaves, self._uses, strict=True)
            ]
            given = self._arguments(leaves, resident)
            gone = self._given_away(leaves, resident)
            number, self._number = self._number, self._number + 1
            first = self._next
            self._next += max((len(peer.results) for peer in self._peers), default=0)
            with self._talk() as calls:
                for peer in self._peers:
                    rows = [given[peer.rank][key] for key, _ in peer.feeds]
                    calls.step(peer, number, first, rows)
                self._pending = [(peer, calls.expect(peer)) for peer in self._peers]
            # Freed with the next message: this one still reads them.
            for parts in gone:
                self.forget(parts)
            return self._results(first)

    def _arguments(
        self, leaves: Sequence[Any], resident: Sequence[DistributedArray | None]
    ) -> list[dict[Key, Given]]:
        """What each worker is given, by feed."""
        found: list[dict[Key, Given]] = [{} for _ in self._peers]
        for number, (leaf, here, row) in enumerate(zip(leaves, resident, self._uses, strict=True)):
            whole = np.asarray(leaf) if row and here is None else None
            for use, spec in row:
                found[use.rank][number, use.micro] = (
                    (FED, True, fitting(spec, self._part(whole, use), number))
                    if here is None
                    else (here.parts[use.rank], use.donated, None)
                )
        return found

    def _given_away(
        self, leaves: Sequence[Any], resident: Sequence[DistributedArray | None]
    ) -> list[dict[int, int]]:
        """Mark the arguments that are given away; the parts of them that no step takes over."""
        left, gone = [], []
        for leaf, here, row in zip(leaves, resident, self._uses, strict=True):
            donors = {use.rank for use, _ in row if use.donated}
            if not isinstance(leaf, DistributedArray) or not donors:
                continue
            gone.append(leaf)
            taken = donors if here is not None else set()
            if leaf.held_by(self):
                left.append({r: handle for r, handle in leaf.parts.items() if r not in taken})
        for leaf in gone:
            leaf.mark_gone("given away to a step")
        return left

    def _resident(
        self, leaf: Any, row: Sequence[tuple[ArgumentUse, BufferSpec]]
    ) -> DistributedArray | None:
        """The leaf, if every worker that wants it has it as it wants it."""
        if not isinstance(leaf, DistributedArray):
            return None
        leaf.check()
        if not leaf.held_by(self):
            return None
        fits = all(use.micro == WHOLE and leaf.specs.get(use.rank) == spec for use, spec in row)
        return leaf if fits else None

    def _part(self, whole: Any, use: ArgumentUse) -> Any:
        if use.micro == WHOLE:
            return whole
        assert use.position is not None
        return micro_part(whole, use.position, self.step.micro_batches, use.micro)

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
            pending, self._pending = self._pending, []
            if not pending:
                return
            with self._talk() as calls:
                self.watch.wait(calls.transport, [head for _, head in pending])
                for peer, head in pending:
                    calls.answer(peer, head)

    # --- faults --------------------------------------------------------------------------------

    def _failure(self, error: Exception) -> WorkerError:
        """Find out who failed, end everything, and say it."""
        step = self._number - 1
        with contextlib.suppress(Exception):
            if self._calls is not None:
                self._calls.transport.abort(str(error).partition("\n")[0])
        told = self._last_words()
        made = diagnose(self._peers, self._processes.positions(self._board), told, error, step=step)
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

    @contextlib.contextmanager
    def _talk(self) -> Iterator[Calls]:
        """Speak with workers: what fails becomes the one error that names who failed.

        A refusal leaves the conversation in order. Anything else, an interrupt too, leaves it in
        the middle of a word: nobody could tell afterwards which answer belongs to what.
        """
        assert self._calls is not None, "no worker was connected"
        try:
            yield self._calls
        except WorkerError:
            raise
        except TransportError as error:
            raise self._failure(error) from error
        except BaseException as error:
            self._closed = self._closed or f"a call was interrupted: {type(error).__name__}"
            self.close()
            raise

    # --- arrays --------------------------------------------------------------------------------

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Put argument leaves on the workers that want them whole; the others stay."""
        with self._lock:
            self.settle()
            placed = []
            for number, (leaf, row) in enumerate(zip(leaves, self._uses, strict=True)):
                fits = row and all(use.micro == WHOLE for use, _ in row)
                if not fits or self._resident(leaf, row) is not None:
                    placed.append(leaf)
                    continue
                placed.append(self._place(number, leaf, row))
            return placed

    def _place(
        self, number: int, array: Any, row: Sequence[tuple[ArgumentUse, BufferSpec]]
    ) -> DistributedArray:
        parts, specs = {}, {}
        fits = [fitting(spec, array, number) for _, spec in row]
        for (use, spec), whole in zip(row, fits, strict=True):
            peer = self._peers[use.rank]
            place = [key for key, _ in peer.feeds].index((number, WHOLE))
            handle, self._next = self._next, self._next + 1
            with self._talk() as calls:
                calls.put(peer, place, handle, whole)
            parts[use.rank], specs[use.rank] = handle, spec
        first = row[0][1]
        return DistributedArray(self, first.shape, first.dtype, parts, specs)

    def fetch(self, array: DistributedArray) -> np.ndarray[Any, Any]:
        """The whole array, from the first worker that has it."""
        with self._lock:
            self.settle()
            rank, handle = next(iter(array.parts.items()))
            with self._talk() as calls:
                return calls.fetch(self._peers[rank], handle, array.specs[rank])

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
            with self._talk() as calls:
                for rank, handle in parts.items():
                    calls.delete(self._peers[rank], [handle])

    # --- what can be asked -----------------------------------------------------------------------

    def stats(self) -> list[Mapping[str, int]]:
        """Per worker: live handles, their bytes, steps, resident bytes of the process."""
        found: list[Mapping[str, int]] = []
        with self._lock:
            self.settle()
            with self._talk() as calls:
                for peer in self._peers:
                    calls.delete(peer, peer.take_unwanted())
                    found.append(json.loads(calls.ask(peer, Kind.STATS, [])))
        return found

    def record(self, *, on: bool) -> list[list[Mapping[str, Any]]]:
        """Begin or end timing of instructions; the events so far, per worker."""
        found = []
        with self._lock:
            self.settle()
            with self._talk() as calls:
                for peer in self._peers:
                    found.append(json.loads(calls.ask(peer, Kind.EVENTS, [int(on)])))
        return found

    @property
    def bytes_fed(self) -> int:
        """Bytes that this process has sent to workers."""
        return self._calls.sent if self._calls is not None else 0

    @property
    def closed(self) -> bool:
        """Whether the workers were ended, by a fault or by `close`."""
        return bool(self._closed)

    def close(self) -> None:
        """End all workers."""
        with self._lock:
            calls, ended = self._calls, self._closed
            self._closed = ended or "the runtime was closed"
            if calls is not None:
                for peer in () if ended else self._peers:
                    with contextlib.suppress(Exception):
                        calls.tell(peer, Kind.END, [])
                calls.transport.close()
            self._board.close()
            self._finalizer()


def _clean_up(processes: Processes, folder: Path) -> None:
    processes.end()
    shutil.rmtree(folder, ignore_errors=True)
