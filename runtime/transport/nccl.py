"""Arrays between GPUs by NCCL, point to point. NOT YET RUN ON HARDWARE: see docs/gpu.md.

Each directed pair of ranks has a communicator and a non-blocking stream of its own. What is posted
is queued, and launched as one NCCL group as soon as somebody waits, asks, or calls `launch`::

    isend a, isend b, irecv c, wait ->  group { send a, send b, recv c }, an event each

since CUDA does not promise that two streams go on independently: two ranks that each launch a send
and then a receive may wait for each other for ever, while grouped ones go on together. The first
send of a pair sets up its connection, which blocks the host; `connect` gets that over with.

Beside every message a header goes over a host transport, the *bootstrap*, which also carries the
unique ids of the communicators. A receive from each peer that never ends, the *watch*, tells of
its death or abort: NCCL itself would only hang. No wait synchronises a stream: events are asked,
up to a deadline. Memory is held until the event behind its transfer has fired, or the communicator
has been aborted.

All of CUDA is behind `NcclBackend`; tests run this transport over a fake one.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from autopar.errors import TransportError
from autopar.runtime.transport.base import ArraySpec, Request, Transport
from autopar.runtime.transport.matching import shown
from autopar.runtime.transport.nccl_messages import (
    Payload,
    check_header,
    check_libraries,
    check_version,
    header,
    header_spec,
    payload,
    spec_of,
)
from autopar.runtime.transport.nccl_parts import (
    Communicator,
    CupyCommunicator,
    End,
    NcclBackend,
    NcclRequest,
    Peer,
    as_transport_error,
    is_row_major,
    names,
    within,
)

UNIQUE_ID_BYTES = 128
UNIQUE_ID_TAG, WATCH_TAG = 2**30, 2**30 + 1
"""Tags on the bootstrap above those of the messages of a step."""

GROUP_LIMIT = 1024
"""Operations in one group; NCCL's documentation has allowed 2048."""

SHORTEST_POLL, LONGEST_POLL = 2e-5, 1e-3
"""Seconds between two looks at the events of a wait; doubled from look to look."""

GRACE = 0.5
"""Seconds for which transfers may still end after their peer has gone: it may have gone because it
is done."""


