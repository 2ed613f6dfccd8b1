"""A non-blocking socket that sends what it is given in order and takes frames apart.

Sending is for any thread: what the kernel takes at once goes at once, the rest is kept and flushed
by the thread that watches the socket. Receiving is for that thread alone. Bytes of a body go from
the kernel into their final memory; only headers and small bodies pass through a buffer.
"""

from __future__ import annotations

import array
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autopar.runtime.transport.wire import PREFIX, Header, decode, header_size

Array = np.ndarray[Any, Any]
Finish = Callable[[], None]
Later = Callable[[], Finish]

BUFFER_BYTES = 1 << 16
"""Of the receive buffer: some hundreds of headers, or the largest body worth a second copy."""

DIRECT_FROM = 1 << 14
"""Missing bytes of a body from which it is received in place rather than through the buffer."""

READS_AT_ONCE = 64
"""Reads of one socket before the others get their turn."""

ANCILLARY_BYTES = 64
"""For the file descriptors that come with one read, which are one at a time."""


def nothing() -> None:
    """Do nothing when a frame has been sent."""


def nothing_later() -> Finish:
    """Have nothing done when a frame has been sent."""
    return nothing


class _Outgoing:
    """What is still to be sent of one frame."""

    __slots__ = ("descriptor", "finish", "parts", "started")

    def __init__(self, parts: Sequence[Any], descriptor: int) -> None:
        self.parts = [memoryview(part) for part in parts if len(part)]
        self.descriptor = descriptor
        self.finish: Finish = nothing
        self.started = False

    def drop_descriptor(self) -> None:
        """It was sent, or will not be."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def advance(self, count: int) -> None:
        """Forget `count` bytes that were sent, and the descriptor that went with the first."""
        self.started = True
        self.drop_descriptor()
        gone = 0
        while gone < len(self.parts) and count >= len(self.parts[gone]):
            count -= len(self.parts[gone])
            gone += 1
        del self.parts[:gone]
        if count:
            self.parts[0] = self.parts[0][count:]


class Stream:
    """One connected socket.

    Args:
        sock: connected; becomes non-blocking and belongs to the stream.
        allocate: the memory for the body of a frame (uint8), when its header is known.
        take: a whole frame: its header, and the memory of its body or None if it has none.

    Attributes:
        descriptors: received and not yet taken, in order of arrival.
    """

    def __init__(
        self,
        sock: socket.socket,
        allocate: Callable[[Header], Array],
        take: Callable[[Header, Array | None], None],
    ) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.descriptors: deque[int] = deque()
        self._passes_descriptors = sock.family == socket.AF_UNIX
        self._allocate = allocate
        self._take = take
        self._lock = threading.Lock()
        self._out: deque[_Outgoing] = deque()
        self._buffer = bytearray(BUFFER_BYTES)
        self._buffer_view = memoryview(self._buffer)
        self._first = self._end = 0
        self._header: Header | None = None
        self._body: Array | None = None
        self._missing: memoryview = memoryview(b"")

    # Sending.

    def send(self, parts: Sequence[Any], later: Later, *, descriptor: int = -1) -> bool:
        """Send the parts of a frame one after the other.

        Args:
            parts: objects with a buffer of bytes; they must not change before the end.
            later: called only if something is left; what it returns is called when the kernel has
                all of the frame.
            descriptor: of a file, to travel with the first byte; the stream closes it.

        Returns:
            Whether something is left for `flush`.

        Raises:
            OSError: the connection is broken.
        """
        item = _Outgoing(parts, descriptor)
        with self._lock:
            if self.sock.fileno() < 0:
                item.drop_descriptor()
                raise ConnectionResetError("the connection is closed")
            try:
                if not self._out and self._send_all(item):
                    return False
            except OSError:
                item.drop_descriptor()
                raise
            item.finish = later()
            self._out.append(item)
            return True

    def flush(self) -> bool:
        """Send what is left, as far as the kernel takes it; whether nothing is left.

        Raises:
            OSError: the connection is broken.
        """
        with self._lock:
            return self._flush()

    def _flush(self) -> bool:
        while self._out:
            item = self._out[0]
            if not self._send_all(item):
                return False
            self._out.popleft()
            item.finish()
        return True

    def _send_all(self, item: _Outgoing) -> bool:
        while item.parts:
            try:
                item.advance(self._send_some(item))
            except (BlockingIOError, InterruptedError):
                return False
        return True

    def _send_some(self, item: _Outgoing) -> int:
        if item.descriptor < 0:
            return self.sock.sendmsg(item.parts)
        carried = array.array("i", [item.descriptor])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, carried)]
        return self.sock.sendmsg(item.parts, rights)

    def abandon(self) -> None:
        """Forget all frames that were not begun."""
        with self._lock:
            while self._out and not self._out[-1].started:
                self._out.pop().drop_descriptor()

    # Receiving.

    def pump(self) -> bool:
        """Read what has come; False if nothing more will.

        Raises:
            OSError: the connection is broken.
            TransportError: what came cannot be read.
        """
        for _ in range(READS_AT_ONCE):
            direct = len(self._missing) >= DIRECT_FROM and self._first == self._end
            try:
                if direct:
                    room = len(self._missing)
                    count = self.sock.recv_into(self._missing)
                else:
                    self._make_room()
                    room = BUFFER_BYTES - self._end
                    count = self._receive(self._buffer_view[self._end :])
            except (BlockingIOError, InterruptedError):
                return True
            if count == 0:
                return False
            if direct:
                self._fill(count)
            else:
                self._end += count
                self._parse()
            if count < room:
                return True  # there is no more, or it has to be read apart
        return True

    def _make_room(self) -> None:
        if self._first:  # at most the beginning of a header is moved
            left = self._buffer[self._first : self._end]
            self._buffer[: len(left)] = left
            self._first, self._end = 0, len(left)

    def _receive(self, room: memoryview) -> int:
        if not self._passes_descriptors:
            return self.sock.recv_into(room)
        flags = socket.MSG_CMSG_CLOEXEC
        count, ancillary, _, _ = self.sock.recvmsg_into([room], ANCILLARY_BYTES, flags)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found = array.array("i")
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
                self.descriptors.extend(found)
        return count

    def _parse(self) -> None:
        while self._first < self._end:
            if self._header is not None:
                count = min(len(self._missing), self._end - self._first)
                self._missing[:count] = self._buffer_view[self._first : self._first + count]
                self._first += count
                self._fill(count)
            elif not self._begin():
                return

    def _begin(self) -> bool:
        """Read a header, if all of it is in the buffer."""
        there = self._end - self._first
        if there < PREFIX.size:
            return False
        size = header_size(self._buffer[self._first : self._first + PREFIX.size])
        if there < size:
            return False
        header = decode(self._buffer[self._first : self._first + size])
        self._first += size
        if header.has_body:
            self._header, self._body = header, self._allocate(header)
            self._missing = self._body.data
            self._fill(0)
        else:
            self._take(header, None)
        return True

    def _fill(self, count: int) -> None:
        self._missing = self._missing[count:]
        if len(self._missing) == 0:
            header, body = self._header, self._body
            self._forget()
            assert header is not None
            self._take(header, body)

    def close(self) -> None:
        """Close the socket, and descriptors that nobody took."""
        with self._lock:  # else a sender might meet the number of another file
            self.sock.close()
            while self._out:
                self._out.popleft().drop_descriptor()
        while self.descriptors:
            os.close(self.descriptors.popleft())
        self._forget()

    def _forget(self) -> None:
        # A view would keep the memory of the body lent.
        self._header = self._body = None
        self._missing = memoryview(b"")
