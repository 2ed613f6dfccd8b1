"""What every transport must do: one suite, run over each transport by a subclass.

A test file of a transport writes

    class TestTcp(HostTransportContract):
        @pytest.fixture
        def fabric(self) -> Fabric: ...

`TransportContract` holds for all transports, also for those that are not buffered: in each case
both ends of a pair post their operations in one agreed order, each rank in a thread of its own.
`HostTransportContract` (`contract_host.py`) adds what holds where messages carry headers and land
in host memory.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import TransportError
from autopar.runtime.transport.base import ArraySpec, Request, Transport

PATIENCE = 20.0
"""Seconds that no case comes near, unless something hangs."""

SHORT = 0.2
"""Seconds of the waits that are meant to end in vain."""

ALL_DTYPES = (
    "bool int4 int8 int16 int32 int64 uint4 uint8 uint16 uint32 uint64 float16 float32 float64 "
    "bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
    "float8_e5m2fnuz float8_e8m0fnu complex64 complex128"
).split()

Body = Callable[[Transport], Any]


class Fabric(Protocol):
    """Makes connected transports, and knows what they carry.

    Attributes:
        dtypes: names of the dtypes to try.
    """

    dtypes: Sequence[str]

    def make(self, count: int) -> list[Transport]:
        """Transports of ranks 0 to count - 1, all connected to each other."""

    def from_array(self, transport: Transport, array: np.ndarray[Any, Any]) -> Any:
        """What the transport sends, of a numpy array."""

    def to_array(self, value: Any) -> np.ndarray[Any, Any]:
        """A numpy array of what arrived."""

    def kill(self, transport: Transport) -> None:
        """End a rank as if its process had died: without a word to anyone."""

    def lent(self, transport: Transport) -> int:
        """How many buffers the transport has handed out that did not come back."""


def connect_all(transports: Sequence[Transport], *, timeout: float = PATIENCE) -> None:
    """Connect each to all others, each in its own thread."""
    addresses = {transport.rank: transport.address for transport in transports}

    def body(transport: Transport) -> None:
        peers = {rank: text for rank, text in addresses.items() if rank != transport.rank}
        transport.connect(peers, timeout=timeout)

    run_ranks(transports, *(body for _ in transports))


def run_ranks(transports: Sequence[Transport], *bodies: Body) -> list[Any]:
    """Run one body a rank in threads; returns their results, or raises the first rank's error."""
    results: list[Any] = [None] * len(bodies)
    errors: list[BaseException | None] = [None] * len(bodies)

    def run(index: int) -> None:
        try:
            results[index] = bodies[index](transports[index])
        except BaseException as error:
            errors[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    hanging = [index for index, thread in enumerate(threads) if thread.is_alive()]
    assert not hanging, f"ranks {hanging} hang; errors so far {errors}"
    for error in errors:
        if error is not None:
            raise error
    return results


def random_array(
    shape: tuple[int, ...], dtype: str, rng: np.random.Generator
) -> np.ndarray[Any, Any]:
    """Any bit patterns that the dtype can hold, NaNs with payloads included."""
    kind = jnp.dtype(dtype)
    count = int(np.prod(shape))
    if dtype in ("bool", "int4", "uint4"):
        return (np.arange(count) % 2).astype(kind).reshape(shape)
    return np.frombuffer(rng.bytes(count * kind.itemsize), kind).reshape(shape)


def bits(array: np.ndarray[Any, Any]) -> bytes:
    """The bytes of an array in row-major order."""
    return np.ascontiguousarray(array).tobytes()


def spec_of(array: np.ndarray[Any, Any]) -> ArraySpec:
    """What to expect for an array."""
    return ArraySpec(array.shape, array.dtype.name)


def finish(transport: Transport, *requests: Request) -> list[Any]:
    """Wait for requests; returns their results."""
    transport.wait(requests, timeout=PATIENCE)
    assert all(request.done() for request in requests)
    return [request.result() for request in requests]


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether a condition comes true; garbage is collected meanwhile."""
    end = time.monotonic() + PATIENCE / 4
    while not condition():
        gc.collect()
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def open_files() -> dict[str, str]:
    """File descriptors of this process and what they are."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found


def shared_memory_files() -> list[str]:
    """Names in /dev/shm."""
    return sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else []


@contextmanager
def nothing_left() -> Iterator[None]:
    """Checks that no file descriptor, thread or shared-memory file is left by what runs inside."""
    gc.collect()
    files, shared = open_files(), shared_memory_files()
    threads = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= threads  # they were waited for
    assert eventually(lambda: len(open_files()) <= len(files)), (files, open_files())
    assert eventually(lambda: set(shared_memory_files()) <= set(shared)), shared_memory_files()


class TransportContract:
    """Holds for every transport."""

    @pytest.fixture
    def fabric(self) -> Fabric:
        raise NotImplementedError

    @pytest.fixture
    def pair(self, fabric: Fabric) -> Iterator[list[Transport]]:
        yield from self._made(fabric, 2)

    @pytest.fixture
    def three(self, fabric: Fabric) -> Iterator[list[Transport]]:
        yield from self._made(fabric, 3)

    @staticmethod
    def _made(fabric: Fabric, count: int) -> Iterator[list[Transport]]:
        transports = fabric.make(count)
        try:
            yield transports
        finally:
            for transport in transports:
                transport.close()

    @staticmethod
    def send(fabric: Fabric, arrays: Sequence[np.ndarray[Any, Any]], tags: Sequence[int]) -> Body:
        """A body that sends arrays to rank 1 and waits."""

        def body(transport: Transport) -> None:
            requests = [
                transport.isend(1, tag, fabric.from_array(transport, array))
                for array, tag in zip(arrays, tags, strict=True)
            ]
            assert finish(transport, *requests) == [None] * len(requests)

        return body

    @staticmethod
    def receive(fabric: Fabric, specs: Sequence[ArraySpec], tags: Sequence[int]) -> Body:
        """A body that receives from rank 0 and waits; returns numpy arrays."""

        def body(transport: Transport) -> list[np.ndarray[Any, Any]]:
            requests = [
                transport.irecv(0, tag, spec) for spec, tag in zip(specs, tags, strict=True)
            ]
            return [fabric.to_array(value) for value in finish(transport, *requests)]

        return body

    def exchange(
        self, fabric: Fabric, pair: list[Transport], arrays: Sequence[np.ndarray[Any, Any]]
    ) -> None:
        """Send from 0 to 1 under tags 0, 1, ...; what arrives has the same bits."""
        tags = range(len(arrays))
        specs = [spec_of(array) for array in arrays]
        _, arrived = run_ranks(
            pair, self.send(fabric, arrays, tags), self.receive(fabric, specs, tags)
        )
        for sent, got in zip(arrays, arrived, strict=True):
            assert got.shape == sent.shape
            assert got.dtype == sent.dtype
            assert got.flags.c_contiguous
            assert bits(got) == bits(sent)

    def test_every_dtype_arrives_bit_for_bit(self, fabric: Fabric, pair: list[Transport]) -> None:
        rng = np.random.default_rng(0)
        self.exchange(fabric, pair, [random_array((3, 5), name, rng) for name in fabric.dtypes])

    def test_shapes_with_nothing_and_with_one_element(
        self, fabric: Fabric, pair: list[Transport]
    ) -> None:
        rng = np.random.default_rng(1)
        shapes = [(), (1,), (0,), (0, 4), (3, 0, 2), (1, 1, 1, 1, 1), (2, 3, 4, 5)]
        self.exchange(fabric, pair, [random_array(shape, "float32", rng) for shape in shapes])

    def test_large_arrays(self, fabric: Fabric, pair: list[Transport]) -> None:
        rng = np.random.default_rng(2)
        sizes = [1 << 16, (1 << 20) + 3, (1 << 22) + 1, 5]
        self.exchange(fabric, pair, [random_array((size,), "int8", rng) for size in sizes])

    def test_messages_of_one_tag_stay_in_order(self, fabric: Fabric, pair: list[Transport]) -> None:
        sizes = [4, 1 << 18, 4, 1 << 20, 4]  # large ones take another way than small ones
        sent = [np.full(size, index, np.int8) for index, size in enumerate(sizes)]
        specs, tags = [spec_of(array) for array in sent], [7] * len(sent)
        _, got = run_ranks(pair, self.send(fabric, sent, tags), self.receive(fabric, specs, tags))
        assert [int(array[-1]) for array in got] == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("late", [0, 1])
    def test_one_side_comes_late(self, fabric: Fabric, pair: list[Transport], late: int) -> None:
        sent = np.arange(6, dtype=np.float32)

        def delayed(body: Body, rank: int) -> Body:
            def run(transport: Transport) -> Any:
                time.sleep(SHORT if rank == late else 0)
                return body(transport)

            return run

        bodies = self.send(fabric, [sent], [3]), self.receive(fabric, [spec_of(sent)], [3])
        _, got = run_ranks(pair, *(delayed(body, rank) for rank, body in enumerate(bodies)))
        assert bits(got[0]) == bits(sent)

    def test_tags_are_used_again_step_after_step(
        self, fabric: Fabric, pair: list[Transport]
    ) -> None:
        for step in range(20):
            sent = [np.full((4,), 10 * step + tag, np.int32) for tag in range(3)]
            self.exchange(fabric, pair, sent)

    def test_many_small_messages_both_ways(self, fabric: Fabric, pair: list[Transport]) -> None:
        count = 300

        def body(transport: Transport) -> list[int]:
            peer = 1 - transport.rank
            sends, receives = [], []
            for tag in range(count):
                array = np.full((tag % 5,), 1000 * transport.rank + tag, np.int32)
                # One agreed order over both ranks: 0 -> 1 first.
                for sender in (0, 1):
                    if sender == transport.rank:
                        value = fabric.from_array(transport, array)
                        sends.append(transport.isend(peer, tag, value))
                    else:
                        spec = ArraySpec((tag % 5,), "int32")
                        receives.append(transport.irecv(peer, tag, spec))
            finish(transport, *sends)
            values = [fabric.to_array(value) for value in finish(transport, *receives)]
            return [int(v[0]) if v.size else -1 for v in values]

        got = run_ranks(pair, body, body)
        for rank in (0, 1):
            base = 1000 * (1 - rank)
            assert got[rank] == [base + tag if tag % 5 else -1 for tag in range(count)]

    def test_all_to_all(self, fabric: Fabric, three: list[Transport]) -> None:
        def body(transport: Transport) -> dict[int, int]:
            sends, receives = [], {}
            for sender in range(3):
                for target in range(3):
                    if sender == target:
                        continue
                    if transport.rank == sender:
                        array = np.full((70_000,), 10 * sender + target, np.int32)
                        value = fabric.from_array(transport, array)
                        sends.append(transport.isend(target, 5, value))
                    elif transport.rank == target:
                        receives[sender] = transport.irecv(sender, 5, ArraySpec((70_000,), "int32"))
            finish(transport, *sends, *receives.values())
            return {s: int(fabric.to_array(r.result()).sum()) for s, r in receives.items()}

        got = run_ranks(three, body, body, body)
        assert got == [
            {sender: 70_000 * (10 * sender + target) for sender in range(3) if sender != target}
            for target in range(3)
        ]

    def test_waiting_for_nothing(self, pair: list[Transport]) -> None:
        pair[0].wait([], timeout=0.0)

    def test_a_wait_in_vain_names_who_waits_for_whom(self, pair: list[Transport]) -> None:
        def body(transport: Transport) -> None:
            requests = [transport.irecv(0, tag, ArraySpec((2,), "float32")) for tag in (4, 9)]
            with pytest.raises(TransportError) as caught:
                transport.wait(requests, timeout=SHORT)
            text = str(caught.value)
            assert "rank 1" in text
            assert "from rank 0: tags 4, 9" in text
            assert f"{SHORT:g} s" in text

        run_ranks(pair[1:], body)

    def test_the_death_of_a_peer_wakes_who_waits_for_it(
        self, fabric: Fabric, pair: list[Transport]
    ) -> None:
        waiting = threading.Event()

        def waits(transport: Transport) -> None:
            request = transport.irecv(0, 11, ArraySpec((2,), "float32"))
            waiting.set()
            with pytest.raises(TransportError) as caught:
                transport.wait([request], timeout=PATIENCE)
            text = str(caught.value)
            assert "rank 0" in text
            assert "11" in text
            assert request.done()
            with pytest.raises(TransportError):
                request.result()

        def dies(transport: Transport) -> None:
            assert waiting.wait(PATIENCE)
            time.sleep(SHORT / 4)
            fabric.kill(transport)

        start = time.monotonic()
        run_ranks(pair, dies, waits)
        assert time.monotonic() - start < PATIENCE / 4

    def test_an_abort_wakes_all_waiters_everywhere(
        self, fabric: Fabric, three: list[Transport]
    ) -> None:
        waiting = threading.Barrier(5)

        def waits(peer: int, tag: int) -> Body:
            def body(transport: Transport) -> str:
                request = transport.irecv(peer, tag, ArraySpec((2,), "float32"))
                waiting.wait(PATIENCE)
                with pytest.raises(TransportError) as caught:
                    transport.wait([request], timeout=PATIENCE)
                return str(caught.value)

            return body

        def aborts(transport: Transport) -> None:
            waiting.wait(PATIENCE)
            time.sleep(SHORT / 4)
            transport.abort("stage 0 is out of memory")

        start = time.monotonic()
        zero, one, two = three
        texts = run_ranks(
            [zero, zero, one, two, two],
            aborts,
            waits(1, 1),
            waits(0, 2),
            waits(0, 3),
            waits(1, 4),  # of a pair that the abort did not start from
        )[1:]
        assert all("stage 0 is out of memory" in text for text in texts), texts
        assert time.monotonic() - start < PATIENCE / 4
        value = fabric.from_array(zero, np.zeros((2,), np.float32))
        with pytest.raises(TransportError, match="stage 0 is out of memory"):
            zero.isend(1, 1, value)
        zero.abort("again")

    def test_all_buffers_come_back(self, fabric: Fabric, pair: list[Transport]) -> None:
        for _ in range(3):
            rng = np.random.default_rng(3)
            arrays = [random_array((size,), "int8", rng) for size in (0, 10, 1 << 17, 1 << 20)]
            self.exchange(fabric, pair, arrays)
        del arrays
        assert eventually(lambda: all(fabric.lent(transport) == 0 for transport in pair))

    def test_an_array_outlives_the_transport(self, fabric: Fabric) -> None:
        pair = fabric.make(2)
        sent = np.arange(50_000, dtype=np.int32)
        _, got = run_ranks(
            pair, self.send(fabric, [sent], [1]), self.receive(fabric, [spec_of(sent)], [1])
        )
        for transport in pair:
            transport.close()
        gc.collect()
        assert bits(got[0]) == bits(sent)

    def test_close_gives_everything_back_and_may_be_repeated(self, fabric: Fabric) -> None:
        self._use_and_close(fabric)  # what is made once a process is no leak
        with nothing_left():
            self._use_and_close(fabric)

    def _use_and_close(self, fabric: Fabric) -> None:
        transports = fabric.make(2)
        rng = np.random.default_rng(4)
        sizes = (1, 1 << 18, 1 << 20)
        self.exchange(fabric, transports, [random_array((s,), "int8", rng) for s in sizes])
        for transport in transports:
            transport.close()
            transport.close()
