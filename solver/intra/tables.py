"""Min-plus tables: add factors and minimise one variable out, in blocks, with equal work shared.

One step of variable elimination takes factors `f_1 ... f_m` that mention a variable `v` and makes

    table[x] = min_k sum_r f_r[k, x]        argmin[x] = the lowest k that reaches it

where `x` runs over the choices of the other variables. All factors have the same number of
dimensions: axis 0 is `v`, size 1 stands for "does not depend on this variable".
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.solver.intra.problem import Array

Argmin = NDArray[Any]

# Entries of one working block (1 MiB of float64): it stays in a core's L2 cache, and is large
# enough to hide the few microseconds that each numpy call costs.
BLOCK_ENTRIES = 1 << 17


@dataclass(frozen=True, slots=True)
class Message:
    """What is left of a variable after elimination: `table` and `argmin`, both over `x`."""

    table: Array
    argmin: Argmin


class TableCache:
    """Shares the result of steps whose input tables are equal, byte for byte.

    Equal layers of a model bring equal tables, so each distinct step runs once. Arrays are told
    apart first by their memory (pointer, shape, strides: the cache keeps them alive and nobody
    writes to them), then by the digest of their bytes, so sharing is exact.

    Args:
        max_bytes: the most bytes kept alive; the cache starts afresh beyond it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._clear()

    def _clear(self) -> None:
        self._bytes = 0
        self._by_memory: dict[tuple[object, ...], tuple[int, Array]] = {}
        self._by_bytes: dict[bytes, int] = {}
        self._messages: dict[tuple[int, ...], Message] = {}

    def token(self, array: Array) -> int:
        """A small number, equal for arrays of equal shape and bytes."""
        memory = (array.__array_interface__["data"][0], array.shape, array.strides)
        found = self._by_memory.get(memory)
        if found is not None:
            return found[0]
        digest = hashlib.blake2b(repr(array.shape).encode(), digest_size=16)
        digest.update(array.tobytes())
        token = self._by_bytes.setdefault(digest.digest(), len(self._by_bytes))
        self._by_memory[memory] = (token, array)
        self._bytes += array.nbytes
        return token

    def minimise(self, factors: Sequence[Array]) -> Message:
        """`minimise_out`, computed once per distinct list of factors."""
        if self._bytes > self._max_bytes:
            self._clear()
        key = tuple(self.token(f) for f in factors)
        message = self._messages.get(key)
        if message is None:
            message = self._messages[key] = minimise_out(factors)
            self._bytes += message.table.nbytes + message.argmin.nbytes
        return message


def argmin_dtype(size: int) -> type[np.unsignedinteger[Any]]:
    """The smallest unsigned integer type that numbers `size` choices from 1."""
    for dtype in (np.uint8, np.uint16):
        if size <= np.iinfo(dtype).max:
            return dtype
    return np.uint32


def minimise_out(factors: Sequence[Array]) -> Message:
    """Minimise axis 0 out of the sum of `factors`.

    Args:
        factors: arrays of equal ndim >= 2 that broadcast together.

    Returns:
        table `[x]` in float64 and argmin `[x]`, ties to the lowest choice. Peak extra memory is
        a few blocks of `BLOCK_ENTRIES` entries.
    """
    shape = _common_shape(*factors)
    parts = _presum(factors)
    table = np.empty(shape[1:], dtype=np.float64)
    argmin = np.empty(shape[1:], dtype=argmin_dtype(shape[0]))
    for block in _blocks(shape[1:], max(1, BLOCK_ENTRIES // shape[0])):
        _minimise_block(parts, shape[0], (table[block], argmin[block]), block)
    table.flags.writeable = False
    argmin.flags.writeable = False
    return Message(table, argmin)


def _minimise_block(
    parts: Sequence[Array], size: int, out: tuple[Array, Argmin], block: tuple[slice, ...]
) -> None:
    table, argmin = out
    total = _cut(parts[0], block)
    for part in parts[1:]:
        total = total + _cut(part, block)
    if total.shape != (size, *table.shape):
        total = np.broadcast_to(total, (size, *table.shape))
    np.minimum.reduce(total, axis=0, out=table)
    # The first k that reaches the minimum has the largest weight size - k: comparing and taking
    # a maximum of small integers is several times faster than numpy's argmin over axis 0.
    weights = np.arange(size, 0, -1, dtype=argmin.dtype).reshape(size, *[1] * table.ndim)
    hits = np.multiply(total == table, weights)
    np.subtract(argmin.dtype.type(size), np.maximum.reduce(hits, axis=0), out=argmin)


def _presum(factors: Sequence[Array]) -> tuple[Array, ...]:
    """Add factors, smallest first, while the sum stays within one block."""
    ordered = sorted(factors, key=lambda f: f.size)
    total, position = ordered[0], 1
    for factor in ordered[1:]:
        if math.prod(_common_shape(total, factor)) > BLOCK_ENTRIES:
            break
        total = total + factor
        position += 1
    return (total, *ordered[position:])


def _common_shape(*factors: Array) -> tuple[int, ...]:
    # np.broadcast_shapes does the same ten times slower; factors are known to fit.
    return tuple(map(max, zip(*(f.shape for f in factors), strict=True)))


def _cut(part: Array, block: tuple[slice, ...]) -> Array:
    axes = zip(part.shape[1:], block, strict=True)
    return part[(slice(None), *(cut if size > 1 else slice(None) for size, cut in axes))]


def _blocks(shape: tuple[int, ...], entries: int) -> Iterator[tuple[slice, ...]]:
    """Cut `shape` into runs of rows of at most `entries` entries (at least one)."""
    if math.prod(shape) <= entries:
        yield tuple(slice(0, n) for n in shape)
        return
    axis = len(shape) - 1
    while axis > 0 and math.prod(shape[axis:]) <= entries:
        axis -= 1
    rows = max(1, entries // math.prod(shape[axis + 1 :]))
    tail = tuple(slice(0, n) for n in shape[axis + 1 :])
    for lead in itertools.product(*(range(n) for n in shape[:axis])):
        head = tuple(slice(i, i + 1) for i in lead)
        for start in range(0, shape[axis], rows):
            yield (*head, slice(start, min(start + rows, shape[axis])), *tail)
