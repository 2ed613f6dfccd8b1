"""The contract of a transport: arrays from one rank to another, by tag.

A transport belongs to one rank (one worker, or the driver). Its life is

    made -> `address` is known -> `connect` -> isend / irecv / wait, step after step -> `close`

Messages between two ranks are matched by tag; messages of one (peer, tag) arrive in the order they
were sent, and a tag may be used again in the next step. On transports that are `buffered` a send
needs no partner to end; on the others (NCCL) both sides must post their operations in one agreed
order. Nothing that arrives is ever unpickled: a message is a tag, a dtype name, a shape, and bytes.

Every wait has a timeout and names who waits for whom. `abort` wakes every waiter of this rank, and
tells the peers; after it only `close` is allowed. Both may be called twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DRIVER = -1
"""The rank of the driver, which feeds batches and fetches results."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What will arrive.

    Attributes:
        shape: of the array; any size may be 0.
        dtype: numpy or JAX dtype name, such as `float32` or `bfloat16`.
    """

    shape: tuple[int, ...]
    dtype: str


class Request(ABC):
    """A transfer under way."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended; does not block."""

    @abstractmethod
    def result(self) -> Any:
        """The received array (C-contiguous; for a send: None); only after it is done.

        The array is the receiver's: it stays valid as long as it is referenced.

        Raises:
            TransportError: the transfer failed.
        """


class Transport(ABC):
    """One rank's end of all its connections.

    Attributes:
        rank: whose end this is; `DRIVER` or from 0.
        buffered: whether a send ends without its partner.
        memory: `host` (numpy arrays) or `device` (jax.Array on one device).
    """

    rank: int
    buffered: bool = True
    memory: str = "host"

    @property
    @abstractmethod
    def address(self) -> str:
        """Where peers reach this rank; text that may travel anywhere."""

    @abstractmethod
    def connect(self, peers: Mapping[int, str], *, timeout: float) -> None:
        """Connect to `peers` (rank to address); returns when all connections stand both ways.

        Raises:
            TransportError: a peer did not come in time, or has another secret.
        """

    def prepare(self, specs: Iterable[ArraySpec]) -> None:  # noqa: B027 - not all need it
        """Be ready to receive such arrays: nothing is compiled while transfers wait."""

    def launch(self) -> None:  # noqa: B027 - not all need it
        """Begin all that was posted, where posting alone does not: before long work elsewhere."""

    @abstractmethod
    def isend(self, peer: int, tag: int, array: Any) -> Request:
        """Start sending; the array must stay unchanged until the request is done.

        Raises:
            TransportError: the array is not C-contiguous, its dtype cannot travel, or the
                connection is gone.
        """

    @abstractmethod
    def irecv(self, peer: int, tag: int, spec: ArraySpec) -> Request:
        """Expect an array."""

    @abstractmethod
    def wait(self, requests: Sequence[Request], *, timeout: float) -> None:
        """Return when all `requests` are done.

        Raises:
            TransportError: time is up (naming this rank, the peers and the tags that are missing),
                a peer is gone, what came is not what was expected, or the transport was aborted.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Fail everything that is under way, here and at the peers; from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back: sockets, threads, shared memory, files."""
