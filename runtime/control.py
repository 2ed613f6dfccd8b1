"""What the driver and a worker tell each other, over the transport that carries the arrays.

A message is one frame, `int64 [frame_size]`: its kind, the length of its body, the body, and zeros.
The size is the same for all messages to a worker, so that it can be expected before it comes. A
reply is `int64 [2]` with a status and the length of the text that follows, if there is one. Nothing
but numbers and texts travels, and nothing is unpickled.

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

MESSAGE_TAG, REPLY_TAG, TEXT_TAG = 0, 1, 2
"""Tags below those of any array (see runtime.transfer.TILES_PER_TAG)."""

FIRST_ARRAY_TAG = 1
"""Transfer tags of arrays between driver and worker start here."""

DELETES = 64
"""Handles that one message may ask to delete; more wait for the next."""

_HEAD = ArraySpec((2,), "int64")


def frame_size(feeds: int) -> int:
    """Numbers in a message to a worker that is fed so many arrays in a step."""
    return 4 + 2 * feeds + DELETES


def send_message(transport: Transport, peer: int, kind: Kind, body: Any, frame: int) -> Any:
    """Send a message of numbers; the request that is done when it has left."""
    numbers = np.zeros(frame, np.int64)
    numbers[0], numbers[1] = int(kind), len(body)
    numbers[2 : 2 + len(body)] = body
    return transport.isend(peer, MESSAGE_TAG, numbers)


def receive_message(
    transport: Transport, peer: int, frame: int, timeout: float
) -> tuple[Kind, tuple[int, ...]]:
    """Wait for a message of numbers."""
    request = transport.irecv(peer, MESSAGE_TAG, ArraySpec((frame,), "int64"))
    transport.wait([request], timeout=timeout)
    kind, size, *body = request.result().tolist()
    return Kind(kind), tuple(body[:size])


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
