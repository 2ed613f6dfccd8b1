"""A stand-in for `cupy.cuda` and `cupy.cuda.nccl` over host memory, with CuPy's names and checks.

It carries a message out at once, as soon as both sides have given it: only the calls are under
test, with JAX's CPU arrays as memory.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from functools import partial
from types import ModuleType
from typing import Any

SIZES = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}
"""Bytes of NCCL's datatypes by number."""

KINDS = {
    "INT8": 0,
    "UINT8": 1,
    "INT32": 2,
    "UINT32": 3,
    "INT64": 4,
    "UINT64": 5,
    "FLOAT16": 6,
    "FLOAT32": 7,
    "FLOAT64": 8,
    "BFLOAT16": 9,
}
"""As CuPy 14.2 has them."""


class FakeCuda:
    """The two modules.

    Args:
        version: of NCCL.
        old: whether ids are tuples of signed chars, as before CuPy 14.
    """

    def __init__(self, version: int = 23203, *, old: bool = False) -> None:
        self.changed = threading.Condition()
        self.old = old
        self.ids = itertools.count(200)
        self.posted: dict[Any, tuple[deque[Any], deque[Any]]] = {}
        self.joined: dict[Any, int] = {}
        self.pointers = itertools.count(1 << 20, 64)
        self.streams: dict[int, _Stream] = {}
        self.calls: list[str] = []
        self.cuda, self.nccl = ModuleType("cupy.cuda"), ModuleType("cupy.cuda.nccl")
        self._fill(version)

    def _fill(self, version: int) -> None:
        cuda: Any = self.cuda
        nccl: Any = self.nccl
        cuda.Device, cuda.Stream, cuda.Event = _Device, partial(_Stream, self), _Event
        nccl.get_version = lambda: version
        nccl.get_unique_id = self.unique_id
        nccl.groupStart = lambda: self.calls.append("groupStart")
        nccl.groupEnd = lambda: self.calls.append("groupEnd")
        nccl.NcclCommunicator = lambda *args: _Communicator(self, *args)
        for name, number in KINDS.items():
            setattr(nccl, f"NCCL_{name}", number)

    def unique_id(self) -> bytes | tuple[int, ...]:
        data = bytes([next(self.ids)] * 128)
        return tuple(b - 256 if b > 127 else b for b in data) if self.old else data


class _Device:
    def __init__(self, ordinal: int) -> None:
        assert isinstance(ordinal, int)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


class _Stream:
    def __init__(self, fake: FakeCuda, *, non_blocking: bool) -> None:
        assert non_blocking
        self.ptr = next(fake.pointers)
        self.given: list[Any] = []
        fake.streams[self.ptr] = self


class _Event:
    def __init__(self, *, disable_timing: bool) -> None:
        assert disable_timing
        self.before: list[Any] | None = None

    def record(self, stream: _Stream) -> None:
        self.before = list(stream.given)

    @property
    def done(self) -> bool:
        assert self.before is not None, "asked before it was recorded"
        return all(move["over"] for move in self.before)


class _Communicator:
    def __init__(self, fake: FakeCuda, ndev: int, unique: Any, rank: int) -> None:
        if isinstance(unique, tuple) != fake.old:
            raise TypeError("Argument 'commId' has incorrect type")
        assert ndev == 2
        assert len(unique) == 128
        self.fake, self.rank = fake, rank
        with fake.changed:
            self.queues = fake.posted.setdefault(unique, (deque(), deque()))
            fake.joined[unique] = fake.joined.get(unique, 0) + 1
            fake.changed.notify_all()
            assert fake.changed.wait_for(lambda: fake.joined[unique] == 2, timeout=10)

    def send(self, pointer: int, count: int, kind: int, peer: int, stream: int) -> None:
        assert (self.rank, peer) == (0, 1)
        self._post(pointer, count * SIZES[kind], stream)

    def recv(self, pointer: int, count: int, kind: int, peer: int, stream: int) -> None:
        assert (self.rank, peer) == (1, 0)
        self._post(pointer, count * SIZES[kind], stream)

    def _post(self, pointer: int, nbytes: int, stream: int) -> None:
        move = {"pointer": pointer, "nbytes": nbytes, "over": False}
        with self.fake.changed:
            self.fake.streams[stream].given.append(move)
            self.queues[self.rank].append(move)
            if all(self.queues):
                send, receive = (queue.popleft() for queue in self.queues)
                assert send["nbytes"] == receive["nbytes"]
                ctypes.memmove(receive["pointer"], send["pointer"], send["nbytes"])
                send["over"] = receive["over"] = True

    def check_async_error(self) -> None:
        self.fake.calls.append("check_async_error")

    def abort(self) -> None:
        self.fake.calls.append("abort")

    def destroy(self) -> None:
        self.fake.calls.append("destroy")
