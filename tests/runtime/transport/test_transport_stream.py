"""Frames arrive whole however the kernel cuts them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from autopar.runtime.transport.base import ArraySpec
from autopar.runtime.transport.stream import Finish, Stream, nothing_later
from autopar.runtime.transport.wire import Header, Kind, encode
from tests.runtime.transport.contract import nothing_left

Frame = tuple[Header, bytes | None]


class Ends:
    """A stream and a plain socket that it is connected to."""

    def __init__(self) -> None:
        sock, self.plain = socket.socketpair()
        self.taken: list[Frame] = []
        self.stream = Stream(sock, self._allocate, self._take)

    def _allocate(self, header: Header) -> np.ndarray[Any, Any]:
        return np.zeros(header.nbytes, np.uint8)

    def _take(self, header: Header, body: np.ndarray[Any, Any] | None) -> None:
        self.taken.append((header, None if body is None else body.tobytes()))

    def drain(self) -> bytes:
        data = b""
        self.plain.setblocking(False)
        while True:
            try:
                data += self.plain.recv(1 << 20)
            except BlockingIOError:
                return data


@pytest.fixture
def ends() -> Iterator[Ends]:
    with nothing_left():
        made = Ends()
        yield made
        made.stream.close()
        made.plain.close()


def frames(rng: np.random.Generator) -> list[Frame]:
    made: list[Frame] = []
    for tag, size in enumerate((0, 1, 3, 100, 20_000, 0, 70_000, 5)):
        spec = ArraySpec((1,) * (tag % 4) + (size,), "int8")
        made.append((Header(Kind.MESSAGE, tag, size, spec), rng.bytes(size)))
        placed = Header(Kind.PLACED, tag, 2, ArraySpec((2,), "int8"), tag, 64 * tag)
        made.append((placed, None))
    made.append((Header(Kind.ABORT, nbytes=4), b"over"))
    return made


@pytest.mark.parametrize("seed", range(6))
def test_frames_in_pieces_of_any_size(ends: Ends, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sent = frames(rng)
    data = b"".join(encode(header) + (body or b"") for header, body in sent)
    most = (1, 7, 60, 1000, 30_000, 1 << 20)[seed]
    if most == 1:
        data = data[:3000]  # byte by byte, as far as it takes a reasonable time
    at = 0
    while at < len(data):
        piece = data[at : at + int(rng.integers(1, most + 1))]
        ends.plain.sendall(piece)
        at += len(piece)
        assert ends.stream.pump()
    while most > 1 and len(ends.taken) < len(sent):
        assert ends.stream.pump()
    assert ends.taken == sent[: len(ends.taken)]
    assert len(ends.taken) >= (8 if most == 1 else len(sent))
    ends.plain.close()
    assert not ends.stream.pump()


def test_what_the_kernel_does_not_take_at_once_goes_in_order(ends: Ends) -> None:
    rng = np.random.default_rng(9)
    parts = [rng.bytes(size) for size in (10, 1 << 20, 0, 5, 1 << 19, 1)]
    finished: list[int] = []

    def later(index: int) -> Finish:
        return lambda: finished.append(index)

    left = [
        ends.stream.send([part[:3], part[3:]], partial(later, index))
        for index, part in enumerate(parts)
    ]
    assert left == [False, True, True, True, True, True]
    assert finished == []
    got = b""
    while not ends.stream.flush():
        got += ends.drain()
    got += ends.drain()
    assert got == b"".join(parts)
    assert finished == [1, 2, 3, 4, 5]  # the first went at once


def test_abandoned_frames_are_whole_or_not_begun(ends: Ends) -> None:
    first, second = b"a" * (1 << 20), b"b" * 100
    assert ends.stream.send([first], nothing_later)
    assert ends.stream.send([second], nothing_later)
    ends.stream.abandon()
    assert ends.stream.send([b"c" * 10], nothing_later)
    got = b""
    while not ends.stream.flush():
        got += ends.drain()
    assert got + ends.drain() == first + b"c" * 10


def test_descriptors_are_closed_whether_they_were_sent_or_not(ends: Ends) -> None:
    def memory() -> int:
        return os.memfd_create("test")

    sent = memory()
    ends.stream.send([b"x"], nothing_later, descriptor=sent)
    _, received, _, _ = socket.recv_fds(ends.plain, 10, 4)
    assert os.path.sameopenfile(received[0], received[0])
    os.close(received[0])
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(sent)
    ends.stream.send([b"x" * (1 << 20)], nothing_later)
    abandoned, closed = memory(), memory()
    ends.stream.send([b"x"], nothing_later, descriptor=abandoned)
    ends.stream.abandon()
    ends.stream.send([b"x"], nothing_later, descriptor=closed)
    socket.send_fds(ends.plain, [b"x"], [0, 1])  # received, and taken by nobody
    assert ends.stream.pump()
    ends.stream.close()
    late = memory()
    with pytest.raises(ConnectionError):
        ends.stream.send([b"x"], nothing_later, descriptor=late)
