from __future__ import annotations

import pytest

from autopar.runtime.transport.base import Transport
from autopar.runtime.transport.tcp import TcpTransport
from tests.runtime.transport.contract import connect_all
from tests.runtime.transport.contract_host import HostFabric, HostTransportContract

SECRET = bytes(range(32))


class TcpFabric(HostFabric):
    def make(self, count: int) -> list[Transport]:
        made: list[Transport] = [TcpTransport(rank, secret=SECRET) for rank in range(count)]
        connect_all(made)
        return made

    def lent(self, transport: Transport) -> int:
        assert isinstance(transport, TcpTransport)
        return transport.lent


class TestTcp(HostTransportContract):
    @pytest.fixture
    def fabric(self) -> TcpFabric:
        return TcpFabric()
