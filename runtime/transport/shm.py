"""Ranks of one host: large arrays through shared memory, the rest over a Unix socket.

The sender copies an array once, into a block of an arena (`arena.py`) that the receiver has mapped;
the frame that names the block is the doorbell. The receiver's array lies on the block itself. Small
arrays, and large ones when no shared memory is left, travel as frames over the socket.

The socket is in the abstract namespace and the memory has no name, so nothing needs to be removed.
A dialer must be of the same user, and prove that it knows the secret of the run.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import threading
import time
from typing import Any

import numpy as np

from autopar.errors import TransportError
from autopar.runtime.transport.arena import (
    Arena,
    Arenas,
    MakeMemory,
    anonymous_memory,
    lend_block,
    map_memory,
)
from autopar.runtime.transport.base import ArraySpec
from autopar.runtime.transport.matching import HostRequest
from autopar.runtime.transport.socket_transport import Link, SocketTransport
from autopar.runtime.transport.stream import Stream, nothing_later
from autopar.runtime.transport.wire import Header, Kind, encode

Array = np.ndarray[Any, Any]

SCHEME = "shm:"

CAPACITY = 1 << 30
"""Bytes of shared memory towards one peer; what does not fit goes over the socket."""

PLACED_FROM = 1 << 15
"""Bytes of an array from which a block of shared memory is faster than the socket."""

SOCKET_BUFFER = 1 << 20
"""Bytes that the kernel keeps of what was sent, so that large frames take few turns."""


class _ShmLink(Link):
    """A connection and the shared memory of both directions.

    Attributes:
        arenas: of ours, towards the peer; guarded by `lock`.
        mapped: the peer's arenas by number; for the thread only.
    """

    def __init__(self, peer: int, stream: Stream, arenas: Arenas) -> None:
        super().__init__(peer, stream)
        self.lock = threading.Lock()
        self.arenas = arenas
        self.mapped: dict[int, mmap.mmap] = {}

    def close(self) -> None:
        """Give everything back; arrays that lie on the peer's arenas keep those mapped."""
        super().close()
        self.mapped.clear()
        with self.lock:
            self.arenas.clear()


class ShmTransport(SocketTransport):
    """One rank's end.

    Args:
        rank: whose.
        secret: of the run, the same for all ranks.
        capacity: bytes of shared memory towards each peer.
        make_memory: makes shared memory of a size; returns its file descriptor.

    Raises:
        TransportError: the secret is too short.
    """

    def __init__(
        self,
        rank: int,
        *,
        secret: bytes,
        capacity: int = CAPACITY,
        make_memory: MakeMemory = anonymous_memory,
    ) -> None:
        self._capacity = capacity
        self._make_memory = make_memory
        self._name = f"autopar-{os.getpid()}-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"\0{self._name}")
            super().__init__(rank, listener, secret=secret)
        except BaseException:
            listener.close()
            raise

    @property
    def address(self) -> str:
        """`shm:name`, good on this host only."""
        return f"{SCHEME}{self._name}"

    @property
    def lent(self) -> int:
        """Blocks towards peers, and buffers of ours, that are still in use."""
        with self._changed:
            links = list(self._links.values())
        return super().lent + sum(self._blocks(link) for link in links)

    @staticmethod
    def _blocks(link: Any) -> int:
        with link.lock:
            return int(link.arenas.in_use)

    def _dial(self, address: str, deadline: float) -> socket.socket:
        if not address.startswith(SCHEME):
            raise ValueError("it is no address of shared memory")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(deadline - time.monotonic(), 1e-3))
            sock.connect(f"\0{address.removeprefix(SCHEME)}")
        except OSError as error:
            sock.close()
            if isinstance(error, ConnectionRefusedError):
                raise ConnectionRefusedError("nobody on this host has this address") from error
            raise
        return sock

    def _vet(self, sock: socket.socket) -> str:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        user = struct.unpack("3i", credentials)[1]
        return "" if user == os.geteuid() else f"it is of user {user}"

    def _tune(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)

    def _link(self, peer: int, stream: Stream) -> Link:
        return _ShmLink(peer, stream, Arenas(self._capacity, self._make_memory))

    def _post(self, link: Any, request: HostRequest, source: Array, spec: ArraySpec) -> None:
        block = self._block(link, source.nbytes) if source.nbytes >= PLACED_FROM else None
        if block is None:
            super()._post(link, request, source, spec)
            return
        arena, offset = block
        arena.fill(offset, source)
        header = Header(Kind.PLACED, request.tag, source.nbytes, spec, arena.number, offset)
        self._send(link, [encode(header)], nothing_later)
        request.end()

    def _block(self, link: _ShmLink, size: int) -> tuple[Arena, int] | None:
        """A block for a payload; a new arena is on its way to the peer before its first block."""
        with link.lock:
            found = link.arenas.allocate(size)
            if found is not None:
                return found
            grown = link.arenas.grow(size)
            if grown is None:
                return None
            arena, descriptor = grown
            header = Header(Kind.ARENA, nbytes=arena.size, arena=arena.number)
            self._send(link, [encode(header)], nothing_later, descriptor=descriptor)
            return link.arenas.allocate(size)

    def _attach(self, link: Any, header: Header) -> None:
        if not link.stream.descriptors:
            raise TransportError("shared memory came without its file descriptor")
        descriptor = link.stream.descriptors.popleft()
        try:
            link.mapped[header.arena] = map_memory(descriptor, header.nbytes)
        except (OSError, ValueError) as error:
            raise TransportError("shared memory cannot be mapped", got=str(error)) from error
        finally:
            os.close(descriptor)

    def _placed(self, link: Any, header: Header) -> Array:
        memory = link.mapped.get(header.arena)
        if memory is None:
            raise TransportError("a frame cannot be read", got=f"arena {header.arena}")
        try:
            return lend_block(memory, header.offset, header.nbytes)
        except ValueError as error:
            raise TransportError("a frame cannot be read", got=str(error)) from error
