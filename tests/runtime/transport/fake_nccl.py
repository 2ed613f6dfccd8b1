"""Devices with NCCL that exist in this process only, and are less forgiving than real ones.

- Streams run late: an operation is done when the world is advanced, which happens now and then as
  somebody asks for an event, and not before both of its sides have come to the head of their
  streams. Data is copied only then.
- A communicator matches the n-th send with the n-th receive. Another count or datatype breaks it:
  nothing moves any more, and both sides are told when they check.
- The first operation of a pair connects it, and the end of its group blocks until both sides are
  there, or the communicator is aborted.
- A device works on one group at a time: CUDA promises no more. What is not grouped waits.
- An array that is computed is not there before a stream waits for it. Memory that is given back is
  overwritten at once, and giving it back twice is an error. What is received, or computed late, is
  rubbish before.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar.errors import TransportError
from autopar.runtime.transport.base import ArraySpec
from autopar.runtime.transport.nccl_messages import Payload

RUBBISH = 0xDB
BLOCKED = 20.0
"""Seconds after which the fake gives a blocked group up."""


class FakeArray:
    """An array in the memory of the fake device.

    Attributes:
        ready: whether what computes it has run.
        contiguous: what `source` finds.
    """

    def __init__(self, world: World, shape: tuple[int, ...], dtype: str) -> None:
        self.shape = shape
        self.dtype = jnp.dtype(dtype)
        self.world = world
        self.ready = Flag(True)
        self.contiguous = True
        size = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        self.pointer, self.memory = world.allocate(size)

    def numpy(self) -> np.ndarray[Any, Any]:
        """A copy on the host."""
        return np.frombuffer(self.memory.tobytes(), self.dtype).reshape(self.shape).copy()

    def __del__(self) -> None:
        self.world.free(self.pointer)


@dataclass(eq=False)
class Flag:
    """Something that becomes true: an event, or that an array is there."""

    up: bool = False


@dataclass(eq=False)
class FakeStream:
    """What a stream has been given and has not done: moves, events, waits for arrays."""

    queue: deque[Any] = field(default_factory=deque)


@dataclass(frozen=True, eq=False)
class _Record:
    event: Flag


@dataclass(frozen=True, eq=False)
class _Await:
    array: Flag


@dataclass(eq=False)
class _Pair:
    """A communicator: what both sides have posted, in order."""

    posted: tuple[deque[_Move], deque[_Move]] = field(default_factory=lambda: (deque(), deque()))
    joined: set[int] = field(default_factory=set)
    opened: set[int] = field(default_factory=set)
    aborted: bool = False
    broken: str = ""


@dataclass(eq=False)
class _Move:
    """A send (side 0) or a receive (side 1)."""

    pair: _Pair
    side: int
    what: Payload
    stream: FakeStream
    device: FakeBackend

    def first(self) -> bool:
        """Whether its stream and its device have come to it."""
        groups = self.device.groups
        return self.stream.queue[0] is self and self in groups[0]

    def end(self) -> None:
        """Take it from its stream, its pair and its device."""
        self.stream.queue.remove(self)
        self.pair.posted[self.side].remove(self)
        for group in self.device.groups:
            if self in group:
                group.remove(self)
        while self.device.groups and not self.device.groups[0]:
            self.device.groups.popleft()


class World:
    """All devices, streams and communicators.

    Args:
        seed: of what happens when.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.changed = threading.Condition(threading.RLock())
        self.heap: dict[int, np.ndarray[Any, Any]] = {}
        self.freed: set[int] = set()
        self.computing: list[tuple[int, bytes, Flag]] = []
        self.pointers = itertools.count(4096, 4096)
        self.pairs: dict[bytes, _Pair] = {}
        self.streams: list[FakeStream] = []

    def allocate(self, size: int) -> tuple[int, np.ndarray[Any, Any]]:
        with self.changed:
            pointer = next(self.pointers)
            self.heap[pointer] = np.full(size, RUBBISH, np.uint8)
            return pointer, self.heap[pointer]

    def free(self, pointer: int) -> None:
        """Somebody else has the memory now; a pointer to it reads what they wrote."""
        with self.changed:
            assert pointer not in self.freed, "freed twice"
            self.heap[pointer][:] = RUBBISH
            self.freed.add(pointer)

    def in_use(self) -> int:
        """Arrays that have not been given back."""
        with self.changed:
            return len(self.heap) - len(self.freed)

    def computed(self, array: np.ndarray[Any, Any]) -> FakeArray:
        """An array whose values come some time later, once a stream waits for them."""
        made = FakeArray(self, array.shape, array.dtype.name)
        made.ready = Flag()
        with self.changed:
            self.computing.append((made.pointer, array.tobytes(), made.ready))
        return made

    def advance(self) -> None:
        """Do some of what can be done; often nothing."""
        with self.changed:
            if self.random.random() < 0.7:
                return
            # As late as can be: what nobody waits for is never there.
            heads = [stream.queue[0] for stream in self.streams if stream.queue]
            awaited = [head.array for head in heads if isinstance(head, _Await)]
            for item in list(self.computing):
                if item[2] in awaited and self.random.random() < 0.7:
                    self._compute(*item)
                    self.computing.remove(item)
            for stream in self.random.sample(self.streams, len(self.streams)):
                self._run(stream)

    def _compute(self, pointer: int, data: bytes, ready: Flag) -> None:
        if pointer not in self.freed:
            self.heap[pointer][:] = np.frombuffer(data, np.uint8)
        ready.up = True

    def _run(self, stream: FakeStream) -> None:
        while stream.queue:
            item = stream.queue[0]
            if isinstance(item, _Move):
                if not self._move(item.pair):
                    return
                continue
            if isinstance(item, _Await) and not item.array.up:
                return
            if isinstance(item, _Record):
                item.event.up = True
            stream.queue.popleft()

    def _move(self, pair: _Pair) -> bool:
        """Carry a transfer out if both of its sides have come to it."""
        sends, receives = pair.posted
        if pair.aborted or pair.broken or not sends or not receives:
            return False
        send, receive = sends[0], receives[0]
        if not send.first() or not receive.first():
            return False
        one, other = send.what, receive.what
        if (one.count, one.kind) != (other.count, other.kind):
            pair.broken = f"{one.count} {one.kind} met {other.count} {other.kind}"
            return False
        self.heap[other.pointer][:] = self.heap[one.pointer][: other.nbytes]
        send.end()
        receive.end()
        return True


