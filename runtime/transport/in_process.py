"""Ranks of one process: a message is one copy into memory of the receiver.

The copy is needed: a sender may change or give away its array as soon as the send is done.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autopar.errors import TransportError
from autopar.runtime.transport.base import ArraySpec, Request, Transport
from autopar.runtime.transport.buffers import BufferPool, raw_bytes
from autopar.runtime.transport.matching import HostRequest, Mailbox
from autopar.runtime.transport.wire import check_spec, sendable


class InProcessHub:
    """Where the ranks of one process find each other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._members: dict[int, InProcessTransport] = {}

    def transport(self, rank: int) -> InProcessTransport:
        """A new end.

        Raises:
            TransportError: the hub has an end of this rank.
        """
        made = InProcessTransport(self, rank)
        with self._changed:
            if rank in self._members:
                raise TransportError(f"this hub has a rank {rank} already")
            self._members[rank] = made
            self._changed.notify_all()
        return made

    def find(self, ranks: Sequence[int], *, timeout: float) -> list[InProcessTransport]:
        """Wait for ends to be made.

        Raises:
            TransportError: some were not made in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: all(rank in self._members for rank in ranks), timeout)
            absent = [rank for rank in ranks if rank not in self._members]
            if absent:
                names = ", ".join(f"rank {rank}" for rank in absent)
                raise TransportError(f"{names} did not come within {timeout:g} s")
            return [self._members[rank] for rank in ranks]

    def remove(self, rank: int) -> None:
        """Forget an end, so that its rank may be made again."""
        with self._changed:
            self._members.pop(rank, None)


class InProcessTransport(Transport):
    """One rank's end in a hub; made by `InProcessHub.transport`."""

    def __init__(self, hub: InProcessHub, rank: int) -> None:
        self.rank = rank
        self._hub = hub
        self._mailbox = Mailbox(rank)
        self._pool = BufferPool()
        self._lock = threading.Lock()
        self._peers: dict[int, InProcessTransport] = {}
        self._ended = False
        self._closed = False

    @property
    def address(self) -> str:
        """Of no use outside the hub."""
        return f"in-process:{self.rank}"

    @property
    def lent(self) -> int:
        """Received buffers that are still in use."""
        return self._pool.lent

    def connect(self, peers: Mapping[int, str], *, timeout: float) -> None:
        """Find the peers in the hub; they may connect later."""
        self._mailbox.check_all()
        for peer in self._hub.find(sorted(peers), timeout=timeout):
            self.attach(peer)
            peer.attach(self)

    def attach(self, peer: InProcessTransport) -> None:
        """Know a peer; for the hub's transports only."""
        with self._lock:
            self._peers[peer.rank] = peer

    def isend(self, peer: int, tag: int, array: Any) -> Request:
        """Copy into memory of the peer; done at once."""
        target = self._peer(peer)
        spec = sendable(array, peer, tag)
        self._mailbox.check(peer)
        target.deposit(self.rank, tag, spec, array)
        request = HostRequest(peer, tag)
        request.end()
        return request

    def deposit(self, peer: int, tag: int, spec: ArraySpec, source: np.ndarray[Any, Any]) -> None:
        """Take a message from a peer; for the hub's transports only."""
        array = self._pool.take(source.shape, source.dtype)
        np.copyto(raw_bytes(array), raw_bytes(source))
        self._mailbox.deliver(peer, tag, spec, array)

    def irecv(self, peer: int, tag: int, spec: ArraySpec) -> Request:
        """Expect an array."""
        self._peer(peer)
        return self._mailbox.expect(peer, tag, check_spec(spec))

    def _peer(self, peer: int) -> InProcessTransport:
        self._mailbox.check_all()
        with self._lock:
            found = self._peers.get(peer)
        if found is None:
            raise TransportError(f"rank {self.rank} is not connected to rank {peer}")
        return found

    def wait(self, requests: Sequence[Request], *, timeout: float) -> None:
        """Return when all are done."""
        self._mailbox.wait(requests, timeout=timeout)

    def abort(self, reason: str) -> None:
        """Fail everything at all ranks that are connected, however indirectly."""
        self.abort_by(f"rank {self.rank}: {reason}")

    def abort_by(self, why: str) -> None:
        """Abort, and tell the peers; for the hub's transports only."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            peers = list(self._peers.values())
        self._mailbox.fail(f"the transfers of rank {self.rank} were aborted", why)
        for peer in peers:
            peer.abort_by(why)

    def lose(self, peer: int) -> None:
        """A peer was closed; for the hub's transports only."""
        self._mailbox.lose(peer, "it was closed")

    def close(self) -> None:
        """Leave the hub."""
        with self._lock:
            if self._closed:
                return
            self._closed = self._ended = True
            peers = list(self._peers.values())
            self._peers.clear()
        self._mailbox.fail(f"the transport of rank {self.rank} is closed")
        self._hub.remove(self.rank)
        self._pool.clear()
        for peer in peers:
            peer.lose(self.rank)
