"""Matches what arrives at one rank with what it expects, and wakes who waits.

The mailbox of a rank is shared by the thread that posts operations and the thread that moves bytes.
It knows nothing of how bytes move: a transport tells it `deliver`, `complete`, `lose` and `fail`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.errors import TransportError
from autopar.runtime.transport.base import ArraySpec, Request

Array = np.ndarray[Any, Any]
Key = tuple[int, int]

TAGS_SHOWN = 8
"""Tags that an error lists of one peer."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why requests failed; an error of its own is made for each raise."""

    what: str
    got: str = ""
    why: str = ""

    def error(self, where: str = "") -> TransportError:
        """The error to raise."""
        return TransportError(self.what, where=where, got=self.got, why=self.why)


class HostRequest(Request):
    """A send or a receive of a rank whose arrays lie in host memory.

    Attributes:
        sends: whether it is a send.
        peer, tag: of the message.
        spec: what a receive expects.
    """

    __slots__ = ("_done", "_failure", "_value", "peer", "sends", "spec", "tag")

    def __init__(self, peer: int, tag: int, spec: ArraySpec | None = None) -> None:
        self.sends = spec is None
        self.peer = peer
        self.tag = tag
        self.spec = spec
        self._value: Array | None = None
        self._failure: Failure | None = None
        self._done = False

    @property
    def failure(self) -> Failure | None:
        """Why it failed, if it did."""
        return self._failure

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done

    def result(self) -> Any:
        """The received array; None for a send."""
        if self._failure is not None:
            raise self._failure.error(where=missing([self]))
        if not self._done:
            raise TransportError("a transfer has no result yet", where=missing([self]))
        return self._value

    def end(self, value: Array | None = None, failure: Failure | None = None) -> None:
        """Set the outcome; for the mailbox only."""
        if not self._done:
            self._value, self._failure = value, failure
            self._done = True


def missing(requests: Iterable[HostRequest]) -> str:
    """Peers and tags of requests, such as `from rank 0: tags 4, 9; to rank 2: tag 1`."""
    tags: dict[tuple[bool, int], list[int]] = {}
    for request in requests:
        tags.setdefault((request.sends, request.peer), []).append(request.tag)
    texts = []
    for (sends, peer), found in tags.items():
        shown = ", ".join(map(str, found[:TAGS_SHOWN]))
        more = f" and {len(found) - TAGS_SHOWN} more" if len(found) > TAGS_SHOWN else ""
        word = "tag" if len(found) == 1 else "tags"
        texts.append(f"{'to' if sends else 'from'} rank {peer}: {word} {shown}{more}")
    return "; ".join(texts)


def shown(spec: ArraySpec) -> str:
    """A spec for people: `float32[2,3]`."""
    return f"{spec.dtype}[{','.join(map(str, spec.shape))}]"


