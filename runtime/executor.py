"""Interprets the instruction list of one worker.

The interpreter is a generator: it yields the requests that it cannot go on without, and whoever
drives it decides how to wait. A worker process waits on its transport with a timeout; in one
process a driver advances the generators of all workers in turn, in one thread. Two meshes in two
threads can abort JAX's CPU client.

A RECV posts its messages and goes on; the first instruction that needs the buffer waits for it. A
SEND posts its messages and goes on; what it reads must not change until they have left::

    SEND v ...                    posts
    RUN B v -> w  (donates v)     first waits until v has left: only then may its memory be reused
    FREE v                        goes on; the memory is given back when v has left

On CPU the results of each RUN are awaited before the next instruction, since several programs in
flight can starve each other there. Elsewhere programs are queued, and a step only waits until the
last but one has ended.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autopar.errors import AutoparError, WorkerError
from autopar.lower.instruction_text import instruction_text
from autopar.lower.instructions import (
    WHOLE,
    BufferSpec,
    Feed,
    Fetch,
    Free,
    Instruction,
    Key,
    Mark,
    Recv,
    Run,
    Send,
    WorkerProgram,
    Zero,
)
from autopar.runtime.transfer import Receiver, Sender
from autopar.runtime.transport.base import Request, Transport

STEPS_IN_FLIGHT = 2
"""Where programs run asynchronously: steps that may be queued before one is awaited."""

Waits = Generator[tuple[Request, ...], None, None]
"""Yields requests that must be done before the generator can go on."""

Step = Generator[tuple[Request, ...], None, dict[int, Any]]
"""A step under way; ends with its results by index."""


@dataclass(frozen=True, slots=True)
class Event:
    """One timed thing of a step, for timelines.

    Attributes:
        step, position: number of the step, and of the instruction in the list.
        mark: the action of the schedule, such as `1F3`.
        kind: `RUN`, `SEND`, `RECV`, or `WAIT`: nothing could go on.
        text: the instruction.
        start, end: seconds of `time.perf_counter`. A RUN ends when its results are there on CPU,
            and when it is queued elsewhere; SEND and RECV end when that is seen.
    """

    step: int
    position: int
    mark: str
    kind: str
    text: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a worker is: may be asked for from another thread.

    Attributes:
        rank, stage: whose progress.
        step: number of the step; -1 before the first.
        position: of the instruction; -1 between steps.
        instruction: its text.
        mark: the action of the schedule.
        pending: messages under way, such as `recv v9.1 from 0 tag 17`.
    """

    rank: int
    stage: str
    step: int
    position: int
    instruction: str
    mark: str
    pending: tuple[str, ...]

    def __str__(self) -> str:
        if self.position < 0:
            return f"worker {self.rank} ({self.stage}) is between steps, after step {self.step}"
        pending = f"; pending: {', '.join(self.pending)}" if self.pending else ""
        return (
            f"worker {self.rank} ({self.stage}) is in step {self.step} at instruction "
            f"{self.position} `{self.instruction}` of {self.mark or 'no action'}{pending}"
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a program needs besides its list: all of it compiled and placed.

    Attributes:
        tasks: compiled, by name: flat arrays to a sequence of arrays.
        zeros: makers of zeros, by the spec of their buffer.
        persistent: constants and closed-over arrays, by buffer.
        senders, receivers: by transfer.
    """

    tasks: Mapping[str, Callable[..., Sequence[Any]]]
    zeros: Mapping[BufferSpec, Callable[[], Any]]
    persistent: Mapping[str, Any]
    senders: Mapping[int, Sender]
    receivers: Mapping[int, Receiver]


@dataclass(frozen=True, slots=True)
class _Messages:
    """The messages of one SEND or RECV."""

    requests: tuple[Request, ...]
    position: int
    mark: str
    start: float

    def done(self) -> bool:
        return all(request.done() for request in self.requests)


class Executor:
    """Runs the list of one worker, step after step.

    Args:
        program: verified.
        loaded: its tasks, constants and transfers.
        transport: of this worker's rank, connected.
        awaits: whether the results of each RUN are awaited; on CPU they must be.
        recorder: takes the events of each step, if timings are wanted.
        report: told (step, position) before each instruction, for those who watch from outside.
    """

    def __init__(
        self,
        program: WorkerProgram,
        loaded: Loaded,
        transport: Transport,
        *,
        awaits: bool,
        recorder: Callable[[Event], None] | None = None,
        report: Callable[[int, int], None] | None = None,
    ) -> None:
        self.program = program
        self._loaded = loaded
        self._transport = transport
        self._awaits = awaits
        self._recorder = recorder
        self._report = report
        self._texts = tuple(map(instruction_text, program.instructions))
        self._specs = program.specs()
        self._donated = {task.name: task.donated for task in program.tasks}
        self._actions: dict[type, Callable[[Any], None]] = {
            Run: self._run,
            Send: self._send,
            Recv: self._recv,
            Free: self._free,
            Zero: self._zero,
            Feed: self._feed,
            Fetch: self._fetch,
            Mark: self._set_mark,
        }
        # Per instruction, worked out once: what carries it out, and what must be there before.
        self._code = tuple(
            (item, self._actions[type(item)], tuple(_reads(item)), self._given_up(item))
            for item in program.instructions
        )
        self._last: deque[Sequence[Any]] = deque()
        self._newest: Sequence[Any] = ()
        self._number, self._position, self._mark = -1, -1, ""
        self._args: Mapping[Key, Any] = {}
        self._given_away: frozenset[Key] = frozenset()
        self._borrowed: set[str] = set()
        self._held: dict[str, Any] = {}
        self._results: dict[int, Any] = {}
        self._arriving: dict[str, _Messages] = {}
        self._leaving: dict[str, list[_Messages]] = {}
        self._pending: dict[int, str] = {}

    def progress(self) -> Progress:
        """Where the worker is now; from any thread."""
        position = self._position
        return Progress(
            self.program.rank,
            self.program.stage,
            self._number,
            position,
            self._texts[position] if 0 <= position < len(self._texts) else "",
            self._mark,
            tuple(self._pending.values()),
        )

    def run(
        self,
        number: int,
        args: Mapping[Key, Any],
        given_away: Collection[Key] = (),
    ) -> Step:
        """One step, as a generator of waits.

        Args:
            number: of the step, for errors and events.
            args: arrays in place, by (argument, micro-batch or WHOLE).
            given_away: those the caller does not keep. One that only becomes a result is handed
                on as it is; of others, and of constants, a result is a copy.

        Returns:
            (by StopIteration) the results by index.

        Raises:
            WorkerError: naming worker, stage, step, instruction and pending tags, with the
                original error as its cause. Errors thrown into the generator become the same.
        """
        self._number, self._position, self._mark = number, 0, ""
        self._args = args
        self._held = dict(self._loaded.persistent)
        self._borrowed = set(self._held)
        self._results = {}
        self._given_away = frozenset(given_away)
        try:
            self._bound_steps()
            report = self._report
            for position, (instruction, act, reads, leaves) in enumerate(self._code):
                self._position = position
                if report is not None:
                    report(number, position)
                if reads and (self._arriving or leaves):
                    yield from self._make_ready(reads, leaves)
                act(instruction)
            yield from self._finish()
        except Exception as error:
            raise self._error(error) from error
        else:
            self._position = -1
            return self._results
        finally:
            self._drop()

    def _drop(self) -> None:
        """Forgets all arrays; where the worker is stays known if the step failed."""
        self._args, self._held, self._results = {}, {}, {}
        self._arriving.clear()
        self._leaving.clear()
        self._pending.clear()

    def _error(self, error: Exception) -> WorkerError:
        here = self.progress()
        summary = error.what if isinstance(error, AutoparError) else str(error)
        pending = ", ".join(here.pending) or "nothing"
        text = "".join(traceback.format_exception(error)).rstrip()
        return WorkerError(
            f"worker {here.rank} ({here.stage}) failed in step {here.step} at instruction "
            f"{here.position}: {here.instruction}",
            where=f"action {here.mark}" if here.mark else "",
            got=f"{type(error).__name__}: {summary}",
            why=f"under way: {pending}\n{text}",
        )

    def _bound_steps(self) -> None:
        while len(self._last) >= STEPS_IN_FLIGHT:
            outputs = self._last.popleft()
            jax.block_until_ready([array for array in outputs if not array.is_deleted()])

    # What must be there before an instruction may run.

    def _given_up(self, item: Instruction) -> tuple[str, ...]:
        """The buffers that an instruction gives away: they must have left before."""
        if not isinstance(item, Run):
            return ()
        return tuple(item.inputs[position] for position in self._donated[item.task])

    def _make_ready(self, reads: tuple[str, ...], leaves: tuple[str, ...]) -> Waits:
        for buffer in reads:
            if buffer in self._arriving:
                yield from self._arrive(buffer)
        for buffer in leaves:
            yield from self._leave(buffer)

    def _arrive(self, buffer: str) -> Waits:
        messages = self._arriving[buffer]
        yield from self._wait(messages.requests)
        instruction = self.program.instructions[messages.position]
        assert isinstance(instruction, Recv)
        receiver = self._loaded.receivers[instruction.transfer]
        self._held[buffer] = receiver.join(messages.requests)
        del self._arriving[buffer]
        self._end("RECV", messages)

    def _leave(self, buffer: str) -> Waits:
        for messages in self._leaving.pop(buffer, ()):
            yield from self._wait(messages.requests)
            self._end("SEND", messages)

    def _wait(self, requests: tuple[Request, ...]) -> Waits:
        if not all(request.done() for request in requests):
            start = time.perf_counter()
            while not all(request.done() for request in requests):
                yield requests
            self._record("WAIT", self._position, self._mark, start)
        for request in requests:
            request.result()

    def _finish(self) -> Waits:
        """Waits for what still leaves; what was received and never used arrives first."""
        for buffer in tuple(self._arriving):
            yield from self._arrive(buffer)
        for buffer in tuple(self._leaving):
            yield from self._leave(buffer)
        if not self._awaits:
            self._last.append(self._newest)

    def _end(self, kind: str, messages: _Messages) -> None:
        self._pending.pop(messages.position, None)
        self._record(kind, messages.position, messages.mark, messages.start)

    def _record(self, kind: str, position: int, mark: str, start: float) -> None:
        if self._recorder is not None:
            end = time.perf_counter()
            text = self._texts[position]
            self._recorder(Event(self._number, position, mark, kind, text, start, end))

    # One method an instruction; none of them blocks on a peer.

    def _run(self, run: Run) -> None:
        start = time.perf_counter()
        donated = self._donated[run.task]
        inputs = [
            self._held.pop(buffer) if position in donated else self._held[buffer]
            for position, buffer in enumerate(run.inputs)
        ]
        self._transport.launch()  # what was posted goes on meanwhile
        outputs = self._loaded.tasks[run.task](*inputs)
        if self._awaits:
            jax.block_until_ready(outputs)
        else:
            self._newest = outputs
        self._held.update(zip(run.outputs, outputs, strict=True))
        self._record("RUN", self._position, self._mark, start)

    def _send(self, send: Send) -> None:
        self._sweep()
        start = time.perf_counter()
        array = self._held[send.buffer]
        sender = self._loaded.senders[send.transfer]
        self._pending[self._position] = f"send {send.buffer} to {send.peer} tag {send.tag}"
        requests = sender.post(self._transport, send.peer, send.tag, array)
        messages = _Messages(requests, self._position, self._mark, start)
        self._leaving.setdefault(send.buffer, []).append(messages)

    def _sweep(self) -> None:
        """Lets go of what has left."""
        for buffer, sent in tuple(self._leaving.items()):
            for messages in tuple(sent):
                if messages.done():
                    sent.remove(messages)
                    for request in messages.requests:
                        request.result()
                    self._end("SEND", messages)
            if not sent:
                del self._leaving[buffer]

    def _recv(self, recv: Recv) -> None:
        start = time.perf_counter()
        receiver = self._loaded.receivers[recv.transfer]
        self._pending[self._position] = f"recv {recv.buffer} from {recv.peer} tag {recv.tag}"
        requests = receiver.post(self._transport, recv.peer, recv.tag)
        self._arriving[recv.buffer] = _Messages(requests, self._position, self._mark, start)

    def _free(self, free: Free) -> None:
        del self._held[free.buffer]
        self._sweep()

    def _zero(self, zero: Zero) -> None:
        self._held[zero.buffer] = self._loaded.zeros[self._specs[zero.buffer]]()

    def _feed(self, feed: Feed) -> None:
        key = (feed.argument, feed.micro)
        array = self._args.get(key)
        which = "" if feed.micro == WHOLE else f", micro-batch {feed.micro}"
        if array is None:
            raise WorkerError(f"argument {feed.argument}{which} was not given to this worker")
        spec = self._specs[feed.buffer]
        if tuple(array.shape) != spec.shape or array.dtype != jnp.dtype(spec.dtype):
            raise WorkerError(
                f"argument {feed.argument}{which} is not what the step was made for",
                got=f"{array.dtype}{list(array.shape)}",
                why=f"the plan says {spec.dtype}{list(spec.shape)}",
            )
        self._held[feed.buffer] = array
        if key not in self._given_away:
            self._borrowed.add(feed.buffer)

    def _fetch(self, fetch: Fetch) -> None:
        array = self._held[fetch.buffer]
        if fetch.buffer in self._borrowed:
            array = jnp.copy(array)
            if self._awaits:
                array.block_until_ready()
        self._results[fetch.result] = array
        self._borrowed.add(fetch.buffer)

    def _set_mark(self, mark: Mark) -> None:
        self._mark = mark.text


def _reads(instruction: Instruction) -> Iterable[str]:
    if isinstance(instruction, Run):
        return instruction.inputs
    if isinstance(instruction, Send | Free | Fetch):
        return (instruction.buffer,)
    return ()