class NcclTransport(Transport):
    """One rank's end.

    Args:
        rank: whose.
        bootstrap: a host transport of the same rank; this one connects and closes it.
        backend: of the device; None: CuPy's.
        device: JAX's GPU, for CuPy's back-end; None: the first.

    Raises:
        TransportError: NCCL cannot be used here.
    """

    buffered = False
    memory = "device"

    def __init__(
        self,
        rank: int,
        bootstrap: Transport,
        backend: NcclBackend | None = None,
        device: Any = None,
    ) -> None:
        self.rank = rank
        self._bootstrap = bootstrap
        self._backend = CupyBackend(device) if backend is None else backend
        self._backend.check()
        self._posting = threading.RLock()  # taken before _state
        self._state = threading.Lock()
        self._peers: dict[int, Peer] = {}
        self._queue: list[tuple[NcclRequest, Payload]] = []
        self._under_way: dict[NcclRequest, None] = {}
        self._closed = False

    @property
    def address(self) -> str:
        """The bootstrap's."""
        return self._bootstrap.address

    @property
    def lent(self) -> int:
        """Transfers whose memory the device may still use."""
        with self._state:
            under_way = list(self._under_way)
        return sum(not request.done() for request in under_way)

    def prepare(self, specs: Iterable[ArraySpec]) -> None:
        """Be ready to receive such arrays without compiling anything between transfers."""
        for spec in specs:
            payload(0, spec)
            self._backend.prepare(spec)

    # Connections.

    def connect(self, peers: Mapping[int, str], *, timeout: float) -> None:
        """Connect the bootstrap, then both communicators of each pair, then their wires."""
        deadline = time.monotonic() + timeout
        self._bootstrap.connect(peers, timeout=timeout)
        made: list[Peer] = []
        try:
            for peer in sorted(peers):
                # Joining waits for the other side: all ranks join in the order of the pairs.
                ends = {s: self._join(s, peer, deadline) for s in sorted((self.rank, peer))}
                watch = self._bootstrap.irecv(peer, WATCH_TAG, header_spec())
                made.append(Peer(watch, ends[self.rank], ends[peer]))
            self._warm_up(made, deadline)
        except BaseException:
            for ready in made:
                self._drop(ready, TransportError(f"rank {self.rank} could not connect"))
            raise
        self._peers.update({ready.out.peer: ready for ready in made})

    def _join(self, sender: int, peer: int, deadline: float) -> End:
        """One directed pair's communicator, by an id that the sender makes."""
        backend, sends = self._backend, sender == self.rank
        if sends:
            unique = backend.unique_id()
            request = self._bootstrap.isend(
                peer, UNIQUE_ID_TAG, np.frombuffer(unique, np.uint8).copy()
            )
        else:
            spec = ArraySpec((UNIQUE_ID_BYTES,), "uint8")
            request = self._bootstrap.irecv(peer, UNIQUE_ID_TAG, spec)
        self._bootstrap.wait([request], timeout=max(0.0, deadline - time.monotonic()))
        if not sends:
            unique = request.result().tobytes()
        join = partial(backend.communicator, unique, 0 if sends else 1)
        what = f"rank {self.rank} could not join rank {peer} by NCCL"
        return End(peer, sends, within(deadline, what, join), backend.stream())

    def _warm_up(self, peers: Sequence[Peer], deadline: float) -> None:
        """One byte each way: NCCL connects a pair, blocking the host, at its first operation."""
        backend, spec = self._backend, ArraySpec((1,), "uint8")
        ends = [end for peer in peers for end in (peer.out, peer.into)]
        memory = [backend.empty(spec, end.stream) for end in ends]

        def launch() -> list[Any]:
            with backend.group():
                for end, (pointer, _) in zip(ends, memory, strict=True):
                    end.queue(payload(pointer, spec))
            return [backend.event(end.stream) for end in ends]

        what = f"rank {self.rank} could not set up its NCCL connections"
        events = within(deadline, what, launch)
        while not all(backend.fired(event) for event in events):
            if time.monotonic() > deadline:
                raise TransportError(what, why="time is up")
            time.sleep(LONGEST_POLL)

    # Operations.

    def isend(self, peer: int, tag: int, array: Any) -> Request:
        """Start sending."""
        spec = spec_of(array)
        with self._posting:
            ready = self._peer(peer)
            request = NcclRequest(self.advance, ready.out, tag, spec)
            what = payload(0, spec)
            if what.count:
                pointer, more = self._backend.source(array, ready.out.stream)
                what = payload(pointer, spec)
                self._hold(request, (array, more))
            message = header(request.number, tag, spec)
            request.header = self._bootstrap.isend(peer, tag, message)
            self._post(request, what)
        return request

    def irecv(self, peer: int, tag: int, spec: ArraySpec) -> Request:
        """Expect an array."""
        with self._posting:
            ready = self._peer(peer)
            request = NcclRequest(self.advance, ready.into, tag, spec)
            payload(0, spec)  # refuses the dtype
            pointer, array = self._backend.empty(spec, ready.into.stream)
            self._hold(request, array)
            request.header = self._bootstrap.irecv(peer, tag, header_spec())
            self._post(request, payload(pointer, spec))
        return request

    def _hold(self, request: NcclRequest, memory: Any) -> None:
        request.held = memory

    def _post(self, request: NcclRequest, what: Payload) -> None:
        request.end.posted += 1
        if not what.count:
            return
        request.moving = True
        self._queue.append((request, what))
        with self._state:
            self._under_way[request] = None
        if len(self._queue) >= GROUP_LIMIT:
            self.launch()

    def launch(self) -> None:
        """Give NCCL what was posted, as one group, in the order in which it was posted."""
        with self._posting:
            posted = [(r, what) for r, what in self._queue if r.failed is None]
            self._queue = []
            if not posted:
                return
            try:
                with self._backend.group():
                    for request, what in posted:
                        request.end.queue(what)
                for request, _ in posted:
                    request.event = self._backend.event(request.end.stream)
            except Exception as error:
                for request, _ in posted:  # nobody can tell how much of it NCCL has taken
                    self._fail(request, error)

    def _peer(self, peer: int) -> Peer:
        if self._closed:
            raise TransportError(f"the transport of rank {self.rank} is closed")
        if peer not in self._peers:
            raise TransportError(f"rank {self.rank} is not connected to rank {peer}")
        dropped = self._peers[peer].dropped
        if dropped is not None:
            raise dropped
        return self._peers[peer]

    def wait(self, requests: Sequence[Request], *, timeout: float) -> None:
        """Return when all are done."""
        deadline = time.monotonic() + timeout
        own = [request for request in requests if isinstance(request, NcclRequest)]
        assert len(own) == len(requests), "requests of another kind of transport"
        pause, pending = SHORTEST_POLL, own
        while True:
            pending = [request for request in pending if not request.done() or request.failed]
            for request in pending:
                if request.failed is not None:
                    raise request.failed
            if not pending:
                return
            if time.monotonic() >= deadline:
                raise self._late(pending, timeout)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL)

    def _late(self, pending: Sequence[NcclRequest], timeout: float) -> TransportError:
        device = any(request.agreed for request in pending)
        why = (
            "NCCL matches by order: both ranks must post in the same one, and their devices go on"
            if device
            else "the peer did not post its side in time, or hangs"
        )
        what = f"rank {self.rank} waited {timeout:g} s in vain"
        return TransportError(what, where=names(pending), why=why)

    def advance(self, request: NcclRequest) -> None:
        """Look how far a transfer is; for its request only. Its failure is kept in it."""
        try:
            self.launch()
            self._look(request)
        except Exception as error:
            self._fail(request, error)

    def _fail(self, request: NcclRequest, error: Exception) -> None:
        """A failed transfer spoils its pair: NCCL's order is lost."""
        peer = self._peers[request.end.peer]
        self._drop(peer, as_transport_error(error, request))
        request.failed = request.failed or peer.dropped

    def _look(self, request: NcclRequest) -> None:
        assert request.header is not None
        if not request.agreed and request.header.done():
            self._agree(request, request.header.result())
        event = request.event
        if event is not None and self._backend.fired(event):
            if request.end.sends:
                request.held = None
            request.event, request.moving = None, False
            with self._state:
                self._under_way.pop(request, None)
        if not request.ended():
            request.end.communicator.check()
            for peer in self._peers.values():
                self._look_after(peer)

    def _agree(self, request: NcclRequest, data: Any) -> None:
        """Hold a header against the request."""
        if not request.end.sends:
            ranks, tag = (request.end.peer, self.rank), request.tag
            check_header(data, ranks=ranks, number=request.number, tag=tag, spec=request.spec)
        request.agreed = True

    def _look_after(self, peer: Peer) -> None:
        """Drop a peer that has gone: NCCL would wait for it for ever."""
        if peer.dropped is not None or not peer.watch.done():
            return
        if not peer.gone_since:
            peer.gone_since = time.monotonic()
        elif time.monotonic() > peer.gone_since + GRACE:
            try:
                peer.watch.result()
            except TransportError as error:
                self._drop(peer, error)

    # The end.

    def _drop(self, peer: Peer, error: TransportError) -> None:
        """Abort both communicators of a pair; what is under way there fails, and is let go."""
        with self._state:
            if peer.dropped is not None:
                return
            peer.dropped = error
            ends = (peer.out, peer.into)
            ending = [r for r in self._under_way if r.end in ends]
            for request in ending:
                del self._under_way[request]
        ending = [request for request in ending if not request.ended()]
        for request in ending:
            request.failed = error  # first: the events of what is aborted fire
        for end in ends:
            end.communicator.abort()
        for request in ending:
            request.held = None

    def abort(self, reason: str) -> None:
        """Fail everything under way, here and at the peers."""
        self._bootstrap.abort(reason)
        error = TransportError(f"the transfers of rank {self.rank} were aborted", why=reason)
        for peer in tuple(self._peers.values()):
            self._drop(peer, error)

    def close(self) -> None:
        """Give communicators, streams and the bootstrap back."""
        if self._closed:
            return
        self._closed = True
        error = TransportError(f"the transport of rank {self.rank} is closed")
        for peer in tuple(self._peers.values()):
            ends = (peer.out, peer.into)
            if any(r.end in ends and not r.done() for r in tuple(self._under_way)):
                self._drop(peer, error)  # giving a communicator back waits for what is under way
            if peer.dropped is None:
                peer.dropped = error
                for end in ends:
                    end.communicator.close()
        self._backend.close()
        self._bootstrap.close()


