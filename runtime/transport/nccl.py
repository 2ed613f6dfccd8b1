"""Arrays between GPUs by NCCL, point to point. NOT YET RUN ON HARDWARE: see docs/gpu.md.

Each directed pair of ranks has a communicator and a non-blocking stream of its own, so a send never
waits behind a receive. NCCL has no tags: the n-th send of a pair meets its n-th receive, and both
ranks post in the linearised order of their instruction lists. Beside every message a header with
tag, shape and dtype goes over a host transport, the *bootstrap* (the same that exchanges NCCL's
unique ids); the receiver holds it against what it expects, and a lost peer or an abort is noticed
there, since NCCL itself only hangs.

Nothing is reduced, so everything travels as bytes: no table of dtypes can be wrong. The sender's
array is held until the event behind its send has fired, and a received buffer is handed out only
when its event has. No wait synchronises a stream: events are asked, with a deadline.

All of CUDA is behind `NcclBackend`; tests run this transport over a fake one.
"""

from __future__ import annotations

import importlib
import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import TransportError
from autopar.runtime.transport.base import ArraySpec, Request, Transport

HEADER_BYTES = 256
UNIQUE_ID_BYTES = 128
UNIQUE_ID_TAG = 2**30
"""Tag of the unique ids on the bootstrap: above the tags of any message of a step."""

POLL_SECONDS = 5e-5

HANGING_VERSIONS = {23007: "2.31.2"}
"""Versions of NCCL that are known to hang, and the one that does not."""


class Communicator(Protocol):
    """One directed pair: the sender is rank 0, the receiver rank 1."""

    def send(self, pointer: int, nbytes: int, stream: Any) -> None:
        """Queue a send of so many bytes."""

    def recv(self, pointer: int, nbytes: int, stream: Any) -> None:
        """Queue a receive."""

    def abort(self) -> None:
        """End all that is under way; the communicator is of no use any more."""

    def close(self) -> None:
        """Give it back."""


class NcclBackend(Protocol):
    """Everything of CUDA, CuPy and NCCL that the transport uses."""

    def check(self) -> None:
        """Refuse a machine on which this cannot work.

        Raises:
            TransportError: with the remedy.
        """

    def unique_id(self) -> bytes:
        """A new NCCL id."""

    def communicator(self, unique_id: bytes, rank: int) -> Communicator:
        """Join a communicator of two; returns when both have."""

    def stream(self) -> Any:
        """A new non-blocking stream."""

    def event(self, stream: Any) -> Any:
        """Record an event behind what the stream has been given so far."""

    def fired(self, event: Any) -> bool:
        """Whether what is before the event has been done; does not block."""

    def source(self, array: Any, stream: Any) -> tuple[int, Any]:
        """Pointer to an array, and what must be held; the stream waits until the array is there."""

    def empty(self, spec: ArraySpec) -> tuple[int, Any]:
        """Pointer to new memory, and the buffer."""

    def to_jax(self, buffer: Any, spec: ArraySpec) -> Any:
        """The buffer as an array, without a copy where CuPy knows the dtype."""

    def close(self) -> None:
        """Give streams back."""


class _Request(Request):
    """A send or a receive: a header on the bootstrap, and an event on the device."""

    def __init__(self, peer: int, tag: int, header: Request) -> None:
        self.peer, self.tag, self.header = peer, tag, header
        self.event: Any = None
        self.held: Any = None
        self.backend: NcclBackend | None = None
        self.failed: TransportError | None = None
        self.expected: ArraySpec | None = None
        self.array: Any = None

    def fail(self, error: TransportError) -> None:
        """End with an error, unless it has ended."""
        if not self.done():
            self.failed = error

    def done(self) -> bool:
        """Whether header and data have gone or come, or it failed."""
        if self.failed is not None:
            return True
        return self.header.done() and self.moved()

    def moved(self) -> bool:
        """Whether the device has done its part."""
        if self.event is None:
            return True
        assert self.backend is not None
        if not self.backend.fired(self.event):
            return False
        self.event = None
        if self.expected is None:
            self.held = None
        return True

    def result(self) -> Any:
        """The received array, or None."""
        if self.failed is not None:
            raise self.failed
        found = self.header.result()
        if self.expected is None:
            return None
        if self.array is None:
            _check_header(self, found)
            assert self.backend is not None
            self.array = self.backend.to_jax(self.held, self.expected)
            self.held = None
        return self.array


