"""Mistakes that a transport over NCCL can make, each of which the fake device must expose.

Each mutation is a small change of the transport or of its device, and names the case that fails
and how. Without the mutation the same case passes on every seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from autopar.errors import TransportError
from autopar.runtime.transport.base import Transport
from autopar.runtime.transport.in_process import InProcessHub
from autopar.runtime.transport.nccl import NcclTransport
from autopar.runtime.transport.nccl_messages import Payload
from autopar.runtime.transport.nccl_parts import NcclRequest
from tests.runtime.transport.contract import bits, connect_all, run_ranks, spec_of
from tests.runtime.transport.fake_nccl import (
    FakeArray,
    FakeBackend,
    FakeCommunicator,
    FakeStream,
    Flag,
    World,
)

LONG, BRIEF = 15.0, 1.5
"""Seconds to wait for what must come, and with a mutation that may make it never come."""

SEEDS = range(4)

ARRAYS = tuple(np.arange(5000, dtype=np.int32) + 7 * index for index in range(3))


class NoEvent(FakeBackend):
    """Nobody waits for an event."""

    def fired(self, event: Flag) -> bool:
        super().fired(event)
        return True


class WrongStream(FakeBackend):
    """Events are recorded on a stream on which nothing runs."""

    def event(self, stream: FakeStream) -> Flag:
        return super().event(self.stream())


class NoWaitForProducer(FakeBackend):
    """The stream of a send does not wait for what computes the array."""

    def source(self, array: FakeArray, stream: FakeStream) -> tuple[int, Any]:
        return array.pointer, None


class NoGroup(FakeBackend):
    """Each operation is a group of its own."""

    @contextmanager
    def group(self) -> Iterator[None]:
        yield


class _HalfCommunicator(FakeCommunicator):
    def recv(self, what: Payload, stream: FakeStream) -> None:
        super().recv(replace(what, count=(what.count + 1) // 2), stream)


class _BytesCommunicator(FakeCommunicator):
    def recv(self, what: Payload, stream: FakeStream) -> None:
        super().recv(Payload(what.pointer, what.nbytes, "uint8"), stream)


class WrongCount(FakeBackend):
    """The receiver asks for half of the elements."""

    def communicator(self, unique_id: bytes, rank: int) -> FakeCommunicator:
        made = super().communicator(unique_id, rank)
        return _HalfCommunicator(self, made.pair, rank)


class WrongDtype(FakeBackend):
    """The receiver asks for bytes, the sender sends elements."""

    def communicator(self, unique_id: bytes, rank: int) -> FakeCommunicator:
        made = super().communicator(unique_id, rank)
        return _BytesCommunicator(self, made.pair, rank)


class EarlyFree(NcclTransport):
    """The sender's array is not held."""

    def _hold(self, request: NcclRequest, memory: Any) -> None:
        if not request.end.sends:
            super()._hold(request, memory)


class OtherOrder(NcclTransport):
    """One rank gives NCCL what it has posted in the opposite order."""

    def launch(self) -> None:
        with self._posting:
            if self.rank == 1:
                self._queue.reverse()
            super().launch()


class Deaf(NcclTransport):
    """Nobody looks at the headers."""

    def _agree(self, request: NcclRequest, data: Any) -> None:
        request.agreed = True


class OneByOne(NcclTransport):
    """Each operation is launched alone."""

    def launch(self) -> None:
        with self._posting:
            queued, self._queue = self._queue, []
            for item in queued:
                self._queue = [item]
                super().launch()


class EarlyEvent(NcclTransport):
    """Events are recorded before what they are to be behind is launched."""

    def launch(self) -> None:
        with self._posting:
            early = [(r, self._backend.event(r.end.stream)) for r, _ in self._queue]
            super().launch()
            for request, event in early:
                request.event = event


Case = Callable[[list[Transport], World, float], str]