# --- CUDA ----------------------------------------------------------------------------------------


class CupyBackend:
    """CuPy's NCCL, streams and events on one GPU; memory is JAX's. Not yet run on hardware.

    What is received lands in arrays that JAX has made, under JAX's eyes but before anybody else
    knows of them: all dtypes without a copy, one allocator, and JAX orders their reuse.

    Args:
        device: JAX's; None: its first GPU.

    Raises:
        TransportError: there is no CuPy.
    """

    def __init__(self, device: Any = None) -> None:
        try:
            self._cuda = importlib.import_module("cupy.cuda")
            self._nccl = importlib.import_module("cupy.cuda.nccl")
        except ImportError as error:
            raise TransportError(
                "NCCL needs CuPy", got=str(error), remedy='pip install "autopar[gpu]"'
            ) from error
        self._device = jax.local_devices(backend="gpu")[0] if device is None else device
        self._ordinal = int(self._device.local_hardware_id or 0)
        self._makers: dict[ArraySpec, Callable[[], Any]] = {}

    def check(self) -> None:
        """Refuse versions of NCCL that hang, and several builds in one process."""
        check_version(int(self._nccl.get_version()))
        with Path("/proc/self/maps").open(encoding="utf-8") as maps:
            check_libraries(maps)

    def unique_id(self) -> bytes:
        """A new id; CuPy before 14 tells it as a tuple of signed chars."""
        return bytes(number & 0xFF for number in self._nccl.get_unique_id())

    def communicator(self, unique_id: bytes, rank: int) -> Communicator:
        """Join; waits for the other rank."""
        with self._cuda.Device(self._ordinal):
            try:
                made = self._nccl.NcclCommunicator(2, unique_id, rank)
            except TypeError:  # CuPy before 14
                signed = tuple(byte - 256 if byte > 127 else byte for byte in unique_id)
                made = self._nccl.NcclCommunicator(2, signed, rank)
        return CupyCommunicator(self._nccl, made, rank)

    @contextmanager
    def group(self) -> Iterator[None]:
        """One NCCL group; groups belong to the thread that opens them."""
        with self._cuda.Device(self._ordinal):
            self._nccl.groupStart()
            try:
                yield
            finally:
                self._nccl.groupEnd()

    def stream(self) -> Any:
        """A new stream that does not wait for the default one."""
        with self._cuda.Device(self._ordinal):
            return self._cuda.Stream(non_blocking=True)

    def event(self, stream: Any) -> Any:
        """Record an event."""
        with self._cuda.Device(self._ordinal):
            made = self._cuda.Event(disable_timing=True)
            made.record(stream)
        return made

    def fired(self, event: Any) -> bool:
        """Ask it."""
        return bool(event.done)

    def source(self, array: Any, stream: Any) -> tuple[int, Any]:
        """The pointer, after a copy from another device if need be.

        Exporting the array makes the stream wait for what computes it.
        """
        if len(array.devices()) != 1 or not is_row_major(array):
            raise TransportError(
                "the array to send is not C-contiguous memory of one device",
                got=f"{shown(spec_of(array))} as {array.format.layout} on {array.sharding}",
            )
        if array.devices() != {self._device}:
            array = jax.device_put(array, self._device)
        pointer, capsule = self._exported(array, stream)
        return pointer, (array, capsule)

    def _exported(self, array: Any, stream: Any) -> tuple[int, Any]:
        pointer = int(array.unsafe_buffer_pointer())
        if self._device.platform == "gpu":
            return pointer, array.__dlpack__(stream=stream.ptr)
        return pointer, jax.block_until_ready(array)  # JAX orders streams on GPUs only

    def prepare(self, spec: ArraySpec) -> None:
        """Compile what makes such arrays."""
        if spec not in self._makers:
            place = SingleDeviceSharding(self._device)
            make = jax.jit(partial(jnp.zeros, spec.shape, spec.dtype), out_shardings=place)
            self._makers[spec] = make.lower().compile()

    def empty(self, spec: ArraySpec, stream: Any) -> tuple[int, Any]:
        """A new array of zeros; the stream waits until they are written."""
        self.prepare(spec)
        array = self._makers[spec]()
        pointer, _ = self._exported(array, stream)
        return pointer, array

    def close(self) -> None:
        """CuPy gives streams back when they are dropped."""
