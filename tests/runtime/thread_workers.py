"""Workers of a driver that are threads of this process, and faults that come when a test wants.

Each thread owns a `RemoteWorker`, and all talk over TCP as processes do. Every mesh has one device
and no task has a collective: programs of several submeshes at once can abort JAX's CPU client.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar.lower.instruction_text import instruction_text
from autopar.lower.instructions import ArgumentUse, StepProgram, WorkerProgram
from autopar.lower.verify_instructions import verify_step
from autopar.runtime.board import Board, Positions
from autopar.runtime.driver import ProcessPipeline
from autopar.runtime.faults import DIED
from autopar.runtime.remote_worker import RemoteWorker
from autopar.runtime.transport.base import DRIVER, Transport
from autopar.runtime.transport.tcp import TcpTransport
from autopar.runtime.worker import Worker
from tests.runtime.lists import step_program, worker_program

PATIENCE = 30.0
"""Seconds until a test gives up on something that should come at once."""

Hook = Callable[[int, int, int], None]
"""Called with (rank, step, position) before each instruction, on the worker's thread."""


class Killed(BaseException):
    """Ends a thread as a signal ends a process: nothing is said, the connections break."""


class ThreadWorker(RemoteWorker):
    """A worker that calls a hook before each instruction.

    Attributes:
        worker: what does the steps.
        transport: of its rank.
    """

    def __init__(self, rank: int, secret: bytes, board: str, timeout: float, hook: Hook) -> None:
        super().__init__(rank, secret, "tcp", "127.0.0.1", board, timeout)
        write = self._worker._report
        assert write is not None

        def report(step: int, position: int) -> None:
            write(step, position)
            hook(rank, step, position)

        self._worker = Worker(timeout=timeout, recorder=self._record, report=report)
        self.worker = self._worker
        self.transport = self._transport


class ThreadProcesses:
    """As `autopar.runtime.processes.Processes` asks.

    Attributes:
        workers: by rank.
        folder: of the run.
        hook: what the workers call before each instruction.
        ended: how often `end` was called.
        hanging: ranks that will not say anything. The last words of all others are waited for as
            long as it takes: whether they come in time must not depend on the machine.
        gentle: whether `end` lets the workers end by themselves first.
        words: last words in place of those of some workers.
        where: positions in place of those of the board.
    """

    def __init__(self) -> None:
        self.workers: dict[int, ThreadWorker] = {}
        self.folder = Path()
        self.hook: Hook = lambda rank, step, position: None
        self.ended = 0
        self.hanging: Sequence[int] = ()
        self.gentle = False
        self.words: dict[int, str] = {}
        self.where: Positions | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._loading: list[Future[int]] = []
        self._serving: dict[int, Future[str]] = {}

    def start(
        self, rank: int, worker: WorkerProgram, secret: bytes, board: str, timeout: float
    ) -> None:
        """Make a worker; it has no thread yet."""
        assert worker.mesh.size == 1
        self.folder = Path(board).parent
        self.workers[rank] = ThreadWorker(
            rank, secret, board, timeout, lambda *where: self.hook(*where)
        )

    def connect(self, secret: bytes, timeout: float) -> Transport:
        """All connect at the same time, each from its own thread."""
        self._pool = ThreadPoolExecutor(max(len(self.workers), 1), thread_name_prefix="worker")
        transport = TcpTransport(DRIVER, secret=secret)
        addresses = {rank: worker.address() for rank, worker in self.workers.items()}
        everyone = {DRIVER: transport.address, **addresses}
        joining = [
            self._pool.submit(worker.connect, list(everyone), list(everyone.values()), timeout)
            for worker in self.workers.values()
        ]
        transport.connect(addresses, timeout=timeout)
        for join in joining:
            join.result(timeout)
        return transport

    def load(self, rank: int, program: str, code: Mapping[str, bytes]) -> None:
        """Begin to compile."""
        assert self._pool is not None
        names, codes = list(code), list(code.values())
        self._loading.append(self._pool.submit(self.workers[rank].load, program, names, codes))

    def loaded(self, timeout: float) -> list[int]:
        """Wait for all, and let them serve; numbers stand for process ids."""
        assert self._pool is not None
        for loading in self._loading:
            loading.result(timeout)
        for rank, worker in self.workers.items():
            self._serving[rank] = self._pool.submit(worker.serve)
        return [1000 + rank for rank in self.workers]

    def positions(self, board: Board) -> Positions:
        """The board's, as on one host."""
        return self.where or board

    def last_words(self, timeout: float) -> dict[int, str]:
        """What workers that have ended had to say."""
        if timeout:
            self._wait_for_all()
        told = {}
        for rank, serving in self._serving.items():
            if serving.done():
                died = serving.exception()
                told[rank] = f"{DIED} {died}" if died is not None else serving.result()
        return {rank: self.words.get(rank, text) for rank, text in told.items()}

    def end(self) -> None:
        """Wake all workers: a thread cannot be killed, but none of them waits any longer."""
        self.ended += 1
        if self.gentle:
            self._wait_for_all()
        for worker in self.workers.values():
            with contextlib.suppress(Exception):
                worker.abort("the processes were ended")
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def _wait_for_all(self) -> None:
        speaking = [serving for r, serving in self._serving.items() if r not in self.hanging]
        wait(speaking, timeout=PATIENCE)

    def join(self) -> None:
        """Wait until all threads have ended: no test leaves one to the next."""
        self.end()
        _, running = wait(self._serving.values(), timeout=PATIENCE)
        assert not running


