from __future__ import annotations

import errno

import pytest

from autopar.runtime.transport.arena import MakeMemory, anonymous_memory
from autopar.runtime.transport.base import Transport
from autopar.runtime.transport.shm import CAPACITY, ShmTransport
from tests.runtime.transport.contract import connect_all
from tests.runtime.transport.contract_host import HostFabric, HostTransportContract

SECRET = bytes(range(32))


class ShmFabric(HostFabric):
    def __init__(
        self, capacity: int = CAPACITY, make_memory: MakeMemory = anonymous_memory
    ) -> None:
        self.capacity = capacity
        self.make_memory = make_memory

    def make(self, count: int) -> list[Transport]:
        made: list[Transport] = [
            ShmTransport(rank, secret=SECRET, capacity=self.capacity, make_memory=self.make_memory)
            for rank in range(count)
        ]
        connect_all(made)
        return made

    def lent(self, transport: Transport) -> int:
        assert isinstance(transport, ShmTransport)
        return transport.lent


def no_memory(size: int) -> int:
    raise OSError(errno.ENOSPC, "no space left on device")


class TestShm(HostTransportContract):
    @pytest.fixture
    def fabric(self) -> ShmFabric:
        return ShmFabric()


class TestShmWithLittleMemory(HostTransportContract):
    """Large arrays find no block and share the connection with those that do."""

    @pytest.fixture
    def fabric(self) -> ShmFabric:
        return ShmFabric(capacity=3 << 19)


class TestShmWithoutMemory(HostTransportContract):
    @pytest.fixture
    def fabric(self) -> ShmFabric:
        return ShmFabric(make_memory=no_memory)
