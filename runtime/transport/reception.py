"""Lets ranks of the run in, and sends strangers away, without ever waiting for one of them."""

from __future__ import annotations

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from autopar.runtime.transport.handshake import Greeting

GREETING_SECONDS = 10.0
"""A dialer that has not said who it is by then is sent away."""

MAX_GREETINGS = 256
"""Dialers that have not said who they are yet; more than these are sent away."""

REFUSALS_SHOWN = 8
"""Refused dialers that an error lists."""

BACKLOG = 128


@dataclass(frozen=True, slots=True)
class House:
    """Whom the reception works for.

    Attributes:
        rank: ours.
        secret: of the run.
        vet: why a socket is refused before anything is said; empty if it is not.
        connected: ranks that cannot connect once more.
        admit: takes a rank and its socket, which is off the selector.
    """

    rank: int
    secret: bytes
    vet: Callable[[socket.socket], str]
    connected: Callable[[], Collection[int]]
    admit: Callable[[int, socket.socket], None]


class Reception:
    """Accepts connections; all but `refusals` is for the thread of the selector.

    Args:
        house: whom it works for.
        listener: bound; belongs to the reception.
        selector: its keys carry a callable each.
    """

    def __init__(
        self, house: House, listener: socket.socket, selector: selectors.BaseSelector
    ) -> None:
        self._house = house
        self._listener = listener
        self._selector = selector
        self._greetings: list[Greeting] = []
        self._refusals: deque[str] = deque(maxlen=REFUSALS_SHOWN)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def refusals(self) -> str:
        """Who was refused, and why."""
        return "; ".join(self._refusals)

    @property
    def deadline(self) -> float:
        """When `tidy` has something to do; infinity if never."""
        return min((greeting.deadline for greeting in self._greetings), default=float("inf"))

    def tidy(self) -> None:
        """Send those away who did not say who they are in time."""
        if not self._greetings:
            return
        now = time.monotonic()
        for greeting in [one for one in self._greetings if one.deadline <= now]:
            self._dismiss(greeting, "it did not say who it is")

    def close(self) -> None:
        """Accept nobody any more."""
        if self._listener.fileno() >= 0:
            self._selector.unregister(self._listener)
            self._listener.close()
        for greeting in list(self._greetings):
            self._dismiss(greeting, "this rank was closed")

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the dialer has gone, or there are no descriptors left
            return
        who, reason = _peer_name(sock), self._house.vet(sock)
        if len(self._greetings) >= MAX_GREETINGS:
            reason = "too many others have not said who they are"
        if reason:
            self._refuse(who, reason)
            sock.close()
            return
        house, deadline = self._house, time.monotonic() + GREETING_SECONDS
        greeting = Greeting(sock, who, secret=house.secret, rank=house.rank, deadline=deadline)
        try:
            greeting.begin()
        except OSError:
            sock.close()
            return
        self._greetings.append(greeting)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._answer, greeting))

    def _answer(self, greeting: Greeting) -> None:
        try:
            verdict = greeting.advance(self._house.connected())
            if verdict is None:
                return
            # The dialer sends nothing before it has the answer, so none of its frames is lost.
            if verdict.answer:
                greeting.sock.send(verdict.answer)
        except BlockingIOError:
            return
        except OSError as error:
            self._dismiss(greeting, f"it went away: {error}")
            return
        if verdict.rank is None:
            self._dismiss(greeting, verdict.why)
            return
        self._selector.unregister(greeting.sock)
        self._greetings.remove(greeting)
        self._house.admit(verdict.rank, greeting.sock)

    def _dismiss(self, greeting: Greeting, why: str) -> None:
        self._refuse(greeting.who, why)
        self._greetings.remove(greeting)
        self._selector.unregister(greeting.sock)
        greeting.sock.close()

    def _refuse(self, who: str, why: str) -> None:
        self._refusals.append(f"{who} was refused: {why}")


def _peer_name(sock: socket.socket) -> str:
    if sock.family == socket.AF_UNIX:
        return "a process on this host"
    try:
        host, port, *_ = sock.getpeername()
    except OSError:
        return "somebody who has gone"
    return f"{host}:{port}"
