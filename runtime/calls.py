"""What the driver says to its workers, and the arrays that go with it.

Frames and replies are `control.py`'s; this is the driver's use of them. Nothing here knows what a
step is for, or what to do when a worker does not answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar.errors import WorkerError
from autopar.lower.cross_mesh import source_slice, target_slices
from autopar.lower.instructions import BufferSpec
from autopar.runtime.control import (
    DELETES,
    FAILED,
    FED,
    FIRST_ARRAY_TAG,
    Kind,
    expect_reply,
    frame_size,
    read_reply,
    send_message,
)
from autopar.runtime.peer import Peer
from autopar.runtime.remote_worker import fetch_plan
from autopar.runtime.transfer import message_tag
from autopar.runtime.transport.base import ArraySpec, Request, Transport
from autopar.runtime.transport.buffers import contiguous
from autopar.runtime.watch import Watch

Given = tuple[int, bool, Any]
"""An argument of a step: its handle and whether the step takes it over; or FED and the array."""


class Calls:
    """The driver's side of all conversations.

    Args:
        transport: connected to all workers.
        watch: waits for workers that may be at work.
        timeout: seconds that a wait for a worker that is about to answer may take.

    Attributes:
        sent: bytes of arrays that went to workers.
    """

    def __init__(self, transport: Transport, watch: Watch, timeout: float) -> None:
        self.transport = transport
        self._watch = watch
        self.timeout = timeout
        self.sent = 0

    def tell(self, peer: Peer, kind: Kind, body: Sequence[int]) -> None:
        """Send a message; it has left when this returns."""
        request = send_message(self.transport, peer.rank, kind, body, frame_size(len(peer.feeds)))
        if not request.done():
            self._wait([request])

    def ask(self, peer: Peer, kind: Kind, body: Sequence[int]) -> str:
        """Send a message and wait for the text of its reply.

        Raises:
            WorkerError: the worker refused.
        """
        self.tell(peer, kind, body)
        return self._reply(peer)

    def answer(self, peer: Peer, head: Request) -> str:
        """The text of a reply whose head has come.

        Raises:
            WorkerError: the worker refused.
        """
        status, text = read_reply(self.transport, peer.rank, head, self.timeout)
        if status == FAILED:
            raise WorkerError(json.loads(text)["what"])
        return text

    def expect(self, peer: Peer) -> Request:
        """The head of the next reply, still to come."""
        request: Request = expect_reply(self.transport, peer.rank)
        return request

    def step(self, peer: Peer, number: int, first: int, given: Sequence[Given]) -> None:
        """Begin a step on a worker, and feed it.

        Args:
            number: of the step.
            first: handle of its first result; the others follow.
            given: per feed, in order.
        """
        unwanted = peer.take_unwanted(DELETES)
        handles, taken = [row[0] for row in given], [int(row[1]) for row in given]
        self.tell(peer, Kind.STEP, [number, first, *handles, *taken, *unwanted])
        for place, (handle, _, array) in enumerate(given):
            if handle == FED:
                self._feed(peer, place, array)

    def put(self, peer: Peer, place: int, handle: int, array: Any) -> None:
        """Place a whole array that fits a feed as the worker wants it."""
        self.tell(peer, Kind.PUT, [place, handle])
        self._feed(peer, place, array)
        self._reply(peer)

    def fetch(self, peer: Peer, handle: int, spec: BufferSpec) -> np.ndarray[Any, Any]:
        """A whole array from a worker."""
        plan = fetch_plan(spec, peer.mesh)
        # Expected once it has left: of a refused one nothing comes.
        self.ask(peer, Kind.FETCH, [handle, FIRST_ARRAY_TAG])
        requests = [
            self.transport.irecv(
                peer.rank, message_tag(FIRST_ARRAY_TAG, index), ArraySpec(tile.shape, spec.dtype)
            )
            for index, tile in enumerate(plan.tiles)
        ]
        self._wait(requests)
        whole = np.empty(spec.shape, jnp.dtype(spec.dtype))
        for tile, request in zip(plan.tiles, requests, strict=True):
            whole[target_slices(plan, tile)[0][1]] = request.result()
        return whole

    def delete(self, peer: Peer, handles: Sequence[int]) -> None:
        """Have a worker forget arrays now."""
        for some in _chunks(handles, DELETES):
            self.ask(peer, Kind.DELETE, some)

    def send_hidden(self, rank: int, arrays: Mapping[int, Any], timeout: float) -> None:
        """Closed-over arrays, by index, to a worker that loads its program."""
        requests = [
            self.transport.isend(rank, message_tag(FIRST_ARRAY_TAG, index), contiguous(array))
            for index, array in arrays.items()
        ]
        self.transport.wait(requests, timeout=timeout)

    def _feed(self, peer: Peer, place: int, array: Any) -> None:
        plan = peer.plans[place]
        requests = []
        for index, tile in enumerate(plan.tiles):
            part = contiguous(array[source_slice(plan, tile)])
            self.sent += part.nbytes
            tag = message_tag(FIRST_ARRAY_TAG + 1 + place, index)
            requests.append(self.transport.isend(peer.rank, tag, part))
        self._wait(requests)

    def _reply(self, peer: Peer) -> str:
        head = self.expect(peer)
        self._wait([head])
        return self.answer(peer, head)

    def _wait(self, requests: Sequence[Request]) -> None:
        self._watch.wait(self.transport, requests)


def fitting(spec: BufferSpec, array: Any, number: int) -> np.ndarray[Any, Any]:
    """An argument as a feed takes it; asked before anybody is told of it.

    Raises:
        WorkerError: it is of another shape.
    """
    made = np.asarray(array, dtype=jnp.dtype(spec.dtype))
    if made.shape != spec.shape:
        raise WorkerError(
            "an argument does not fit the plan",
            where=f"argument {number}",
            got=f"{made.dtype}{list(made.shape)}",
            why=f"the plan says {spec.dtype}{list(spec.shape)}",
        )
    return made


def _chunks(handles: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(handles), size):
        yield handles[first : first + size]
