"""The NCCL transport over a fake device: the contract, and mutations that the fake must expose."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from autopar.errors import TransportError
from autopar.runtime.transport.base import ArraySpec, Request, Transport
from autopar.runtime.transport.in_process import InProcessHub
from autopar.runtime.transport.nccl import (
    HANGING_VERSIONS,
    CupyBackend,
    NcclTransport,
    loaded_nccl,
)
from tests.runtime.transport.contract import (
    Fabric,
    TransportContract,
    connect_all,
    run_ranks,
    spec_of,
)
from tests.runtime.transport.fake_nccl import FakeArray, FakeBackend, FakeEvent, FakeStream, World

DTYPES = "bool int8 int32 uint16 int64 float16 float32 float64 bfloat16 float8_e4m3fn complex64"

Make = Callable[[int, World], NcclTransport]


def plain(hub: InProcessHub) -> Make:
    return lambda rank, world: NcclTransport(rank, hub.transport(rank), backend=FakeBackend(world))


class NcclFabric:
    """Transports over one fake world; arrays are the fake device's."""

    def __init__(self, seed: int, make: Callable[[InProcessHub], Make] = plain) -> None:
        self.dtypes: Sequence[str] = DTYPES.split()
        self.world = World(seed)
        self.builder = make

    def make(self, count: int) -> list[Transport]:
        build = self.builder(InProcessHub())
        made: list[Transport] = [build(rank, self.world) for rank in range(count)]
        connect_all(made)
        return made

    def from_array(self, transport: Transport, array: np.ndarray[Any, Any]) -> FakeArray:
        made = FakeArray(self.world, array.shape, str(array.dtype))
        made.memory[:] = np.frombuffer(array.tobytes(), np.uint8)
        return made

    def to_array(self, value: Any) -> np.ndarray[Any, Any]:
        assert isinstance(value, FakeArray)
        return value.numpy()

    def kill(self, transport: Transport) -> None:
        assert isinstance(transport, NcclTransport)
        transport._bootstrap.close()

    def lent(self, transport: Transport) -> int:
        assert isinstance(transport, NcclTransport)
        return transport.lent


@pytest.mark.parametrize("seed", [0, 1, 2])
class TestNccl(TransportContract):
    @pytest.fixture
    def fabric(self, seed: int) -> Fabric:
        return NcclFabric(seed)


# --- mutations -----------------------------------------------------------------------------------


class NoEvent(FakeBackend):
    """The receiver does not wait for its stream."""

    def fired(self, event: FakeEvent) -> bool:
        return True


class WrongStream(FakeBackend):
    """Events are recorded on a stream on which nothing runs."""

    def event(self, stream: FakeStream) -> FakeEvent:
        return super().event(self.stream())


class EarlyFree(FakeBackend):
    """The sender's memory is given back before the send has been done."""

    def source(self, array: FakeArray, stream: FakeStream) -> tuple[int, Any]:
        pointer, _ = super().source(array, stream)
        array.memory[:] = 0xDB
        return pointer, None