class NcclTransport(Transport):
    """One rank's end.

    Args:
        rank: whose.
        bootstrap: a host transport of the same rank; this one connects and closes it.
        backend: of the device; None: CuPy's.
        device: JAX's device for what is received, for CuPy's back-end.

    Raises:
        TransportError: NCCL cannot be used here.
    """

    buffered = False
    memory = "device"

    def __init__(
        self,
        rank: int,
        bootstrap: Transport,
        *,
        backend: NcclBackend | None = None,
        device: Any = None,
    ) -> None:
        self.rank = rank
        self._bootstrap = bootstrap
        self._backend = CupyBackend(device) if backend is None else backend
        self._backend.check()
        self._lock = threading.Lock()
        self._out: dict[int, tuple[Communicator, Any]] = {}
        self._in: dict[int, tuple[Communicator, Any]] = {}
        self._under_way: list[_Request] = []
        self._aborted = ""
        self._closed = False

    @property
    def address(self) -> str:
        """The bootstrap's."""
        return self._bootstrap.address

    def connect(self, peers: Mapping[int, str], *, timeout: float) -> None:
        """Connect the bootstrap; then both communicators of each pair, lower ranks first."""
        self._bootstrap.connect(peers, timeout=timeout)
        spec = ArraySpec((UNIQUE_ID_BYTES,), "uint8")
        for peer in sorted(peers):
            # The pair's edges in one order on both sides: joining waits for the other.
            for sender in sorted((self.rank, peer)):
                if sender == self.rank:
                    unique = self._backend.unique_id()
                    data = np.frombuffer(unique, np.uint8).copy()
                    request = self._bootstrap.isend(peer, UNIQUE_ID_TAG, data)
                    self._bootstrap.wait([request], timeout=timeout)
                    joined = self._backend.communicator(unique, 0)
                    self._out[peer] = (joined, self._backend.stream())
                else:
                    request = self._bootstrap.irecv(peer, UNIQUE_ID_TAG, spec)
                    self._bootstrap.wait([request], timeout=timeout)
                    joined = self._backend.communicator(bytes(request.result()), 1)
                    self._in[peer] = (joined, self._backend.stream())

    def isend(self, peer: int, tag: int, array: Any) -> Request:
        """Start sending."""
        communicator, stream = self._end(self._out, peer)
        spec = ArraySpec(tuple(array.shape), str(jnp.dtype(array.dtype)))
        header = np.zeros(HEADER_BYTES, np.uint8)
        text = json.dumps([tag, spec.shape, spec.dtype]).encode()
        if len(text) > HEADER_BYTES:
            raise TransportError("an array has too many dims to travel", got=str(spec))
        header[: len(text)] = np.frombuffer(text, np.uint8)
        request = _Request(peer, tag, self._bootstrap.isend(peer, tag, header))
        nbytes = _nbytes(spec)
        if nbytes:
            pointer, held = self._backend.source(array, stream)
            communicator.send(pointer, nbytes, stream)
            self._follow(request, stream, (array, held))
        return request

    def irecv(self, peer: int, tag: int, spec: ArraySpec) -> Request:
        """Expect an array."""
        communicator, stream = self._end(self._in, peer)
        header = self._bootstrap.irecv(peer, tag, ArraySpec((HEADER_BYTES,), "uint8"))
        request = _Request(peer, tag, header)
        request.expected = spec
        request.backend = self._backend
        pointer, request.held = self._backend.empty(spec)
        nbytes = _nbytes(spec)
        if nbytes:
            communicator.recv(pointer, nbytes, stream)
            self._follow(request, stream, request.held)
        return request

    def _follow(self, request: _Request, stream: Any, held: Any) -> None:
        """Know by an event when the device has done what was queued; hold the memory till then."""
        request.backend = self._backend
        request.held = held
        request.event = self._backend.event(stream)
        with self._lock:
            self._under_way = [r for r in self._under_way if not r.done()]
            self._under_way.append(request)

    def _end(
        self, ends: Mapping[int, tuple[Communicator, Any]], peer: int
    ) -> tuple[Communicator, Any]:
        if self._aborted:
            raise TransportError(
                f"the transfers of rank {self.rank} were aborted", why=self._aborted
            )
        if peer not in ends:
            raise TransportError(f"rank {self.rank} is not connected to rank {peer}")
        return ends[peer]

    def _was_aborted(self) -> TransportError:
        return TransportError(f"the transfers of rank {self.rank} were aborted", why=self._aborted)

    def wait(self, requests: Sequence[Request], *, timeout: float) -> None:
        """Return when all are done."""
        deadline = time.monotonic() + timeout
        mine = [request for request in requests if isinstance(request, _Request)]
        try:
            self._bootstrap.wait([request.header for request in mine], timeout=timeout)
        except TransportError as error:
            for request in mine:
                request.fail(error)
            if "abort" in error.what:
                self._give_up(str(error.why or error.what))
            raise
        while not all(request.moved() or request.failed for request in mine):
            if time.monotonic() > deadline:
                raise self._late(mine, timeout)
            time.sleep(POLL_SECONDS)
        for request in mine:
            if request.failed is not None:
                raise request.failed
            if request.expected is not None:
                request.result()

    def _late(self, requests: Sequence[_Request], timeout: float) -> TransportError:
        late = [request for request in requests if not request.moved()]
        names = ", ".join(
            f"{'from' if r.expected is not None else 'to'} rank {r.peer}: tag {r.tag}" for r in late
        )
        return TransportError(
            f"rank {self.rank} waited {timeout:g} s for its device",
            got=names,
            why="NCCL matches sends and receives by order: both ranks must post in the same one",
        )

    def abort(self, reason: str) -> None:
        """Fail everything under way, here and at the peers."""
        if not self._aborted:
            self._bootstrap.abort(reason)
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        with self._lock:
            if self._aborted:
                return
            self._aborted = reason
            ends = [*self._out.values(), *self._in.values()]
            under_way, self._under_way = self._under_way, []
        error = self._was_aborted()
        for request in under_way:
            request.fail(error)
        for communicator, _ in ends:
            communicator.abort()

    @property
    def lent(self) -> int:
        """Requests whose memory the device may still use."""
        with self._lock:
            self._under_way = [r for r in self._under_way if not r.done()]
            return len(self._under_way)

    def close(self) -> None:
        """Give communicators, streams and the bootstrap back."""
        if self._closed:
            return
        self._closed = True
        for communicator, _ in (*self._out.values(), *self._in.values()):
            if not self._aborted:
                communicator.close()
        self._out.clear()
        self._in.clear()
        self._backend.close()
        self._bootstrap.close()


