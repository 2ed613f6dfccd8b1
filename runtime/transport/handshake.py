"""The two sides of the handshake of `wire.py`: one blocks, one is driven by a selector."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass

from autopar.errors import TransportError
from autopar.runtime.transport.wire import (
    ANSWER,
    CHALLENGE,
    HELLO,
    MAGIC,
    NONCE_BYTES,
    Handshake,
)

ACCEPTED, WRONG_SECRET, WRONG_RANK = 1, 2, 3

_REFUSALS = {
    WRONG_SECRET: "it has another secret",
    WRONG_RANK: "it has a connection of this rank already, or is another rank",
}


def dial(sock: socket.socket, *, secret: bytes, rank: int, peer: int, deadline: float) -> None:
    """Greet an acceptor over a connected socket.

    Args:
        sock: blocking; its timeout is changed.
        secret: of the run.
        rank: ours.
        peer: who must be at the other end.
        deadline: by `time.monotonic`.

    Raises:
        TransportError: it is somebody else, or refuses.
        OSError: it said nothing in time, or hung up.
    """
    magic, other, nonce = CHALLENGE.unpack(_exactly(sock, CHALLENGE.size, deadline))
    if magic != MAGIC:
        raise TransportError("who answers is no rank of a run of this version", got=repr(magic))
    if other != peer:
        raise TransportError(f"who answers is rank {other}")
    ours = secrets.token_bytes(NONCE_BYTES)
    shake = Handshake(rank, peer, ours, nonce)
    sock.sendall(HELLO.pack(MAGIC, rank, ours, shake.proof(secret, side=b"dialer")))
    status, proof = ANSWER.unpack(_exactly(sock, ANSWER.size, deadline))
    if status != ACCEPTED:
        raise TransportError(f"it refuses rank {rank}", why=_REFUSALS.get(status, f"{status}"))
    if not shake.proven(secret, proof, side=b"acceptor"):
        raise TransportError("it has another secret")


def _exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("it says nothing")
        sock.settimeout(left)
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionResetError("it hung up")
        data += more
    return data


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a hello.

    Attributes:
        answer: to send back.
        rank: who the dialer has proved to be; None if it is refused.
        why: it is refused.
    """

    answer: bytes
    rank: int | None
    why: str = ""


class Greeting:
    """The acceptor's side, over a non-blocking socket.

    Args:
        sock: just accepted; belongs to the greeting until it is accepted.
        who: the dialer's address, for people.
        secret: of the run.
        rank: ours.
        deadline: by `time.monotonic`.
    """

    def __init__(
        self, sock: socket.socket, who: str, *, secret: bytes, rank: int, deadline: float
    ) -> None:
        self.sock = sock
        self.who = who
        self.deadline = deadline
        self._secret = secret
        self._rank = rank
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._data = b""

    def begin(self) -> None:
        """Send the challenge; it fits into the buffer of a new socket."""
        self.sock.setblocking(False)
        self.sock.send(CHALLENGE.pack(MAGIC, self._rank, self._nonce))

    def advance(self, connected: Collection[int]) -> Verdict | None:
        """Read what has come; None while the hello is not complete.

        Args:
            connected: ranks that cannot connect once more.

        Raises:
            OSError: the dialer hung up.
        """
        more = self.sock.recv(HELLO.size - len(self._data))
        if not more:
            raise ConnectionResetError("it hung up")
        self._data += more
        if len(self._data) < HELLO.size:
            return None
        magic, rank, nonce, proof = HELLO.unpack(self._data)
        if magic != MAGIC:
            return Verdict(b"", None, "it is no rank of a run of this version")
        shake = Handshake(rank, self._rank, nonce, self._nonce)
        status = ACCEPTED
        if not shake.proven(self._secret, proof, side=b"dialer"):
            status = WRONG_SECRET
        elif rank in connected or rank == self._rank:
            status = WRONG_RANK
        if status != ACCEPTED:
            why = f"it says that it is rank {rank}, but {_REFUSALS[status]}"
            return Verdict(ANSWER.pack(status, b""), None, why)
        return Verdict(ANSWER.pack(ACCEPTED, shake.proof(self._secret, side=b"acceptor")), rank)