class HalfCount(FakeBackend):
    """The receiver asks for half of the bytes."""

    def communicator(self, unique_id: bytes, rank: int) -> Any:
        made = super().communicator(unique_id, rank)
        if rank == 1:
            whole = made.recv
            made.recv = lambda p, n, s: whole(p, n // 2, s)  # type: ignore[method-assign, assignment]
        return made


class OtherOrder(NcclTransport):
    """Receives are posted in another order than the sends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.first: list[Any] = []

    def irecv(self, peer: int, tag: int, spec: ArraySpec) -> Request:
        if tag == 0:
            # Posted behind the next one.
            late = _Late()
            self.first.append((late, peer, tag, spec))
            return late
        made = super().irecv(peer, tag, spec)
        for late, *what in self.first:
            late.inner = super().irecv(*what)
        self.first.clear()
        return made

    def wait(self, requests: Sequence[Request], *, timeout: float) -> None:
        super().wait([r.inner if isinstance(r, _Late) else r for r in requests], timeout=timeout)


class _Late(Request):
    inner: Any = None

    def done(self) -> bool:
        return bool(self.inner.done())

    def result(self) -> Any:
        return self.inner.result()


def with_backend(backend: type[FakeBackend]) -> Callable[[InProcessHub], Make]:
    return lambda hub: (
        lambda rank, world: NcclTransport(rank, hub.transport(rank), backend=backend(world))
    )


def with_other_order(hub: InProcessHub) -> Make:
    return lambda rank, world: OtherOrder(rank, hub.transport(rank), backend=FakeBackend(world))


def exchange(fabric: NcclFabric) -> bool:
    """Two arrays of different sizes from rank 0 to 1: whether they arrive as they were."""
    arrays = [np.arange(1000, dtype=np.int32), np.arange(70, dtype=np.float32) + 5]
    pair = fabric.make(2)
    patience = 1.0

    def sends(transport: Transport) -> None:
        requests = [
            transport.isend(1, tag, fabric.from_array(transport, array))
            for tag, array in enumerate(arrays)
        ]
        transport.wait(requests, timeout=patience)

    def receives(transport: Transport) -> list[np.ndarray[Any, Any]]:
        requests = [transport.irecv(0, tag, spec_of(array)) for tag, array in enumerate(arrays)]
        transport.wait(requests, timeout=patience)
        return [fabric.to_array(request.result()) for request in requests]

    try:
        _, got = run_ranks(pair, sends, receives)
    except TransportError:
        return False
    finally:
        for transport in pair:
            transport.close()
    return all(a.tobytes() == b.tobytes() for a, b in zip(arrays, got, strict=True))


MUTATIONS = {
    "late stream": with_backend(NoEvent),
    "event on the wrong stream": with_backend(WrongStream),
    "early free": with_backend(EarlyFree),
    "wrong count": with_backend(HalfCount),
    "wrong order": with_other_order,
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_fake_exposes_mutations(name: str) -> None:
    assert all(exchange(NcclFabric(seed)) for seed in range(3))
    assert not all(exchange(NcclFabric(seed, MUTATIONS[name])) for seed in range(3))


def test_another_message_than_expected_names_both() -> None:
    fabric = NcclFabric(0)
    pair = fabric.make(2)

    def sends(transport: Transport) -> None:
        array = fabric.from_array(transport, np.zeros((4,), np.float32))
        transport.wait([transport.isend(1, 3, array)], timeout=5.0)

    def receives(transport: Transport) -> None:
        request = transport.irecv(0, 3, ArraySpec((2, 2), "int32"))
        with pytest.raises(TransportError) as caught:
            transport.wait([request], timeout=5.0)
        assert "float32[4]" in str(caught.value)
        assert "int32[2, 2]" in str(caught.value)

    run_ranks(pair, sends, receives)
    for transport in pair:
        transport.close()


def test_two_builds_of_nccl_are_seen() -> None:
    maps = "7f r-xp 0 0 1 /a/libnccl.so.2\n7f r-xp 0 0 1 /a/libnccl.so.2\n7f r 0 0 2 /b/libnccl.so"
    assert loaded_nccl(maps) == ["/a/libnccl.so.2", "/b/libnccl.so"]
    assert loaded_nccl("7f r-xp 0 0 1 /lib/libc.so") == []


def test_versions_that_hang_name_one_that_does_not() -> None:
    assert HANGING_VERSIONS[23007] == "2.31.2"


def test_without_cupy_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(TransportError, match=r"autopar\[gpu\]"):
        CupyBackend()


@pytest.mark.skipif(
    "AUTOPAR_GPU_TESTS" not in os.environ,
    reason="needs two CUDA devices: AUTOPAR_GPU_TESTS=1 (docs/gpu.md); never run on hardware yet",
)
def test_on_two_gpus() -> None:
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415

    devices = jax.local_devices(backend="gpu")[:2]
    hub = InProcessHub()
    pair: list[Transport] = [
        NcclTransport(rank, hub.transport(rank), device=device)
        for rank, device in enumerate(devices)
    ]
    connect_all(pair)
    for dtype in ("float32", "bfloat16", "int8"):
        sent = jax.device_put(jnp.arange(1 << 20).astype(dtype), devices[0])

        def sends(transport: Transport, array: Any = sent) -> None:
            transport.wait([transport.isend(1, 1, array)], timeout=20.0)

        def receives(transport: Transport, array: Any = sent) -> Any:
            request = transport.irecv(0, 1, ArraySpec(array.shape, str(array.dtype)))
            transport.wait([request], timeout=20.0)
            return request.result()

        _, got = run_ranks(pair, sends, receives)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(sent))
    for transport in pair:
        transport.close()