class Mailbox:
    """What one rank expects and what has arrived; safe to use from any thread.

    Args:
        rank: whose it is.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._changed = threading.Condition()
        self._expected: dict[Key, deque[HostRequest]] = {}
        self._arrived: dict[Key, deque[tuple[ArraySpec, Array]]] = {}
        self._sends: dict[int, dict[HostRequest, None]] = {}
        self._lost: dict[int, Failure] = {}
        self._failure: Failure | None = None

    def check(self, peer: int) -> None:
        """Raise if everything has failed, or if `peer` is gone."""
        failure = self._failure or self._lost.get(peer)
        if failure is not None:
            raise failure.error()

    def check_all(self) -> None:
        """Raise if everything has failed."""
        if self._failure is not None:
            raise self._failure.error()

    def expect(self, peer: int, tag: int, spec: ArraySpec) -> HostRequest:
        """A receive; ends at once if its message has arrived, or if none can come any more.

        Raises:
            TransportError: everything has failed.
        """
        request = HostRequest(peer, tag, spec)
        with self._changed:
            self.check_all()
            arrived = self._arrived.get((peer, tag))
            if arrived:
                came, array = arrived.popleft()
                if not arrived:
                    del self._arrived[peer, tag]
                self._match(request, came, array)
            elif peer in self._lost:
                request.end(failure=self._lost[peer])
            else:
                self._expected.setdefault((peer, tag), deque()).append(request)
        return request

    def deliver(self, peer: int, tag: int, came: ArraySpec, array: Array) -> None:
        """A message has come; it is dropped if everything has failed."""
        with self._changed:
            if self._failure is not None:
                return
            expected = self._expected.get((peer, tag))
            if not expected:
                self._arrived.setdefault((peer, tag), deque()).append((came, array))
                return
            request = expected.popleft()
            if not expected:
                del self._expected[peer, tag]
            self._match(request, came, array)
            self._changed.notify_all()

    def _match(self, request: HostRequest, came: ArraySpec, array: Array) -> None:
        assert request.spec is not None
        if came == request.spec:
            request.end(array)
            return
        what = (
            f"rank {self.rank} did not expect what came from rank {request.peer} "
            f"under tag {request.tag}"
        )
        why = f"{shown(request.spec)} was expected"
        request.end(failure=Failure(what, got=shown(came), why=why))

    def sending(self, request: HostRequest) -> None:
        """A send is under way until `complete`; it fails at once if its peer is gone."""
        with self._changed:
            failure = self._failure or self._lost.get(request.peer)
            if failure is not None:
                request.end(failure=failure)
            else:
                self._sends.setdefault(request.peer, {})[request] = None

    def complete(self, request: HostRequest) -> None:
        """A send has ended: its array may change."""
        with self._changed:
            self._sends.get(request.peer, {}).pop(request, None)
            request.end()
            self._changed.notify_all()

    def lose(self, peer: int, why: str) -> None:
        """A peer is gone: nothing more will come from it or go to it."""
        failure = Failure(f"rank {self.rank} lost rank {peer}", why=why)
        with self._changed:
            if peer in self._lost:
                return
            self._lost[peer] = failure
            for key in [key for key in self._expected if key[0] == peer]:
                for request in self._expected.pop(key):
                    request.end(failure=failure)
            for request in self._sends.pop(peer, {}):
                request.end(failure=failure)
            self._changed.notify_all()

    def lose_sends(self, peer: int, why: str) -> None:
        """Nothing more goes to a peer, though something may still come from it."""
        failure = Failure(f"rank {self.rank} lost rank {peer}", why=why)
        with self._changed:
            for request in self._sends.pop(peer, {}):
                request.end(failure=failure)
            self._changed.notify_all()

    def fail(self, what: str, why: str = "") -> None:
        """Everything ends here: what is under way fails, what had arrived is forgotten.

        The first reason stays, except that a mailbox that failed may still be told it is closed.
        """
        failure = Failure(what, why=why)
        with self._changed:
            self._failure = failure
            waiting = [r for requests in self._expected.values() for r in requests]
            waiting += [r for requests in self._sends.values() for r in requests]
            self._expected.clear()
            self._sends.clear()
            dropped = list(self._arrived.values())
            self._arrived.clear()
            for request in waiting:
                request.end(failure=failure)
            self._changed.notify_all()
        del dropped

    def wait(self, requests: Sequence[Request], *, timeout: float) -> None:
        """As `Transport.wait`."""
        deadline = time.monotonic() + timeout
        own = [request for request in requests if isinstance(request, HostRequest)]
        assert len(own) == len(requests), "requests of another kind of transport"
        pending = own
        with self._changed:
            while True:
                for request in pending:
                    if request.failure is not None:
                        raise request.failure.error(where=missing(_unfinished(own)))
                pending = [request for request in pending if not request.done()]
                if not pending:
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
        raise TransportError(
            f"rank {self.rank} waited {timeout:g} s in vain",
            where=missing(pending),
            why="the peer did not post its side in time, or hangs",
            remedy="look at what the peers named do; a longer timeout if they are only slow",
        )


def _unfinished(requests: Iterable[HostRequest]) -> list[HostRequest]:
    return [r for r in requests if not r.done() or r.failure is not None]
