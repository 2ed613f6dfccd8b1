"""The NCCL transport over a fake device: the contract, and what is NCCL's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from autopar.errors import TransportError
from autopar.runtime.transport.base import ArraySpec, Request, Transport
from autopar.runtime.transport.in_process import InProcessHub
from autopar.runtime.transport.nccl import NcclTransport
from autopar.runtime.transport.nccl_messages import ELEMENTS, header
from autopar.runtime.transport.tcp import TcpTransport
from tests.runtime.transport.contract import (
    PATIENCE,
    SHORT,
    Body,
    Fabric,
    TransportContract,
    bits,
    connect_all,
    eventually,
    finish,
    run_ranks,
    spec_of,
)
from tests.runtime.transport.fake_nccl import FakeArray, FakeBackend, World


class NcclFabric:
    """Transports over one fake world, with an in-process bootstrap; arrays are the fake device's.

    Args:
        seed: of the world.
    """

    dtypes: Sequence[str] = tuple(ELEMENTS)

    def __init__(self, seed: int) -> None:
        self.world = World(seed)

    def bootstraps(self, count: int) -> list[Transport]:
        hub = InProcessHub()
        return [hub.transport(rank) for rank in range(count)]

    def make(self, count: int) -> list[Transport]:
        made: list[Transport] = [
            NcclTransport(bootstrap.rank, bootstrap, FakeBackend(self.world))
            for bootstrap in self.bootstraps(count)
        ]
        connect_all(made)
        return made

    def from_array(self, transport: Transport, array: np.ndarray[Any, Any]) -> FakeArray:
        return self.world.computed(array)

    def to_array(self, value: Any) -> np.ndarray[Any, Any]:
        assert isinstance(value, FakeArray)
        return value.numpy()

    def kill(self, transport: Transport) -> None:
        assert isinstance(transport, NcclTransport)
        transport._bootstrap.close()

    def lent(self, transport: Transport) -> int:
        """Transfers under way, and what the fake device has not got back, of all ranks."""
        assert isinstance(transport, NcclTransport)
        return transport.lent + self.world.in_use()


class TcpBootFabric(NcclFabric):
    """The same with TCP as the bootstrap."""

    def bootstraps(self, count: int) -> list[Transport]:
        return [TcpTransport(rank, secret=b"0123456789abcdef" * 2) for rank in range(count)]


@pytest.mark.parametrize("seed", [0, 1, 2])
class TestNccl(TransportContract):
    @pytest.fixture
    def fabric(self, seed: int) -> Fabric:
        return NcclFabric(seed)


class TestNcclOverTcp(TransportContract):
    @pytest.fixture
    def fabric(self) -> Fabric:
        return TcpBootFabric(3)


@pytest.fixture
def fabric() -> NcclFabric:
    return NcclFabric(0)


@pytest.fixture
def pair(fabric: NcclFabric) -> Iterator[list[Transport]]:
    made = fabric.make(2)
    yield made
    for transport in made:
        transport.close()


def test_it_says_what_it_is(pair: list[Transport]) -> None:
    for transport in pair:
        assert not transport.buffered
        assert transport.memory == "device"
        assert transport.address == f"in-process:{transport.rank}"


@pytest.mark.parametrize("seed", range(4))
def test_both_ranks_may_send_first(seed: int) -> None:
    """One group goes on together, so that neither waits for the other."""
    fabric = NcclFabric(seed)
    pair = fabric.make(2)

    def body(transport: Transport) -> list[int]:
        other = 1 - transport.rank
        arrays = [np.full((9,), 10 * transport.rank + tag, np.int32) for tag in range(3)]
        sends = [
            transport.isend(other, tag, fabric.from_array(transport, array))
            for tag, array in enumerate(arrays)
        ]
        receives = [transport.irecv(other, tag, spec_of(arrays[0])) for tag in range(3)]
        finish(transport, *sends, *receives)
        return [int(fabric.to_array(request.result())[8]) for request in receives]

    assert run_ranks(pair, body, body) == [[10, 11, 12], [0, 1, 2]]
    for transport in pair:
        transport.close()


def test_asking_is_enough_to_launch(fabric: NcclFabric, pair: list[Transport]) -> None:
    """A driver of several ranks in one thread never waits; it asks."""
    sent = np.arange(5, dtype=np.float32)
    requests: list[Request] = [
        pair[0].isend(1, 1, fabric.from_array(pair[0], sent)),
        pair[1].irecv(0, 1, spec_of(sent)),
    ]
    for _ in range(10_000):  # each time something happens with some probability
        if all([request.done() for request in requests]):
            break
    assert bits(fabric.to_array(requests[1].result())) == bits(sent)
    assert requests[0].result() is None


def test_a_result_before_its_time(pair: list[Transport]) -> None:
    request = pair[1].irecv(0, 6, ArraySpec((2,), "int32"))
    assert not request.done()
    with pytest.raises(TransportError, match="tag 6"):
        request.result()


@pytest.mark.parametrize(
    "expected", [ArraySpec((2, 2), "int32"), ArraySpec((4,), "int32"), ArraySpec((5,), "float32")]
)
def test_another_message_than_expected_names_both_sides(
    fabric: NcclFabric, pair: list[Transport], expected: ArraySpec
) -> None:
    pair[0].isend(1, 3, fabric.from_array(pair[0], np.zeros((4,), np.float32)))
    request = pair[1].irecv(0, 3, expected)
    with pytest.raises(TransportError) as caught:
        pair[1].wait([request], timeout=PATIENCE)
    text = str(caught.value)
    assert "rank 0 sent float32[4] under tag 3" in text
    assert f"rank 1 expected {expected.dtype}" in text
    with pytest.raises(TransportError, match="float32"):
        pair[1].irecv(0, 4, expected)  # NCCL's order is lost: this pair is of no use any more


def test_another_order_is_seen_where_sizes_agree(fabric: NcclFabric, pair: list[Transport]) -> None:
    for tag in (1, 2):
        pair[0].isend(1, tag, fabric.from_array(pair[0], np.full((3,), tag, np.int32)))
    requests = [pair[1].irecv(0, tag, ArraySpec((3,), "int32")) for tag in (2, 1)]
    with pytest.raises(TransportError, match="one order"):
        pair[1].wait(requests, timeout=PATIENCE)


def test_ranks_that_agree_on_no_order_wait_in_vain(
    fabric: NcclFabric, pair: list[Transport]
) -> None:
    """Each waits for its send to end before it receives."""

    def body(transport: Transport) -> None:
        array = fabric.from_array(transport, np.zeros((2,), np.int32))
        request = transport.isend(1 - transport.rank, 0, array)
        with pytest.raises(TransportError, match="in vain") as caught:
            transport.wait([request], timeout=SHORT)
        assert f"to rank {1 - transport.rank}: tag 0" in str(caught.value)

    run_ranks(pair, body, body)


def test_what_is_not_contiguous_or_cannot_travel_is_refused(
    fabric: NcclFabric, pair: list[Transport]
) -> None:
    array = fabric.from_array(pair[0], np.zeros((4,), np.float32))
    array.contiguous = False
    with pytest.raises(TransportError, match="contiguous"):
        pair[0].isend(1, 0, array)
    with pytest.raises(TransportError, match=r"dtype.*\n.*int4\[8\]"):
        pair[1].irecv(0, 0, ArraySpec((8,), "int4"))
    # Nothing of it was posted.
    sent = np.arange(3, dtype=np.int32)
    assert not pair[0].isend(1, 0, fabric.from_array(pair[0], sent)).done()
    (got,) = finish(pair[1], pair[1].irecv(0, 0, spec_of(sent)))
    assert bits(fabric.to_array(got)) == bits(sent)


def test_a_send_has_not_ended_before_its_partner(fabric: NcclFabric, pair: list[Transport]) -> None:
    request = pair[0].isend(1, 4, fabric.from_array(pair[0], np.zeros((2,), np.int32)))
    with pytest.raises(TransportError, match=r"rank 0 waited 0.2 s in vain") as caught:
        pair[0].wait([request], timeout=SHORT)
    assert "to rank 1: tag 4" in str(caught.value)
    finish(pair[1], pair[1].irecv(0, 4, ArraySpec((2,), "int32")))
    finish(pair[0], request)


def test_what_is_launched_needs_nobody_who_asks(fabric: NcclFabric, pair: list[Transport]) -> None:
    sent = np.arange(4, dtype=np.int32)
    pair[0].isend(1, 4, fabric.from_array(pair[0], sent))
    receive = pair[1].irecv(0, 4, spec_of(sent))
    with pytest.raises(TransportError, match="tag 4"):
        pair[1].wait([receive], timeout=SHORT)
    assert isinstance(pair[0], NcclTransport)
    pair[0].launch()
    assert bits(fabric.to_array(finish(pair[1], receive)[0])) == bits(sent)


def _stuck(fabric: NcclFabric, pair: list[Transport]) -> tuple[Body, threading.Event]:
    """A body of rank 1 whose header has come while its data never will."""
    waiting = threading.Event()
    bootstrap = pair[0]._bootstrap  # type: ignore[attr-defined]

    spec = ArraySpec((2,), "int32")
    bootstrap.isend(1, 8, header(0, 8, spec))

    def body(transport: Transport) -> str:
        request = transport.irecv(0, 8, spec)
        waiting.set()
        with pytest.raises(TransportError) as caught:
            transport.wait([request], timeout=PATIENCE)
        assert request.done()
        return str(caught.value)

    return body, waiting


@pytest.mark.parametrize("how", ["dies", "aborts"])
def test_who_waits_for_the_device_is_woken_too(
    fabric: NcclFabric, pair: list[Transport], how: str
) -> None:
    body, waiting = _stuck(fabric, pair)

    def ends(transport: Transport) -> None:
        assert waiting.wait(PATIENCE)
        time.sleep(SHORT)
        if how == "dies":
            fabric.kill(transport)
        else:
            transport.abort("no memory")

    start = time.monotonic()
    _, text = run_ranks(pair, ends, body)
    assert ("lost rank 0" if how == "dies" else "no memory") in text
    assert time.monotonic() - start < PATIENCE / 4
    assert eventually(lambda: fabric.world.in_use() == 0)


@pytest.mark.parametrize("how", ["dies", "aborts", "aborts here"])
def test_messages_without_bytes_are_woken_too(
    fabric: NcclFabric, pair: list[Transport], how: str
) -> None:
    request = pair[1].irecv(0, 8, ArraySpec((0,), "int32"))
    assert not request.done()
    if how == "dies":
        fabric.kill(pair[0])
    else:
        pair[1 if how == "aborts here" else 0].abort("no memory")
    with pytest.raises(TransportError, match="lost rank 0" if how == "dies" else "no memory"):
        pair[1].wait([request], timeout=PATIENCE)
    with pytest.raises(TransportError):
        request.result()


def test_a_group_that_nccl_refuses_fails_all_that_was_in_it(
    fabric: NcclFabric, pair: list[Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(device: FakeBackend, moves: Sequence[Any]) -> None:
        raise RuntimeError("NCCL_ERROR_INVALID_USAGE")

    array = np.zeros((2,), np.int32)
    requests = [
        pair[0].isend(1, 1, fabric.from_array(pair[0], array)),
        pair[0].irecv(1, 1, spec_of(array)),
    ]
    monkeypatch.setattr(FakeBackend, "launch", refuses)
    for request in requests:
        with pytest.raises(TransportError, match="INVALID_USAGE"):
            pair[0].wait([request], timeout=PATIENCE)
    assert eventually(lambda: fabric.world.in_use() == 0)


def test_nothing_is_given_back_while_it_moves(fabric: NcclFabric, pair: list[Transport]) -> None:
    request = pair[0].isend(1, 1, fabric.from_array(pair[0], np.arange(4, dtype=np.int32)))
    assert not request.done()
    del request
    assert fabric.lent(pair[0]) >= 1
    pair[0].abort("enough")
    assert eventually(lambda: fabric.world.in_use() == 0)


def test_closing_with_something_under_way_does_not_hang(
    fabric: NcclFabric, pair: list[Transport]
) -> None:
    request = pair[1].irecv(0, 1, ArraySpec((2,), "int32"))
    pair[1].close()
    with pytest.raises(TransportError, match="closed"):
        pair[1].wait([request], timeout=PATIENCE)
    with pytest.raises(TransportError, match="closed"):
        pair[1].irecv(0, 1, ArraySpec((2,), "int32"))


def test_a_peer_that_is_not_there() -> None:
    fabric = NcclFabric(0)
    bootstraps = fabric.bootstraps(2)
    alone = NcclTransport(0, bootstraps[0], FakeBackend(fabric.world))
    with pytest.raises(TransportError):
        alone.connect({1: bootstraps[1].address}, timeout=SHORT)
    with pytest.raises(TransportError, match="rank 1"):
        alone.isend(1, 0, fabric.from_array(alone, np.zeros((1,), np.int8)))
    alone.close()
    bootstraps[1].close()
