"""Shared memory between two processes: one end places bytes, the other lends them out.

An arena is memory without a name, so that nothing is left of it when its processes are gone,
however they end. Its sender cuts it into blocks, first fit:

    [ state, padding to 64 bytes | payload, a multiple of 64 bytes ]

The state byte is `IN_USE` from when the sender takes the block until the receiver's last reference
to the payload goes: then a finalizer there stores `FREE`. No message and no wake-up is needed,
since no sender ever waits for a block: it makes a new arena, or sends over the socket.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from autopar.runtime.transport.buffers import ALIGNMENT, lend, raw_bytes

Array = np.ndarray[Any, Any]
MakeMemory = Callable[[int], int]

FREE, IN_USE = 0, 1

FIRST_ARENA_BYTES = 1 << 22
"""The first arena of a connection is no smaller."""

SHARE_OF_FREE_MEMORY = 0.25
"""Of the memory that the system says is available, what one more arena may take."""

SHM_FOLDER = "/dev/shm"


def anonymous_memory(size: int) -> int:
    """A file descriptor of new shared memory without a name.

    Not from /dev/shm where that can be helped: in a container that often holds 64 MB only.

    Raises:
        OSError: there is not enough memory, or the system has no such thing.
    """
    _check_room(size, available_bytes())
    try:
        descriptor = os.memfd_create("autopar", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:  # forbidden in some sandboxes
        folder = os.statvfs(SHM_FOLDER)
        _check_room(size, folder.f_bavail * folder.f_frsize)  # which others need too
        descriptor = os.open(SHM_FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # All pages at once: memory that is missing shows here, not as a signal while copying.
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_room(size: int, free: int) -> None:
    if size > free * SHARE_OF_FREE_MEMORY:
        raise OSError(errno.ENOMEM, f"too little memory is free: {free} bytes")


def available_bytes(meminfo: str = "/proc/meminfo", cgroup: str = "/sys/fs/cgroup") -> int:
    """Memory that the machine has left, and the container, if this is one; 0 if unknown."""
    available = 0
    with open(meminfo, encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    try:
        limit, used = (
            Path(cgroup, name).read_text(encoding="ascii").strip()
            for name in ("memory.max", "memory.current")
        )
    except OSError:
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - int(used)))


def seal(descriptor: int) -> None:
    """Let nobody change the size any more: a shorter file would kill whoever reads it."""
    try:
        fcntl.fcntl(
            descriptor,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL,
        )
    except OSError:
        pass  # only memfd has seals


def map_memory(descriptor: int, size: int) -> mmap.mmap:
    """Map shared memory, all pages at once.

    Raises:
        OSError, ValueError: it is smaller than `size`.
    """
    return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


class Arena:
    """The sender's side of some shared memory; not thread-safe.

    Args:
        number: of the arena within its connection.
        memory: mapped.
    """

    def __init__(self, number: int, memory: mmap.mmap) -> None:
        self.number = number
        self.size = len(memory)
        self._memory = memory
        self._used: list[tuple[int, int]] = []  # (offset, bytes) of blocks, ascending

    def allocate(self, payload: int) -> int | None:
        """Take a block; returns the offset of its payload, or None if none is large enough."""
        size = block_bytes(payload)
        self._reclaim()
        start = 0
        for index, (offset, taken) in enumerate([*self._used, (self.size, 0)]):
            if offset - start >= size:
                self._used.insert(index, (start, size))
                self._memory[start] = IN_USE
                return start + ALIGNMENT
            start = offset + taken
        return None

    def fill(self, offset: int, source: Array) -> None:
        """Copy an array to the payload of a block."""
        target = np.frombuffer(self._memory, np.uint8, source.nbytes, offset)
        np.copyto(target, raw_bytes(source))

    @property
    def in_use(self) -> int:
        """Blocks that the receiver has not given back."""
        self._reclaim()
        return len(self._used)

    def _reclaim(self) -> None:
        self._used = [block for block in self._used if self._memory[block[0]] == IN_USE]


def block_bytes(payload: int) -> int:
    """Bytes of the block of a payload."""
    return ALIGNMENT * (1 + -(-payload // ALIGNMENT))


def lend_block(memory: mmap.mmap, offset: int, size: int) -> Array:
    """The payload of a block as the receiver hands it out: uint8 [size].

    Raises:
        ValueError: the block is not inside the memory.
    """
    state = offset - ALIGNMENT
    if state < 0 or offset % ALIGNMENT or offset + size > len(memory):
        raise ValueError(f"{size} bytes at {offset} of {len(memory)}")
    return lend(memory, offset, size, memory.__setitem__, state, FREE)


class Arenas:
    """All arenas towards one peer; not thread-safe.

    Args:
        capacity: bytes of all of them together.
        make_memory: see `anonymous_memory`.
    """

    def __init__(self, capacity: int, make_memory: MakeMemory) -> None:
        self._left = capacity
        self._make_memory = make_memory
        self._arenas: list[Arena] = []

    def allocate(self, payload: int) -> tuple[Arena, int] | None:
        """A block of an arena that exists."""
        for arena in self._arenas:
            offset = arena.allocate(payload)
            if offset is not None:
                return arena, offset
        return None

    def grow(self, payload: int) -> tuple[Arena, int] | None:
        """Make an arena that has room for a payload: at least as much as all so far.

        Returns:
            The arena, and a file descriptor for the peer that the caller owns; None if the
            capacity or the memory of the machine is used up.
        """
        least = _pages(block_bytes(payload))
        so_far = sum(arena.size for arena in self._arenas)
        for size in (max(FIRST_ARENA_BYTES, 2 * least, _pages(so_far)), least):
            if size > self._left:
                continue
            try:
                descriptor = self._make_memory(size)
            except OSError:
                continue
            seal(descriptor)
            try:
                arena = Arena(len(self._arenas), map_memory(descriptor, size))
            except OSError:  # no address space, or no file descriptor, is left
                os.close(descriptor)
                continue
            self._arenas.append(arena)
            self._left -= size
            return arena, descriptor
        return None

    @property
    def in_use(self) -> int:
        """Blocks that the peer has not given back."""
        return sum(arena.in_use for arena in self._arenas)

    @property
    def bytes(self) -> int:
        """Of all arenas."""
        return sum(arena.size for arena in self._arenas)

    def clear(self) -> None:
        """Let go of all arenas; the peer keeps what it has mapped."""
        self._arenas.clear()
        self._left = 0


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