class FakeCommunicator:
    """One side of a pair."""

    def __init__(self, device: FakeBackend, pair: _Pair, side: int) -> None:
        self.device, self.pair, self.side = device, pair, side

    def send(self, what: Payload, stream: FakeStream) -> None:
        assert self.side == 0
        self._post(what, stream)

    def recv(self, what: Payload, stream: FakeStream) -> None:
        assert self.side == 1
        self._post(what, stream)

    def _post(self, what: Payload, stream: FakeStream) -> None:
        assert what.count > 0, "NCCL was given an operation of no bytes"
        assert stream in self.device.streams, "the stream is of another device"
        move = _Move(self.pair, self.side, what, stream, self.device)
        grouped = self.device.grouped()
        if grouped is not None:
            grouped.append(move)
        else:
            self.device.launch([move])

    def check(self) -> None:
        if self.pair.broken:
            raise RuntimeError(f"invalid argument: {self.pair.broken}")

    def abort(self) -> None:
        with self.device.world.changed:
            self.pair.aborted = True
            for move in list(self.pair.posted[self.side]):
                move.end()  # what is behind it in the stream, its event too, goes on
            self.device.world.changed.notify_all()

    def close(self) -> None:
        assert not self.pair.posted[self.side], "giving it back would hang"


class FakeBackend:
    """One rank's device."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.streams: list[FakeStream] = []
        self.groups: deque[list[_Move]] = deque()
        self.local = threading.local()  # groups are of a thread

    def check(self) -> None:
        return None

    def unique_id(self) -> bytes:
        with self.world.changed:
            made = self.world.random.randbytes(128)
            self.world.pairs[made] = _Pair()
            return made

    def communicator(self, unique_id: bytes, rank: int) -> FakeCommunicator:
        with self.world.changed:
            pair = self.world.pairs[unique_id]
            pair.joined.add(rank)
            self.world.changed.notify_all()
            assert self.world.changed.wait_for(lambda: len(pair.joined) == 2, timeout=BLOCKED)
        return FakeCommunicator(self, pair, rank)

    def grouped(self) -> list[_Move] | None:
        """The operations of the open group of this thread."""
        found: list[_Move] | None = getattr(self.local, "moves", None)
        return found

    @contextmanager
    def group(self) -> Iterator[None]:
        self.local.moves = []
        try:
            yield
        finally:
            moves, self.local.moves = self.local.moves, None
            if moves:
                self.launch(moves)

    def launch(self, moves: list[_Move]) -> None:
        """End a group: connect its pairs, blocking, and give its operations to the device."""
        with self.world.changed:
            for move in moves:
                move.pair.opened.add(move.side)
            self.world.changed.notify_all()
            self.world.changed.wait_for(lambda: all(map(_reachable, moves)), timeout=BLOCKED)
            moves = [move for move in moves if not move.pair.aborted]
            for move in moves:
                move.pair.posted[move.side].append(move)
                move.stream.queue.append(move)
            if moves:
                self.groups.append(list(moves))

    def stream(self) -> FakeStream:
        with self.world.changed:
            made = FakeStream()
            self.streams.append(made)
            self.world.streams.append(made)
            return made

    def event(self, stream: FakeStream) -> Flag:
        with self.world.changed:
            made = Flag()
            stream.queue.append(_Record(made))
            return made

    def fired(self, event: Flag) -> bool:
        self.world.advance()
        return event.up

    def source(self, array: FakeArray, stream: FakeStream) -> tuple[int, Any]:
        if not array.contiguous:
            raise TransportError("the array to send is not C-contiguous")
        with self.world.changed:
            stream.queue.append(_Await(array.ready))
        return array.pointer, None

    def prepare(self, spec: ArraySpec) -> None:
        return None

    def empty(self, spec: ArraySpec, stream: FakeStream) -> tuple[int, FakeArray]:
        made = FakeArray(self.world, spec.shape, spec.dtype)
        return made.pointer, made

    def close(self) -> None:
        with self.world.changed:
            for stream in self.streams:
                self.world.streams.remove(stream)
            self.streams.clear()


def _reachable(move: _Move) -> bool:
    return len(move.pair.opened) == 2 or move.pair.aborted