def _nbytes(spec: ArraySpec) -> int:
    return math.prod(spec.shape) * int(jnp.dtype(spec.dtype).itemsize)


def _check_header(request: _Request, data: Any) -> None:
    text = bytes(np.asarray(data)).rstrip(b"\0").decode()
    tag, shape, dtype = json.loads(text)
    wanted = request.expected
    assert wanted is not None
    if (tag, tuple(shape), dtype) != (request.tag, wanted.shape, wanted.dtype):
        raise TransportError(
            f"rank {request.peer} sent something else than what was expected",
            got=f"tag {tag}, {dtype}{shape}",
            why=f"expected tag {request.tag}, {wanted.dtype}{list(wanted.shape)}",
        )


# --- CUDA ----------------------------------------------------------------------------------------


class _CupyCommunicator:
    """A communicator of two; every operation is a group of its own."""

    def __init__(self, nccl: Any, unique: tuple[int, ...], rank: int) -> None:
        self._nccl = nccl
        self._peer = 1 - rank
        self._inner = nccl.NcclCommunicator(2, unique, rank)

    def send(self, pointer: int, nbytes: int, stream: Any) -> None:
        self._inner.send(pointer, nbytes, self._nccl.NCCL_UINT8, self._peer, stream.ptr)

    def recv(self, pointer: int, nbytes: int, stream: Any) -> None:
        self._inner.recv(pointer, nbytes, self._nccl.NCCL_UINT8, self._peer, stream.ptr)

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._inner.destroy()


