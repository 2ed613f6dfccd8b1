"""Host memory for what arrives: aligned as XLA wants it, lent out, and used again.

An array that is lent lies on an owner of its own, a ctypes array over the memory. Views of the
array, and JAX arrays that alias it, keep the owner alive; when the last of them goes, its finalizer
tells that the memory is free. Finalizers may run in any thread at any allocation, also while that
thread holds a lock: they only ever append to a deque or store a byte.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ALIGNMENT = 64
"""Bytes; XLA's CPU client takes host memory over without a copy only if it is so aligned."""

SPARE_BYTES = 1 << 28
"""Bytes of returned buffers that a pool keeps; memory that was touched before is some four times
as fast to fill as new memory."""

POOLED_FROM = 1 << 15
"""Bytes from which buffers are worth keeping; the allocator itself reuses smaller ones."""

GRAIN = 1 << 12
"""Bytes; sizes of pooled buffers are multiples, so that arrays of like size share them."""


def raw_bytes(array: Array) -> Array:
    """The memory of a C-contiguous array of any dtype as uint8 [bytes]."""
    return array.reshape(-1).view(np.uint8)


def aligned_bytes(size: int) -> Array:
    """New memory that starts at a multiple of `ALIGNMENT`: uint8 [size]."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    first = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[first : first + size]


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """New C-contiguous array of any content, aligned."""
    return aligned_bytes(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def contiguous(array: Any) -> Array:
    """An array in C order; a scalar stays one (numpy's own function makes it a vector)."""
    made = np.asarray(array)
    return made if made.flags.c_contiguous else made.copy(order="C")


def lend(
    memory: Array | mmap.mmap, offset: int, size: int, give_back: Callable[..., Any], *args: Any
) -> Array:
    """An array over a part of some memory; `give_back(*args)` is called when nobody uses it.

    Args:
        memory: writable; it stays alive as long as the array.
        offset, size: bytes.
        give_back: must neither lock nor raise.
        args: for it.

    Returns:
        uint8 [size].
    """
    buffer: Any = memory  # numpy's arrays are writable buffers, which not all its stubs say
    owner: Any = (ctypes.c_char * size).from_buffer(buffer, offset)
    weakref.finalize(owner, give_back, *args).atexit = False
    return np.frombuffer(owner, np.uint8)


class BufferPool:
    """Lends buffers and takes them back by themselves.

    Args:
        spare_bytes: kept at most for the next time.
    """

    def __init__(self, spare_bytes: int = SPARE_BYTES) -> None:
        self._lock = threading.Lock()
        self._most = spare_bytes
        self._spare: dict[int, list[Array]] = {}
        self._spare_bytes = 0
        self._lent = 0
        self._returned: deque[Array] = deque()

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """A C-contiguous array of any content, aligned."""
        size = math.prod(shape) * dtype.itemsize
        if size < POOLED_FROM:
            return aligned_empty(shape, dtype)
        whole = -(-size // GRAIN) * GRAIN
        with self._lock:
            self._absorb()
            self._lent += 1
            buffers = self._spare.get(whole)
            raw = buffers.pop() if buffers else None
            if raw is not None:
                self._spare_bytes -= whole
        if raw is None:
            raw = aligned_bytes(whole)
        return lend(raw, 0, size, self._returned.append, raw).view(dtype).reshape(shape)

    @property
    def lent(self) -> int:
        """Buffers that somebody still uses."""
        with self._lock:
            self._absorb()
            return self._lent

    @property
    def spare_bytes(self) -> int:
        """Bytes of buffers that nobody uses."""
        with self._lock:
            self._absorb()
            return self._spare_bytes

    def clear(self) -> None:
        """Give spare memory back to the allocator; what is lent stays valid."""
        with self._lock:
            self._absorb()
            self._most = 0
            self._spare.clear()
            self._spare_bytes = 0

    def _absorb(self) -> None:
        while self._returned:
            raw = self._returned.popleft()
            self._lent -= 1
            self._spare.setdefault(len(raw), []).append(raw)
            self._spare_bytes += len(raw)
        # The sizes that were seen first go first: steps repeat, old sizes may not come again.
        while self._spare_bytes > self._most:
            size = next(size for size, buffers in self._spare.items() if buffers)
            self._spare[size].pop()
            self._spare_bytes -= size
            if not self._spare[size]:
                del self._spare[size]
