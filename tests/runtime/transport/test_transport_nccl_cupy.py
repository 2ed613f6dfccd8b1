"""The CuPy back-end: over a stand-in of CuPy on the CPU, and over CuPy where there are GPUs."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from autopar.errors import TransportError
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.lower.cross_mesh import plan_tiles
from autopar.runtime.transfer import Receiver, Sender, named_sharding
from autopar.runtime.transport.base import ArraySpec, Transport
from autopar.runtime.transport.in_process import InProcessHub
from autopar.runtime.transport.nccl import CupyBackend, NcclTransport
from autopar.runtime.transport.nccl_messages import (
    ELEMENTS,
    HANGING_VERSIONS,
    KIND_BYTES,
    check_libraries,
    check_version,
    loaded_nccl,
    payload,
)
from autopar.runtime.transport.nccl_parts import is_row_major
from tests.runtime.transport.contract import (
    ALL_DTYPES,
    Fabric,
    TransportContract,
    connect_all,
    eventually,
    finish,
)
from tests.runtime.transport.fake_cupy import KINDS, SIZES, FakeCuda

WIDE = ("int64", "uint64", "float64", "complex128")


class JaxFabric:
    """Transports whose arrays are JAX's, one device a rank.

    Args:
        devices: of the ranks.
    """

    dtypes: Sequence[str] = tuple(name for name in ELEMENTS if name not in WIDE)

    def __init__(self, devices: Sequence[Any]) -> None:
        self.devices = devices

    def make(self, count: int) -> list[Transport]:
        if count > len(self.devices):
            pytest.skip(f"needs {count} devices")
        hub = InProcessHub()
        made: list[Transport] = [
            NcclTransport(rank, hub.transport(rank), device=self.devices[rank])
            for rank in range(count)
        ]
        connect_all(made)
        return made

    def from_array(self, transport: Transport, array: np.ndarray[Any, Any]) -> Any:
        return jax.block_until_ready(jax.device_put(array, self.devices[transport.rank]))

    def to_array(self, value: Any) -> np.ndarray[Any, Any]:
        assert isinstance(value, jax.Array)
        return np.asarray(value)

    def kill(self, transport: Transport) -> None:
        assert isinstance(transport, NcclTransport)
        transport._bootstrap.close()

    def lent(self, transport: Transport) -> int:
        assert isinstance(transport, NcclTransport)
        return transport.lent


def installed(monkeypatch: pytest.MonkeyPatch, fake: FakeCuda) -> FakeCuda:
    """A fake in the place of CuPy."""
    monkeypatch.setitem(sys.modules, "cupy.cuda", fake.cuda)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", fake.nccl)
    return fake


class TestCupyBackend(TransportContract):
    @pytest.fixture
    def fabric(self, monkeypatch: pytest.MonkeyPatch) -> Fabric:
        installed(monkeypatch, FakeCuda())
        return JaxFabric([jax.devices("cpu")[0]] * 3)


def cuda_devices() -> int:
    """GPUs that CuPy sees and JAX may use."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":  # as tests/conftest.py says
        return 0
    try:
        runtime = importlib.import_module("cupy.cuda").runtime
    except ImportError:
        return 0
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError:
        return 0


@pytest.mark.skipif(
    cuda_devices() < 2, reason="needs CuPy, two GPUs, and --noconftest: see docs/gpu.md"
)
class TestOnGpus(TransportContract):
    """Not yet run on hardware."""

    @pytest.fixture
    def fabric(self) -> Fabric:
        return JaxFabric(jax.local_devices(backend="gpu"))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return installed(monkeypatch, FakeCuda())


@pytest.fixture
def backend(fake: FakeCuda) -> CupyBackend:
    return CupyBackend(jax.devices("cpu")[0])


def test_operations_are_grouped_and_communicators_given_back(fake: FakeCuda) -> None:
    fabric = JaxFabric([jax.devices("cpu")[0]] * 2)
    pair = fabric.make(2)
    fake.calls.clear()
    send = pair[0].isend(1, 0, fabric.from_array(pair[0], np.arange(3, dtype=np.int32)))
    also = pair[0].isend(1, 1, fabric.from_array(pair[0], np.arange(4, dtype=np.int32)))
    receives = [pair[1].irecv(0, tag, ArraySpec((3 + tag,), "int32")) for tag in (0, 1)]
    assert fake.calls == []
    send.done()
    assert [call for call in fake.calls if call.startswith("group")] == ["groupStart", "groupEnd"]
    finish(pair[1], *receives)
    finish(pair[0], send, also)
    assert fake.calls.count("groupStart") == fake.calls.count("groupEnd") == 2
    for transport in pair:
        transport.close()
    assert fake.calls.count("destroy") == 4
    assert fake.calls.count("abort") == 0


def test_ids_as_cupy_told_them_before_14(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, FakeCuda(old=True))
    fabric = JaxFabric([jax.devices("cpu")[0]] * 2)
    pair = fabric.make(2)
    for transport in pair:
        transport.close()


def test_only_row_major_arrays_are_sent(backend: CupyBackend) -> None:
    device = jax.devices("cpu")[0]
    place = Format(Layout((1, 0)), SingleDeviceSharding(device))
    column_major = jax.jit(lambda: jnp.ones((2, 3)), out_shardings=place)().block_until_ready()
    row_major = jax.device_put(np.ones((2, 3), np.float32), device).block_until_ready()
    scalar = jax.device_put(np.float32(1), device).block_until_ready()
    assert [is_row_major(a) for a in (column_major, row_major, scalar)] == [False, True, True]
    stream = backend.stream()
    pointer, _ = backend.source(row_major, stream)
    assert pointer == row_major.unsafe_buffer_pointer()
    with pytest.raises(TransportError, match="contiguous"):
        backend.source(column_major, stream)


