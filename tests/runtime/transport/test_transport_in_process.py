from __future__ import annotations

import pytest

from autopar.errors import TransportError
from autopar.runtime.transport.base import ArraySpec, Transport
from autopar.runtime.transport.in_process import InProcessHub, InProcessTransport
from tests.runtime.transport.contract import connect_all
from tests.runtime.transport.contract_host import HostFabric, HostTransportContract


class InProcessFabric(HostFabric):
    def make(self, count: int) -> list[Transport]:
        hub = InProcessHub()
        made: list[Transport] = [hub.transport(rank) for rank in range(count)]
        connect_all(made)
        return made

    def lent(self, transport: Transport) -> int:
        assert isinstance(transport, InProcessTransport)
        return transport.lent


class TestInProcess(HostTransportContract):
    @pytest.fixture
    def fabric(self) -> InProcessFabric:
        return InProcessFabric()


def test_a_rank_is_made_once_and_may_be_made_again_after_its_end() -> None:
    hub = InProcessHub()
    first = hub.transport(3)
    with pytest.raises(TransportError, match="rank 3"):
        hub.transport(3)
    first.close()
    hub.transport(3).close()


def test_a_peer_that_does_not_come_is_named() -> None:
    end = InProcessHub().transport(0)
    with pytest.raises(TransportError, match=r"rank 1, rank 2 did not come within 0\.05 s"):
        end.connect({1: "", 2: ""}, timeout=0.05)
    end.close()


def test_an_abort_reaches_ranks_that_are_connected_through_others() -> None:
    hub = InProcessHub()
    chain = [hub.transport(rank) for rank in range(3)]
    chain[0].connect({1: ""}, timeout=1.0)
    chain[1].connect({2: ""}, timeout=1.0)
    request = chain[2].irecv(1, 1, ArraySpec((2,), "int32"))
    chain[0].abort("the first rank stops")
    with pytest.raises(TransportError, match="rank 0: the first rank stops"):
        chain[2].wait([request], timeout=1.0)
    for transport in chain:
        transport.close()