class CupyBackend:
    """CuPy's NCCL on one CUDA device. Not yet run on hardware."""

    def __init__(self, device: Any = None) -> None:
        try:
            self._cupy = importlib.import_module("cupy")
            self._nccl = importlib.import_module("cupy.cuda.nccl")
        except ImportError as error:
            raise TransportError(
                "NCCL needs CuPy", got=str(error), remedy='pip install "autopar[gpu]"'
            ) from error
        self._jax_device = device
        self._ordinal = 0 if device is None else int(getattr(device, "local_hardware_id", 0) or 0)

    def check(self) -> None:
        """Refuse NCCL builds that are known to hang, and two builds in one process."""
        version = int(self._nccl.get_version())
        if version in HANGING_VERSIONS:
            raise TransportError(
                f"NCCL {version} is known to hang in point-to-point transfers",
                remedy=f"nvidia-nccl-cu12 {HANGING_VERSIONS[version]}",
            )
        libraries = loaded_nccl(Path("/proc/self/maps").read_text(encoding="utf-8"))
        if len(libraries) > 1:
            raise TransportError(
                "two builds of NCCL are loaded in this process",
                got=", ".join(libraries),
                why="their symbols get mixed up, and the process crashes",
                remedy="install jax[cuda12] and cupy-cuda12x with one nvidia-nccl-cu12",
            )

    def unique_id(self) -> bytes:
        """A new NCCL id; CuPy tells it as signed chars."""
        return bytes(number & 0xFF for number in self._nccl.get_unique_id())

    def communicator(self, unique_id: bytes, rank: int) -> Communicator:
        """Join; waits for the other rank."""
        signed = tuple(byte - 256 if byte > 127 else byte for byte in unique_id)
        with self._cupy.cuda.Device(self._ordinal):
            return _CupyCommunicator(self._nccl, signed, rank)

    def stream(self) -> Any:
        """A new stream that does not wait for the default one."""
        with self._cupy.cuda.Device(self._ordinal):
            return self._cupy.cuda.Stream(non_blocking=True)

    def event(self, stream: Any) -> Any:
        """Record an event."""
        made = self._cupy.cuda.Event(disable_timing=True)
        made.record(stream)
        return made

    def fired(self, event: Any) -> bool:
        """Ask it."""
        return bool(event.done)

    def source(self, array: Any, stream: Any) -> tuple[int, Any]:
        """The pointer; exporting the array makes the stream wait for what computes it."""
        capsule = array.__dlpack__(stream=stream.ptr)
        return int(array.unsafe_buffer_pointer()), capsule

    def empty(self, spec: ArraySpec) -> tuple[int, Any]:
        """New device memory; as bytes where CuPy does not know the dtype."""
        with self._cupy.cuda.Device(self._ordinal):
            known = _cupy_knows(spec.dtype)
            shape = spec.shape if known else (_nbytes(spec),)
            made = self._cupy.empty(shape, dtype=spec.dtype if known else "uint8")
        return int(made.data.ptr), made

    def to_jax(self, buffer: Any, spec: ArraySpec) -> Any:
        """The same memory as a JAX array."""
        array = jax.dlpack.from_dlpack(buffer)
        if _cupy_knows(spec.dtype):
            return array
        dtype = jnp.dtype(spec.dtype)
        if dtype == jnp.bool_:
            return array.reshape(spec.shape).astype(dtype)
        shape = spec.shape if dtype.itemsize == 1 else (*spec.shape, dtype.itemsize)
        return jax.lax.bitcast_convert_type(array.reshape(shape), dtype)

    def close(self) -> None:
        """CuPy gives streams back when they are dropped."""


def _cupy_knows(dtype: str) -> bool:
    """Whether CuPy and DLPack both have the dtype."""
    return (
        dtype
        in (
            "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 "
            "complex128"
        ).split()
    )


def loaded_nccl(maps: str) -> list[str]:
    """The NCCL libraries in the text of a /proc/PID/maps."""
    paths = {line.split()[-1] for line in maps.splitlines() if "libnccl.so" in line}
    return sorted(paths)
