"""Arenas of shared memory and pools of buffers: no two users of one byte, and everything back."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.runtime.transport.arena import (
    FIRST_ARENA_BYTES,
    IN_USE,
    Arena,
    Arenas,
    anonymous_memory,
    available_bytes,
    block_bytes,
    lend_block,
    map_memory,
    seal,
)
from autopar.runtime.transport.buffers import (
    ALIGNMENT,
    POOLED_FROM,
    BufferPool,
    aligned_bytes,
    raw_bytes,
)
from tests.runtime.transport.contract import nothing_left, shared_memory_files


def test_blocks_never_overlap_and_all_come_back() -> None:
    rng = np.random.default_rng(0)
    memory = mmap.mmap(-1, 1 << 16)
    arena = Arena(0, memory)
    held: list[tuple[np.ndarray[Any, Any], int]] = []
    refused = 0
    for turn in range(600):
        if held and rng.random() < 0.45:
            array, value = held.pop(int(rng.integers(len(held))))
            assert (array == value).all()
            del array
            continue
        size, value = int(rng.integers(0, 9000)), turn % 251
        offset = arena.allocate(size)
        if offset is None:
            refused += 1
            continue
        arena.fill(offset, np.full(size, value, np.uint8))
        held.append((lend_block(memory, offset, size), value))
        assert arena.in_use == len(held)
    assert refused > 10
    for array, value in held:
        assert (array == value).all()
    del array
    held.clear()
    gc.collect()
    assert arena.in_use == 0
    assert arena.allocate((1 << 16) - ALIGNMENT) == ALIGNMENT  # whole again
    assert arena.allocate(0) is None


def test_a_block_is_free_when_the_last_view_goes() -> None:
    memory = mmap.mmap(-1, 1 << 14)
    arena = Arena(0, memory)
    offset = arena.allocate(1000)
    assert offset == ALIGNMENT
    assert memory[0] == IN_USE
    array = lend_block(memory, offset, 1000).view(np.float32).reshape(10, 25)
    view = array.T[3:5]
    del array
    assert arena.in_use == 1
    del view
    assert arena.in_use == 0


@pytest.mark.parametrize(("offset", "size"), [(0, 8), (65, 8), (64, 1 << 14), (1 << 14, 1)])
def test_blocks_outside_of_the_memory(offset: int, size: int) -> None:
    with pytest.raises(ValueError, match="of 16384"):
        lend_block(mmap.mmap(-1, 1 << 14), offset, size)


def test_arenas_grow_to_their_capacity() -> None:
    with nothing_left():
        sizes: list[int] = []

        def make(size: int) -> int:
            sizes.append(size)
            return anonymous_memory(size)

        arenas = Arenas(3 * FIRST_ARENA_BYTES, make)
        for _ in range(2):
            grown = arenas.grow(1000)
            assert grown is not None
            os.close(grown[1])
        assert sizes == [FIRST_ARENA_BYTES, FIRST_ARENA_BYTES]
        grown = arenas.grow(FIRST_ARENA_BYTES - ALIGNMENT)  # twice that does not fit any more
        assert grown is not None
        os.close(grown[1])
        assert sizes[2:] == [FIRST_ARENA_BYTES]
        assert arenas.grow(1) is None
        assert arenas.bytes == 3 * FIRST_ARENA_BYTES
        found = arenas.allocate(FIRST_ARENA_BYTES - ALIGNMENT)
        assert found is not None
        assert arenas.allocate(FIRST_ARENA_BYTES) is None
        assert arenas.in_use == 1
        arenas.clear()
        assert arenas.in_use == 0
        assert arenas.allocate(1) is None
        del grown, found


def test_no_memory_left_is_no_error() -> None:
    def make(size: int) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    assert Arenas(1 << 30, make).grow(1000) is None


def test_memory_that_cannot_be_mapped_is_no_error_and_is_closed() -> None:
    def make(size: int) -> int:
        return os.open("/proc/self", os.O_RDONLY)  # folders cannot be mapped

    with nothing_left():
        assert Arenas(1 << 30, make).grow(1000) is None


def test_more_than_the_machine_has_is_refused() -> None:
    with nothing_left(), pytest.raises(OSError, match="too little memory"):
        anonymous_memory(1 << 50)


def test_without_memfd_a_nameless_file_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(name: str, flags: int = 0) -> int:
        raise PermissionError(errno.EPERM, name)

    monkeypatch.setattr(os, "memfd_create", forbidden)
    with nothing_left():
        before = shared_memory_files()
        descriptor = anonymous_memory(1 << 16)
        seal(descriptor)
        memory = map_memory(descriptor, 1 << 16)
        memory[5] = 7
        assert os.pread(descriptor, 1, 5) == b"\7"
        assert shared_memory_files() == before
        os.close(descriptor)
        memory.close()


def test_a_small_folder_of_shared_memory_is_not_filled_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(name: str, flags: int = 0) -> int:
        raise PermissionError(errno.EPERM, name)

    class Docker:
        f_bavail, f_frsize = 1 << 14, 1 << 12  # 64 MB

    monkeypatch.setattr(os, "memfd_create", forbidden)
    monkeypatch.setattr(os, "statvfs", lambda path: Docker)
    with nothing_left():
        os.close(anonymous_memory(1 << 24))
        with pytest.raises(OSError, match="too little memory is free: 67108864"):
            anonymous_memory((1 << 24) + 1)


def test_the_room_of_a_container_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 4000 kB\nMemAvailable: 3000 kB\n")

    def room() -> int:
        return available_bytes(str(meminfo), str(tmp_path))

    assert room() == 3000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert room() == 3000 * 1024
    (tmp_path / "memory.max").write_text("5000\n")
    assert room() == 4000
    (tmp_path / "memory.current").write_text("6000\n")
    assert room() == 0
    meminfo.write_text("MemTotal: 4000 kB\n")
    assert room() == 0


def test_sealed_memory_cannot_be_cut_off() -> None:
    descriptor = anonymous_memory(1 << 16)
    seal(descriptor)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 10)
    with pytest.raises(ValueError, match="greater than file size"):
        map_memory(descriptor, 1 << 17)
    os.close(descriptor)


def test_blocks_have_room_for_their_state() -> None:
    assert [block_bytes(size) for size in (0, 1, 64, 65)] == [64, 128, 128, 192]


@pytest.mark.parametrize("size", [0, 1, 63, POOLED_FROM - 1, POOLED_FROM, 100_001])
def test_buffers_are_aligned_and_of_the_shape(size: int) -> None:
    pool = BufferPool()
    array = pool.take((size, 1), np.dtype(np.uint8))
    assert array.shape == (size, 1)
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.ctypes.data % ALIGNMENT == 0 or size == 0
    assert pool.lent == (size >= POOLED_FROM)
    assert aligned_bytes(size).ctypes.data % ALIGNMENT == 0 or size == 0


def test_a_buffer_is_used_again_only_when_nobody_uses_it() -> None:
    pool = BufferPool()
    first = pool.take((1 << 16,), np.dtype(np.uint8))
    where = first.ctypes.data
    view = first[5:6]
    del first
    second = pool.take((1 << 16,), np.dtype(np.uint8))
    assert second.ctypes.data != where
    assert pool.lent == 2
    del view
    third = pool.take((1 << 14,), np.dtype(np.float32))  # as many bytes of another dtype
    assert third.ctypes.data == where
    del second, third
    assert pool.lent == 0


def test_a_pool_keeps_no_more_than_it_may() -> None:
    pool = BufferPool(spare_bytes=1 << 17)
    arrays = [pool.take((1 << 16,), np.dtype(np.uint8)) for _ in range(5)]
    arrays.append(pool.take((3 << 16,), np.dtype(np.uint8)))
    assert pool.lent == 6
    arrays.clear()
    assert pool.lent == 0
    assert pool.spare_bytes == 1 << 17
    pool.clear()
    assert pool.spare_bytes == 0


def test_raw_bytes_share_the_memory() -> None:
    for shape in ((), (3,), (2, 0), (2, 3)):
        array = np.zeros(shape, np.complex64)
        raw = raw_bytes(array)
        assert raw.shape == (array.nbytes,)
        raw[...] = 1
        assert (array != 0).all()
