"""A device with NCCL that exists in this process only, and is as unforgiving as the real one.

- Streams run late: an operation is done when the world is advanced, which happens now and then as
  somebody asks for an event, and not before both sides of it are at the head of their streams.
- A communicator matches the n-th send with the n-th receive; other sizes are an error, and ranks
  that post in different orders wait for ever.
- Memory that is given back is overwritten at once: who frees too early sends rubbish.
- What is received is rubbish until the copy has been made.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar.errors import TransportError
from autopar.runtime.transport.base import ArraySpec

RUBBISH = 0xDB


class FakeArray:
    """An array in the memory of the fake device."""

    def __init__(self, world: World, shape: tuple[int, ...], dtype: str) -> None:
        self.shape = shape
        self.dtype = jnp.dtype(dtype)
        self.world = world
        size = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        self.pointer, self.memory = world.allocate(size)

    def numpy(self) -> np.ndarray[Any, Any]:
        """A copy on the host."""
        return np.frombuffer(self.memory.tobytes(), self.dtype).reshape(self.shape).copy()

    def __del__(self) -> None:
        self.world.free(self.pointer)


@dataclass
class FakeEvent:
    fired: bool = False


@dataclass
class FakeStream:
    """What a stream has been given and has not done."""

    queue: deque[tuple[str, Any]] = field(default_factory=deque)


@dataclass
class _Pair:
    """A communicator: what both sides have posted, in order."""

    posted: tuple[deque[Any], deque[Any]] = field(default_factory=lambda: (deque(), deque()))
    joined: set[int] = field(default_factory=set)
    aborted: bool = False


@dataclass(eq=False)
class _Move:
    """A send (side 0) or receive (side 1) at the head of a stream or behind it."""

    pair: _Pair
    side: int
    pointer: int
    nbytes: int


class World:
    """All devices, streams and communicators."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.heap: dict[int, np.ndarray[Any, Any]] = {}
        self.freed = 0
        self.pointers = itertools.count(4096, 4096)
        self.pairs: dict[bytes, _Pair] = {}
        self.streams: list[FakeStream] = []

    def allocate(self, size: int) -> tuple[int, np.ndarray[Any, Any]]:
        with self.lock:
            pointer = next(self.pointers)
            self.heap[pointer] = np.full(size, RUBBISH, np.uint8)
            return pointer, self.heap[pointer]

    def free(self, pointer: int) -> None:
        with self.lock:
            assert pointer in self.heap, "freed twice"
            # Somebody else has the memory now; a pointer to it still reads what is there.
            self.heap[pointer][:] = RUBBISH
            self.freed += 1

    def advance(self, *, lazy: bool = True) -> None:
        """Do some of what can be done; `lazy`: often nothing."""
        with self.lock:
            if lazy and self.random.random() < 0.7:
                return
            for stream in self.random.sample(self.streams, len(self.streams)):
                self._advance(stream)

    def _advance(self, stream: FakeStream) -> None:
        while stream.queue:
            kind, what = stream.queue[0]
            if kind == "event":
                what.fired = True
                stream.queue.popleft()
                continue
            if not self._move(what):
                return

    def _move(self, move: _Move) -> bool:
        """Carry a transfer out if both of its sides are first in their streams and pair."""
        send, receive = move.pair.posted
        if move.pair.aborted or not send or not receive:
            return False
        one, other = send[0], receive[0]
        heads = [stream.queue[0][1] for stream in self.streams if stream.queue]
        if not any(h is one for h in heads) or not any(h is other for h in heads):
            return False
        if one.nbytes != other.nbytes:
            raise TransportError(
                "the fake NCCL met a send and a receive of different sizes",
                got=f"{one.nbytes} and {other.nbytes} bytes",
            )
        self.heap[other.pointer][: one.nbytes] = self.heap[one.pointer][: one.nbytes]
        for stream in self.streams:
            if stream.queue and stream.queue[0][1] in (one, other):
                stream.queue.popleft()
        send.popleft()
        receive.popleft()
        return True


class FakeCommunicator:
    def __init__(self, world: World, pair: _Pair, side: int) -> None:
        self.world, self.pair, self.side = world, pair, side

    def _post(self, pointer: int, nbytes: int, stream: FakeStream) -> None:
        with self.world.lock:
            move = _Move(self.pair, self.side, pointer, nbytes)
            self.pair.posted[self.side].append(move)
            stream.queue.append(("move", move))

    def send(self, pointer: int, nbytes: int, stream: FakeStream) -> None:
        assert self.side == 0
        self._post(pointer, nbytes, stream)

    def recv(self, pointer: int, nbytes: int, stream: FakeStream) -> None:
        assert self.side == 1
        self._post(pointer, nbytes, stream)

    def abort(self) -> None:
        with self.world.lock:
            self.pair.aborted = True

    def close(self) -> None:
        return None


class FakeBackend:
    """One rank's device."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.streams: list[FakeStream] = []

    def check(self) -> None:
        return None

    def unique_id(self) -> bytes:
        with self.world.lock:
            made = self.world.random.randbytes(128)
            self.world.pairs[made] = _Pair()
            return made

    def communicator(self, unique_id: bytes, rank: int) -> FakeCommunicator:
        with self.world.changed:
            pair = self.world.pairs[unique_id]
            pair.joined.add(rank)
            self.world.changed.notify_all()
            assert self.world.changed.wait_for(lambda: len(pair.joined) == 2, timeout=20)
        return FakeCommunicator(self.world, pair, rank)

    def stream(self) -> FakeStream:
        with self.world.lock:
            made = FakeStream()
            self.streams.append(made)
            self.world.streams.append(made)
            return made

    def event(self, stream: FakeStream) -> FakeEvent:
        with self.world.lock:
            made = FakeEvent()
            stream.queue.append(("event", made))
            return made

    def fired(self, event: FakeEvent) -> bool:
        self.world.advance()
        return event.fired

    def source(self, array: FakeArray, stream: FakeStream) -> tuple[int, Any]:
        return array.pointer, None

    def empty(self, spec: ArraySpec) -> tuple[int, FakeArray]:
        made = FakeArray(self.world, spec.shape, spec.dtype)
        return made.pointer, made

    def to_jax(self, buffer: FakeArray, spec: ArraySpec) -> FakeArray:
        return buffer

    def close(self) -> None:
        with self.world.lock:
            for stream in self.streams:
                self.world.streams.remove(stream)
            self.streams.clear()