@functools.cache
def _exported(name: str) -> bytes:
    shape = jax.ShapeDtypeStruct((4,), np.float32)
    functions: Mapping[str, tuple[Callable[..., Any], int]] = {
        "F": (lambda p, x: (p * x,), 2),
        "U": (lambda p: (p + 1,), 1),
        "L": (lambda s, y, q: (s + y * q,), 3),
    }
    function, count = functions[name]
    return bytes(jax.export.export(jax.jit(function))(*[shape] * count).serialize())


MICRO_BATCHES = 2


def two_stage_step() -> StepProgram:
    """Arguments p (given away), q (kept), x (cut in two); results p + 1, and the sum of p x q."""
    micros = range(MICRO_BATCHES)
    first = "FEED p argument 0 micro -1\n" + "".join(
        f"MARK 0F{m}\nFEED x.{m} argument 2 micro {m}\nRUN F p x.{m} -> y.{m}\nFREE x.{m}\n"
        f"SEND y.{m} to 1 by 0 tag {m}\nFREE y.{m}\n"
        for m in micros
    )
    second = "FEED q argument 1 micro -1\nZERO s.0\n" + "".join(
        f"RECV y.{m} from 0 by 0 tag {m}\nMARK 1F{m}\nRUN L s.{m} y.{m} q -> s.{m + 1}\n"
        f"FREE y.{m}\n"
        for m in micros
    )
    step = step_program(
        worker_program(first + "RUN U p -> new\nFETCH new result 0", donated={"U": (0,)}),
        worker_program(
            f"{second}FREE q\nFETCH s.{MICRO_BATCHES} result 1", rank=1, donated={"L": (0,)}
        ),
        arguments=[
            [ArgumentUse(0, "p", donated=True)],
            [ArgumentUse(1, "q")],
            [ArgumentUse(0, f"x.{m}", m, (0, 4)) for m in micros],
        ],
        micro_batches=MICRO_BATCHES,
    )
    verify_step(step)
    return step


def position_of(step: StepProgram, rank: int, text: str) -> int:
    """Where in a worker's list the instruction is that begins so."""
    texts = [instruction_text(item) for item in step.workers[rank].instructions]
    (place,) = (place for place, found in enumerate(texts) if found.startswith(text))
    return place


class Started:
    """Pipelines on threads that all end with the test."""

    def __init__(self) -> None:
        self._release = threading.Event()
        self._processes: list[ThreadProcesses] = []
        self._pipelines: list[ProcessPipeline] = []

    def processes(self) -> ThreadProcesses:
        """New ones, that end with the test."""
        self._processes.append(ThreadProcesses())
        return self._processes[-1]

    def pipeline(
        self, step: StepProgram | None = None, hidden: Sequence[Any] = (), **options: Any
    ) -> tuple[ProcessPipeline, ThreadProcesses]:
        """A step (that of `two_stage_step`) on threads."""
        step, processes = step or two_stage_step(), self.processes()
        code = [{task.name: _exported(task.name) for task in w.tasks} for w in step.workers]
        made = ProcessPipeline(step, code, processes, hidden, **options)
        self._pipelines.append(made)
        return made, processes

    def hang(self) -> None:
        """Hang until the test ends; for hooks."""
        self._release.wait()

    def end(self) -> None:
        """End everything."""
        self._release.set()
        for pipeline in self._pipelines:
            pipeline.close()
        for processes in self._processes:
            processes.join()
