"""What the transports over sockets share: one thread that watches them, and the contract.

Each rank listens from the beginning. Of two ranks the higher one dials; the driver, whose rank is
the lowest, is dialed by all. One thread per rank accepts, reads, and sends what did not go at once.

What comes before it is expected is kept without a bound: that is for the schedule to bound.

A subclass says how to listen and dial, and may take other ways for the bytes of a message.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from autopar.errors import TransportError
from autopar.runtime.transport.base import ArraySpec, Request, Transport
from autopar.runtime.transport.buffers import BufferPool, aligned_bytes, raw_bytes
from autopar.runtime.transport.handshake import dial
from autopar.runtime.transport.matching import HostRequest, Mailbox
from autopar.runtime.transport.reception import House, Reception
from autopar.runtime.transport.stream import Later, Stream, nothing_later
from autopar.runtime.transport.wire import (
    DTYPES,
    MAX_REASON_BYTES,
    Header,
    Kind,
    check_secret,
    check_spec,
    encode,
    sendable,
)

Array = np.ndarray[Any, Any]

LINGER_SECONDS = 0.25
"""How long `close` waits for peers to take what is on its way to them, and to hang up."""


class Link:
    """A connection to a peer.

    Attributes:
        peer: its rank.
        stream: the socket.
        broken: nothing can be sent any more, though something may still come.
        waits: for room to send the rest of something; for the thread.
    """

    def __init__(self, peer: int, stream: Stream) -> None:
        self.peer = peer
        self.stream = stream
        self.broken = False
        self.waits = False

    def close(self) -> None:
        """Give everything back."""
        self.stream.close()


class SocketTransport(Transport):
    """One rank's end; see the module.

    Args:
        rank: whose.
        secret: of the run, the same for all ranks; at least `MIN_SECRET_BYTES`.
        listener: bound, not listening yet.

    Raises:
        TransportError: the secret is too short.
    """

    def __init__(self, rank: int, listener: socket.socket, *, secret: bytes) -> None:
        self.rank = rank
        self._secret = check_secret(secret)
        self._mailbox = Mailbox(rank)
        self._pool = BufferPool()
        self._changed = threading.Condition()
        self._links: dict[int, Link] = {}
        self._ended = self._closed = False
        self._commands: deque[Callable[[], None]] = deque()
        self._open: set[Link] = set()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector = selectors.DefaultSelector()
        house = House(rank, secret, self._objection, lambda: tuple(self._links), self._add)
        self._reception = Reception(house, listener, self._selector)
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain)
        self._linger_until = float("inf")
        self._thread = threading.Thread(
            target=self._watch, name=f"autopar-transport-{rank}", daemon=True
        )
        self._thread.start()

    # What a subclass adds.

    @abstractmethod
    def _dial(self, address: str, deadline: float) -> socket.socket:
        """A connected socket.

        Raises:
            OSError, ValueError: there is none, or the address is of another kind.
        """

    def _vet(self, sock: socket.socket) -> str:
        """Why an accepted socket is refused before anything is said; empty if it is not."""
        return ""

    def _tune(self, sock: socket.socket) -> None:
        """Set options of a new connection."""
        return None

    def _link(self, peer: int, stream: Stream) -> Link:
        """What is known of a new connection."""
        return Link(peer, stream)

    def _post(self, link: Any, request: HostRequest, source: Array, spec: ArraySpec) -> None:
        """Send a message; `request` ends when the array may change."""
        header = Header(Kind.MESSAGE, request.tag, source.nbytes, spec)
        later = partial(self._sending, request)
        if self._send(link, [encode(header), raw_bytes(source)], later):
            request.end()

    def _sending(self, request: HostRequest) -> Callable[[], None]:
        self._mailbox.sending(request)
        return partial(self._mailbox.complete, request)

    def _placed(self, link: Any, header: Header) -> Array:
        """The bytes of a PLACED message: uint8 [nbytes]."""
        raise TransportError("a frame cannot be read", got=header.kind.name)

    def _attach(self, link: Any, header: Header) -> None:
        """Take new shared memory over."""
        raise TransportError("a frame cannot be read", got=header.kind.name)

    def _objection(self, sock: socket.socket) -> str:
        return "this rank has stopped" if self._ended else self._vet(sock)

    # The contract.

    @property
    def lent(self) -> int:
        """Buffers handed out that are still in use."""
        return self._pool.lent

    def connect(self, peers: Mapping[int, str], *, timeout: float) -> None:
        """Dial the lower ranks, wait for the higher ones."""
        deadline = time.monotonic() + timeout
        self._mailbox.check_all()
        for peer in sorted(peers):
            if peer < self.rank and peer not in self._links:
                self._greet(peer, peers[peer], deadline)
        with self._changed:
            while absent := [peer for peer in sorted(peers) if peer not in self._links]:
                self._mailbox.check_all()
                left = deadline - time.monotonic()
                if left <= 0:
                    names = ", ".join(f"rank {peer}" for peer in absent)
                    raise TransportError(
                        f"{names} did not connect to rank {self.rank} within {timeout:g} s",
                        got=self._reception.refusals,
                        remedy="look whether that rank has started, and with the same secret",
                    )
                self._changed.wait(left)

    def _greet(self, peer: int, address: str, deadline: float) -> None:
        sock = None
        try:
            sock = self._dial(address, deadline)
            dial(sock, secret=self._secret, rank=self.rank, peer=peer, deadline=deadline)
        except (OSError, ValueError, TransportError) as error:
            if sock is not None:
                sock.close()
            detail = error if isinstance(error, TransportError) else None
            raise TransportError(
                f"rank {self.rank} cannot connect to rank {peer}",
                where=address,
                got=detail.what if detail else f"{type(error).__name__}: {error}",
                why=detail.why if detail else "",
            ) from error
        self._add(peer, sock)

    def isend(self, peer: int, tag: int, array: Any) -> Request:
        """Start sending."""
        link = self._linked(peer)
        spec = sendable(array, peer, tag)
        if link.broken:
            raise TransportError(f"rank {self.rank} lost rank {peer}", where=f"tag {tag}")
        self._mailbox.check(peer)
        request = HostRequest(peer, tag)
        self._post(link, request, array, spec)
        return request

    def irecv(self, peer: int, tag: int, spec: ArraySpec) -> Request:
        """Expect an array."""
        self._linked(peer)
        return self._mailbox.expect(peer, tag, check_spec(spec))

    def _linked(self, peer: int) -> Link:
        self._mailbox.check_all()
        link = self._links.get(peer)
        if link is None:
            raise TransportError(f"rank {self.rank} is not connected to rank {peer}")
        return link

    def wait(self, requests: Sequence[Request], *, timeout: float) -> None:
        """Return when all are done."""
        self._mailbox.wait(requests, timeout=timeout)

    def abort(self, reason: str) -> None:
        """Fail everything at all ranks that are connected, however indirectly."""
        self._abort(f"rank {self.rank}: {reason}")

    def _abort(self, why: str) -> None:
        with self._changed:
            if self._ended:
                return
            self._ended = True
            links = list(self._links.values())
            self._changed.notify_all()
        self._mailbox.fail(f"the transfers of rank {self.rank} were aborted", why)
        text = why.encode()[:MAX_REASON_BYTES]
        frame = [encode(Header(Kind.ABORT, nbytes=len(text))), text]
        for link in links:
            link.stream.abandon()
            with suppress(TransportError):
                self._send(link, frame, nothing_later)

    def close(self) -> None:
        """Give everything back."""
        with self._changed:
            first, self._closed = not self._closed, True
            self._ended = True
            self._changed.notify_all()
        if first:
            self._mailbox.fail(f"the transport of rank {self.rank} is closed")
            self._command(self._hang_up)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # Sending, from any thread.

    def _send(
        self, link: Link, parts: Sequence[Any], later: Later, *, descriptor: int = -1
    ) -> bool:
        """Send a frame; whether all of it has gone.

        Raises:
            TransportError: the connection is broken.
        """
        try:
            left = link.stream.send(parts, later, descriptor=descriptor)
        except OSError as error:
            self._break(link)
            raise TransportError(
                f"rank {self.rank} lost rank {link.peer}", why=f"{error.strerror or error}"
            ) from error
        if left:
            self._command(partial(self._look_at, link))
        return not left

    def _break(self, link: Link) -> None:
        """Nothing more goes to a peer; the thread finds the end when it has read all that came."""
        link.broken = True
        self._mailbox.lose_sends(link.peer, "the connection was closed")

    def _command(self, action: Callable[[], None]) -> None:
        """Have the thread do something."""
        self._commands.append(action)
        try:
            self._waker.send(b"\0")
        except OSError:
            pass  # it is awake (BlockingIOError), or has ended

    # All that follows runs in the thread.

    def _watch(self) -> None:
        try:
            while not (self._closed and (not self._open or time.monotonic() > self._linger_until)):
                for key, _ in self._selector.select(self._patience()):
                    sock: Any = key.fileobj
                    if sock.fileno() >= 0:  # not closed by an earlier one of the same turn
                        key.data()
                self._reception.tidy()
        except BaseException as error:
            self._mailbox.fail(f"the transport of rank {self.rank} broke down", repr(error))
            raise
        finally:
            self._end()

    def _patience(self) -> float | None:
        end = min(self._linger_until, self._reception.deadline)
        return None if end == float("inf") else max(0.0, end - time.monotonic())

    def _drain(self) -> None:
        try:
            while self._woken.recv(4096):
                pass
        except BlockingIOError:
            pass
        while self._commands:
            self._commands.popleft()()

    def _add(self, peer: int, sock: socket.socket) -> None:
        """Begin with a new connection; the one method here that `connect` calls too."""
        link: Link
        self._tune(sock)
        stream = Stream(sock, self._allocate, lambda header, body: self._take(link, header, body))
        link = self._link(peer, stream)
        with self._changed:
            if not self._ended:
                self._links[peer] = link
                self._command(partial(self._open_link, link))
                self._changed.notify_all()
                return
        link.close()

    def _open_link(self, link: Link) -> None:
        self._open.add(link)
        self._selector.register(link.stream.sock, selectors.EVENT_READ, partial(self._serve, link))
        self._look_at(link)

    def _look_at(self, link: Link) -> None:
        """Send what is left to be sent, and watch for room if something stays."""
        if link not in self._open:
            return
        events = selectors.EVENT_READ
        try:
            if not link.broken and not link.stream.flush():
                events |= selectors.EVENT_WRITE
        except OSError:
            self._break(link)
        if self._closed and not events & selectors.EVENT_WRITE:
            _shut_down(link)
        waits = bool(events & selectors.EVENT_WRITE)
        if waits != link.waits:
            link.waits = waits
            self._selector.modify(link.stream.sock, events, partial(self._serve, link))

    def _serve(self, link: Link) -> None:
        try:
            alive, why = link.stream.pump(), "it closed the connection, or died"
        except OSError as error:
            alive, why = False, f"the connection broke: {error}"
        except TransportError as error:
            alive, why = False, f"{error.what}: {error.got}"
        except MemoryError:
            alive, why = False, "there is no memory for what it sent"
        if alive:
            if link.waits:
                self._look_at(link)
            return
        self._mailbox.lose(link.peer, why)
        link.broken = True
        self._drop(link)

    def _drop(self, link: Link) -> None:
        self._open.discard(link)
        self._selector.unregister(link.stream.sock)
        link.close()

    def _allocate(self, header: Header) -> Array:
        if header.kind is Kind.MESSAGE:
            return self._pool.take((header.nbytes,), np.dtype(np.uint8))
        return aligned_bytes(header.nbytes)

    def _take(self, link: Link, header: Header, body: Array | None) -> None:
        if header.kind is Kind.ABORT:
            assert body is not None
            self._abort(body.tobytes().decode(errors="replace"))
        elif header.kind is Kind.ARENA:
            self._attach(link, header)
        else:
            memory = self._placed(link, header) if body is None else body
            array = memory.view(DTYPES[header.spec.dtype]).reshape(header.spec.shape)
            self._mailbox.deliver(link.peer, header.tag, header.spec, array)

    def _hang_up(self) -> None:
        """Nothing more goes out; peers that do the same have taken all that was sent."""
        self._linger_until = time.monotonic() + LINGER_SECONDS
        self._reception.close()
        for link in self._open:
            self._look_at(link)

    def _end(self) -> None:
        self._reception.close()
        for link in list(self._open):
            self._drop(link)
        with self._changed:
            links = list(self._links.values())
        for link in links:
            link.close()
        self._selector.close()
        for sock in (self._woken, self._waker):
            sock.close()
        self._pool.clear()


def _shut_down(link: Link) -> None:
    try:
        link.stream.sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the peer was first
