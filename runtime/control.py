"""What the driver and a worker tell each other, over the transport that carries the arrays.

A message is two frames: `int64 [2]` with its kind and the length of its body, and the body, int64
or bytes. Nothing but numbers and texts travels, and nothing is unpickled.

| kind   | body                                                       | reply            |
|--------|------------------------------------------------------------|------------------|
| STEP   | step, first result handle, handles of all feeds in order    | status, error    |
|        | (FED: the array follows), then handles to delete             |                  |
| PUT    | feed, handle; the array follows                              | status, error    |
| FETCH  | handle, tag of the array that comes back                     | status, error    |
| DELETE | handles                                                      | status, error    |
| STATS  |                                                            | status, JSON     |
| EVENTS | 1 to begin, 0 to end recording                               | status, JSON     |
| END    |                                                            | none             |
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from autopar.runtime.transport.base import ArraySpec, Transport


class Kind(IntEnum):
    """Of a message."""

    STEP = 1
    PUT = 2
    FETCH = 3
    DELETE = 4
    STATS = 5
    EVENTS = 6
    END = 7


OK, FAILED = 0, 1
"""Status of a reply."""

FED = -1
"""In place of a handle: the array comes over the transport."""

HEAD_TAG, BODY_TAG, REPLY_TAG, TEXT_TAG = 0, 1, 2, 3
"""Tags below those of any array (see runtime.transfer.TILES_PER_TAG)."""

FIRST_ARRAY_TAG = 1
"""Transfer tags of arrays between driver and worker start here."""

_HEAD = ArraySpec((2,), "int64")


def send_message(transport: Transport, peer: int, kind: Kind, body: Any, timeout: float) -> None:
    """Send a message of numbers."""
    numbers = np.ascontiguousarray(body, dtype=np.int64)
    head = np.array([int(kind), numbers.size], dtype=np.int64)
    requests = [transport.isend(peer, HEAD_TAG, head)]
    if numbers.size:
        requests.append(transport.isend(peer, BODY_TAG, numbers))
    transport.wait(requests, timeout=timeout)


def receive_message(
    transport: Transport, peer: int, timeout: float
) -> tuple[Kind, tuple[int, ...]]:
    """Wait for a message of numbers."""
    head = transport.irecv(peer, HEAD_TAG, _HEAD)
    transport.wait([head], timeout=timeout)
    kind, size = (int(number) for number in head.result())
    if not size:
        return Kind(kind), ()
    body = transport.irecv(peer, BODY_TAG, ArraySpec((size,), "int64"))
    transport.wait([body], timeout=timeout)
    return Kind(kind), tuple(int(number) for number in body.result())


def send_reply(transport: Transport, peer: int, status: int, text: str, timeout: float) -> None:
    """Send a status and a text."""
    data = np.frombuffer(text.encode(), dtype=np.uint8)
    head = np.array([status, data.size], dtype=np.int64)
    requests = [transport.isend(peer, REPLY_TAG, head)]
    if data.size:
        requests.append(transport.isend(peer, TEXT_TAG, data))
    transport.wait(requests, timeout=timeout)


def read_reply(transport: Transport, peer: int, head: Any, timeout: float) -> tuple[int, str]:
    """The reply whose head has arrived."""
    status, size = (int(number) for number in head.result())
    if not size:
        return status, ""
    text = transport.irecv(peer, TEXT_TAG, ArraySpec((size,), "uint8"))
    transport.wait([text], timeout=timeout)
    return status, bytes(text.result()).decode()


def expect_reply(transport: Transport, peer: int) -> Any:
    """A request that is done when a reply's head has come."""
    return transport.irecv(peer, REPLY_TAG, _HEAD)