def one_way(pair: list[Transport], world: World, patience: float) -> str:
    """Three arrays from rank 0 to rank 1; empty, or what went wrong."""

    def sends(transport: Transport) -> None:
        requests = [
            transport.isend(1, tag, world.computed(array)) for tag, array in enumerate(ARRAYS)
        ]
        transport.wait(requests, timeout=patience)

    def receives(transport: Transport) -> list[np.ndarray[Any, Any]]:
        requests = [transport.irecv(0, tag, spec_of(array)) for tag, array in enumerate(ARRAYS)]
        transport.wait(requests, timeout=patience)
        return [request.result().numpy() for request in requests]

    got = run_ranks(pair, sends, receives)[1]
    same = all(bits(a) == bits(b) for a, b in zip(ARRAYS, got, strict=True))
    return "" if same else "other data"


def swapped(pair: list[Transport], world: World, patience: float) -> str:
    """Rank 1 posts in another order than rank 0."""

    def sends(transport: Transport) -> None:
        for tag in (0, 1):
            transport.isend(1, tag, world.computed(ARRAYS[tag]))
        assert isinstance(transport, NcclTransport)
        transport.launch()  # may never end

    def receives(transport: Transport) -> list[np.ndarray[Any, Any]]:
        requests = [transport.irecv(0, tag, spec_of(ARRAYS[tag])) for tag in (1, 0)]
        transport.wait(requests, timeout=patience)
        return [request.result().numpy() for request in requests]

    try:
        got = run_ranks(list(reversed(pair)), receives, sends)[0]
    except TransportError as error:
        return "" if "one order" in str(error) else str(error)
    return "" if bits(got[0]) == bits(ARRAYS[1]) else "other data"


def mutual(pair: list[Transport], world: World, patience: float) -> str:
    """Both ranks post a send, then a receive."""

    def body(transport: Transport) -> np.ndarray[Any, Any]:
        other = 1 - transport.rank
        send = transport.isend(other, 0, world.computed(ARRAYS[transport.rank]))
        receive = transport.irecv(other, 0, spec_of(ARRAYS[other]))
        transport.wait([send, receive], timeout=patience)
        got: np.ndarray[Any, Any] = receive.result().numpy()
        return got

    got = run_ranks(pair, body, body)
    return "" if bits(got[0]) == bits(ARRAYS[1]) and bits(got[1]) == bits(ARRAYS[0]) else "other"


@dataclass(frozen=True)
class Mutation:
    """What is changed, the case that it spoils, and what is then seen."""

    case: Case
    seen: str
    transport: type[NcclTransport] = NcclTransport
    backend: type[FakeBackend] = FakeBackend


MUTATIONS = {
    "late stream": Mutation(one_way, "other data", backend=NoEvent),
    "event on the wrong stream": Mutation(one_way, "other data", backend=WrongStream),
    "event before its operation": Mutation(one_way, "other data", transport=EarlyEvent),
    "no wait for the producer": Mutation(one_way, "other data", backend=NoWaitForProducer),
    "early free": Mutation(one_way, "other data", transport=EarlyFree),
    "wrong order": Mutation(one_way, "other data", transport=OtherOrder),
    "headers unread": Mutation(swapped, "other data", transport=Deaf),
    "wrong count": Mutation(one_way, "int32 met", backend=WrongCount),
    "wrong dtype": Mutation(one_way, "int32 met", backend=WrongDtype),
    "no group while connecting": Mutation(mutual, "could not set up", backend=NoGroup),
    "no group": Mutation(mutual, "in vain", transport=OneByOne),
}


def outcome(mutation: Mutation, seed: int, patience: float) -> str:
    """What is seen of one run: nothing, other data, or the text of an error."""
    world = World(seed)
    hub = InProcessHub()
    pair: list[Transport] = [
        mutation.transport(rank, hub.transport(rank), mutation.backend(world)) for rank in (0, 1)
    ]
    try:
        connect_all(pair, timeout=patience)
        return mutation.case(pair, world, patience)
    except TransportError as error:
        return str(error)
    finally:
        for transport in pair:
            transport.abort("over")  # a mutation may have left something under way
            transport.close()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", [one_way, swapped, mutual])
def test_the_transport_as_it_is_passes(case: Case, seed: int) -> None:
    assert outcome(Mutation(case, ""), seed, LONG) == ""


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_fake_exposes_the_mutation(name: str) -> None:
    mutation = MUTATIONS[name]
    found = []
    for seed in SEEDS:
        found.append(outcome(mutation, seed, BRIEF))
        if mutation.seen in found[-1]:
            return
    pytest.fail(f"not seen: {found}")
