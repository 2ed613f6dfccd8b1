"""What the NCCL transport is made of: the seam to the device, ends of pairs, and requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from autopar.errors import TransportError
from autopar.runtime.transport.base import ArraySpec, Request
from autopar.runtime.transport.matching import HostRequest, missing
from autopar.runtime.transport.nccl_messages import Payload

Result = TypeVar("Result")


class Communicator(Protocol):
    """One directed pair: the sender is rank 0, the receiver rank 1."""

    def send(self, what: Payload, stream: Any) -> None:
        """Queue a send."""

    def recv(self, what: Payload, stream: Any) -> None:
        """Queue a receive."""

    def check(self) -> None:
        """Raise if NCCL has met an error meanwhile; does not block."""

    def abort(self) -> None:
        """End all that is under way; from any thread. Nothing may be queued any more."""

    def close(self) -> None:
        """Give it back; nothing may be under way."""


class NcclBackend(Protocol):
    """Everything of CUDA, CuPy, NCCL and JAX's devices that the transport uses."""

    def check(self) -> None:
        """Raise a TransportError with the remedy on a machine on which this cannot work."""

    def unique_id(self) -> bytes:
        """A new NCCL id."""

    def communicator(self, unique_id: bytes, rank: int) -> Communicator:
        """Join a communicator of two; returns when both have."""

    def group(self) -> AbstractContextManager[None]:
        """Operations queued inside go on together; may block at its end on a first operation."""

    def stream(self) -> Any:
        """A new non-blocking stream."""

    def event(self, stream: Any) -> Any:
        """Record an event behind what the stream has been given so far."""

    def fired(self, event: Any) -> bool:
        """Whether what is before the event has been done; does not block."""

    def source(self, array: Any, stream: Any) -> tuple[int, Any]:
        """Pointer to an array and what must be held besides it; the stream waits for its values.

        Raises:
            TransportError: it is not C-contiguous memory of one device.
        """

    def prepare(self, spec: ArraySpec) -> None:
        """Make `empty` of this spec ready, so that nothing is compiled while transfers wait."""

    def empty(self, spec: ArraySpec, stream: Any) -> tuple[int, Any]:
        """Pointer to new memory, and the array that it will be; the stream may write to it."""

    def close(self) -> None:
        """Give streams back."""


@dataclass(eq=False)
class End:
    """This rank's end of one directed pair.

    Attributes:
        peer: the other rank.
        sends: whether this rank is the sender.
        communicator, stream: of this pair only.
        posted: messages so far, those without bytes included.
    """

    peer: int
    sends: bool
    communicator: Communicator
    stream: Any
    posted: int = 0

    def queue(self, what: Payload) -> None:
        """Give it to NCCL."""
        act = self.communicator.send if self.sends else self.communicator.recv
        act(what, self.stream)


Advance = Callable[["NcclRequest"], None]
"""Looks how far a request is, and notes it there."""


class NcclRequest(Request):
    """A send or a receive: a header on the bootstrap, and an event on the device.

    Attributes:
        end: of which pair.
        tag, spec: of the message.
        number: of the message in its pair.
        header: its way on the bootstrap.
        agreed: whether the header has gone; for a receive: whether it is the expected one.
        moving: whether the device has, or will be given, something to do.
        event: behind what the device does; None before it was launched and after it has fired.
        held: memory that must not be given back meanwhile; what was received.
        failed: why, if it did.
    """

    def __init__(self, advance: Advance, end: End, tag: int, spec: ArraySpec) -> None:
        self._advance, self.end, self.tag, self.spec = advance, end, tag, spec
        self.number = end.posted
        self.header: Request | None = None
        self.agreed = False
        self.moving = False
        self.event: Any = None
        self.held: Any = None
        self.failed: TransportError | None = None

    def ended(self) -> bool:
        """Whether header and data have gone or come."""
        return self.agreed and not self.moving

    def done(self) -> bool:
        """Whether it has ended or failed; launches what is queued."""
        if self.failed is None and not self.ended():
            self._advance(self)
        return self.failed is not None or self.ended()

    def result(self) -> Any:
        """The received array, or None."""
        if self.failed is not None:
            raise self.failed
        if not self.ended():
            raise TransportError("a transfer has no result yet", where=names([self]))
        return None if self.end.sends else self.held


def names(requests: Iterable[NcclRequest]) -> str:
    """Peers and tags for an error."""
    return missing(
        HostRequest(r.end.peer, r.tag, None if r.end.sends else r.spec) for r in requests
    )


def within(deadline: float, what: str, call: Callable[[], Result]) -> Result:
    """What a call returns that cannot be given a timeout; it runs in a thread of its own.

    Raises:
        TransportError: time is up. The thread is left behind, since nothing can end it.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if thread.is_alive():
        raise TransportError(what, why="time is up", remedy="NCCL_DEBUG=INFO shows what it does")
    if errors:
        raise TransportError(what, got=str(errors[0])) from errors[0]
    return results[0]


@dataclass(eq=False)
class Peer:
    """What is known of a peer.

    Attributes:
        watch: a receive that only ends when the peer is gone.
        out, into: the two pairs with it.
        gone_since: second of the monotonic clock at which the watch was seen to have ended.
        dropped: why nothing can be sent or received any more.
    """

    watch: Request
    out: End
    into: End
    gone_since: float = 0.0
    dropped: TransportError | None = None


def as_transport_error(error: Exception, request: NcclRequest) -> TransportError:
    """What a request fails with when the device or its libraries do."""
    if isinstance(error, TransportError):
        return error
    got = f"{type(error).__name__}: {error}"
    made = TransportError("NCCL failed", where=names([request]), got=got)
    made.__cause__ = error
    return made


def is_row_major(array: Any) -> bool:
    """Whether the elements of a JAX array lie in C order."""
    return tuple(array.format.layout.major_to_minor) == tuple(range(array.ndim))


class CupyCommunicator:
    """A communicator of two, by the functions of `cupy.cuda.nccl`.

    Args:
        nccl: that module.
        made: its communicator.
        rank: 0 or 1, as which this one has joined.
    """

    def __init__(self, nccl: Any, made: Any, rank: int) -> None:
        self._kinds, self._made, self._other = nccl, made, 1 - rank

    def send(self, what: Payload, stream: Any) -> None:
        """Queue a send."""
        self._made.send(what.pointer, what.count, self._kind(what), self._other, stream.ptr)

    def recv(self, what: Payload, stream: Any) -> None:
        """Queue a receive."""
        self._made.recv(what.pointer, what.count, self._kind(what), self._other, stream.ptr)

    def _kind(self, what: Payload) -> int:
        return int(getattr(self._kinds, f"NCCL_{what.kind.upper()}"))

    def check(self) -> None:
        """Raise what NCCL has met meanwhile."""
        self._made.check_async_error()

    def abort(self) -> None:
        """End all that is under way."""
        self._made.abort()

    def close(self) -> None:
        """Give it back."""
        self._made.destroy()