def test_an_array_of_another_device_is_copied_and_of_several_refused(backend: CupyBackend) -> None:
    devices = jax.devices("cpu")[:2]
    values = np.arange(4, dtype=np.float32)
    other = jax.device_put(values, devices[1])
    pointer, held = backend.source(other, backend.stream())
    copied = held[0]
    assert copied.devices() == {devices[0]}
    assert pointer == copied.unsafe_buffer_pointer()
    np.testing.assert_array_equal(np.asarray(copied), values)
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    spread = jax.device_put(values, NamedSharding(mesh, PartitionSpec("x")))
    with pytest.raises(TransportError, match="one device"):
        backend.source(spread.block_until_ready(), backend.stream())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_a_sharded_array_goes_from_mesh_to_mesh(fake: FakeCuda, dtype: str) -> None:
    """What a worker does with a transport of device memory: tiles are cut and joined there."""
    one, two = Mesh.of(2), Mesh.of(2)
    name = one.names[0]
    source, target = Sharding(((name,), ())), Sharding(((), (name,)))
    plan = plan_tiles((4, 6), dtype, one, source, two, target)
    here, there = jax.devices("cpu")[:2], jax.devices("cpu")[2:4]
    pair = JaxFabric([here[0], there[0]]).make(2)
    values = (np.arange(24).reshape(4, 6) % 5).astype(jnp.dtype(dtype))
    array = jax.device_put(values, named_sharding(source, one, here)).block_until_ready()
    sends = Sender(plan, here, memory="device").post(pair[0], 1, 7, array)
    receiver = Receiver(plan, there, memory="device")
    receives = receiver.post(pair[1], 0, 7)
    assert eventually(lambda: all([request.done() for request in (*sends, *receives)]))
    joined = receiver.join(receives).block_until_ready()
    assert joined.sharding.device_set == set(there)
    np.testing.assert_array_equal(np.asarray(joined), values)
    for transport in pair:
        transport.close()


def test_new_memory_is_never_the_same_twice(backend: CupyBackend) -> None:
    stream, spec = backend.stream(), ArraySpec((2, 3), "bfloat16")
    made = [backend.empty(spec, stream) for _ in range(3)]
    assert len({pointer for pointer, _ in made}) == 3
    for pointer, array in made:
        assert (array.shape, array.dtype.name) == (spec.shape, spec.dtype)
        assert pointer == array.unsafe_buffer_pointer()
        assert array.devices() == {jax.devices("cpu")[0]}


def test_every_dtype_has_its_size() -> None:
    for name in ALL_DTYPES:
        if name in ("int4", "uint4"):
            with pytest.raises(TransportError, match=name):
                payload(0, ArraySpec((4,), name))
            continue
        assert payload(0, ArraySpec((4, 3), name)).nbytes == 12 * jnp.dtype(name).itemsize, name
    assert {SIZES[KINDS[kind.upper()]] for kind in KIND_BYTES} == {1, 2, 4, 8}
    assert all(SIZES[KINDS[kind.upper()]] == size for kind, size in KIND_BYTES.items())


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="needs CuPy, not a GPU")
def test_the_stand_in_is_like_cupy() -> None:
    nccl = importlib.import_module("cupy.cuda.nccl")
    assert {name: getattr(nccl, f"NCCL_{name}") for name in KINDS} == KINDS
    backend = CupyBackend(jax.devices("cpu")[0])
    backend.check()
    assert len(backend.unique_id()) == 128
    for name in ("send", "recv", "check_async_error", "abort", "destroy"):
        assert callable(getattr(nccl.NcclCommunicator, name))
    assert callable(nccl.groupStart)
    assert callable(nccl.groupEnd)


def test_a_version_that_hangs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HANGING_VERSIONS == {23007: "2.31.2"}
    check_version(23102)
    installed(monkeypatch, FakeCuda(23007))
    hub = InProcessHub()
    with pytest.raises(TransportError, match=r"2\.30\.7 hangs") as caught:
        NcclTransport(0, hub.transport(0), device=jax.devices("cpu")[0])
    assert "2.31.2" in caught.value.remedy


def test_several_builds_of_nccl_are_refused() -> None:
    one = "7f00-7f01 r-xp 00000000 08:01 17 /a b/libnccl.so.2\n"
    other = "7f02-7f03 r--p 00000000 08:01 18 /c/libnccl.so.2.31\n"
    none = "7f04-7f05 rw-p 00000000 00:00 0\n7f r-xp 0 0 1 /lib/libc.so"
    assert loaded_nccl([one, one, other, *none.splitlines()]) == (
        "/a b/libnccl.so.2",
        "/c/libnccl.so.2.31",
    )
    check_libraries([one, one, none])
    with pytest.raises(TransportError, match="several builds") as caught:
        check_libraries([one, other])
    assert "/a b/libnccl.so.2, /c/libnccl.so.2.31" in caught.value.got


def test_without_cupy_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, FakeCuda())  # as if it had been imported before
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(TransportError, match=r"autopar\[gpu\]"):
        CupyBackend(jax.devices("cpu")[0])
