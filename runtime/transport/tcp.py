"""Ranks on different hosts: arrays as frames over TCP.

Each rank proves to the other that it knows the secret of the run; what follows is not encrypted.
"""

from __future__ import annotations

import socket
import time

from autopar.runtime.transport.socket_transport import SocketTransport

SCHEME = "tcp:"

KEEPALIVE = (
    ("TCP_KEEPIDLE", 10),
    ("TCP_KEEPINTVL", 5),
    ("TCP_KEEPCNT", 3),
    ("TCP_USER_TIMEOUT", 25_000),
)
"""Seconds, seconds, count, and milliseconds for what was sent and not acknowledged: a peer whose
host has gone silently is lost after 25 s, whether something is on its way to it or not."""


class TcpTransport(SocketTransport):
    """One rank's end.

    Args:
        rank: whose.
        secret: of the run, the same for all ranks.
        host: address of the interface to listen on.
        advertised: host under which others reach this rank; by default `host`.

    Raises:
        TransportError: the secret is too short.
        OSError: the host is no interface of this machine.
    """

    def __init__(
        self, rank: int, *, secret: bytes, host: str = "127.0.0.1", advertised: str = ""
    ) -> None:
        family, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind(where)
            super().__init__(rank, listener, secret=secret)
        except BaseException:
            listener.close()
            raise
        self._address = f"{SCHEME}{advertised or host}:{listener.getsockname()[1]}"

    @property
    def address(self) -> str:
        """`tcp:host:port`."""
        return self._address

    def _dial(self, address: str, deadline: float) -> socket.socket:
        if not address.startswith(SCHEME):
            raise ValueError("it is no TCP address")
        host, _, port = address.removeprefix(SCHEME).rpartition(":")
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("there is no time left")
        return socket.create_connection((host, int(port)), timeout=left)

    def _tune(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE:
            if hasattr(socket, name):  # not on every system
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
