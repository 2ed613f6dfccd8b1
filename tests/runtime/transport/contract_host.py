"""What transports of numpy arrays must do besides: the second part of the suite."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

from autopar.errors import TransportError
from autopar.runtime.transport.base import ArraySpec, Request, Transport
from tests.runtime.transport.contract import (
    ALL_DTYPES,
    PATIENCE,
    SHORT,
    Body,
    Fabric,
    TransportContract,
    bits,
    eventually,
    finish,
    random_array,
    run_ranks,
    spec_of,
)


class HostFabric:
    """The part of a fabric that is the same for all transports of numpy arrays."""

    dtypes: Sequence[str] = ALL_DTYPES

    def from_array(self, transport: Transport, array: np.ndarray[Any, Any]) -> Any:
        return array

    def to_array(self, value: Any) -> np.ndarray[Any, Any]:
        assert isinstance(value, np.ndarray)
        return value

    def kill(self, transport: Transport) -> None:
        transport.close()


class HostTransportContract(TransportContract):
    """Holds where messages carry headers, are buffered, and land in host memory."""

    def test_it_says_so(self, pair: list[Transport]) -> None:
        assert all(transport.buffered and transport.memory == "host" for transport in pair)

    def test_a_send_ends_without_its_partner(self, fabric: Fabric, pair: list[Transport]) -> None:
        arrays = [np.full(size, index, np.int8) for index, size in enumerate((1, 1 << 18, 1 << 22))]
        requests = [pair[0].isend(1, tag, array) for tag, array in enumerate(arrays)]
        finish(pair[0], *requests)
        for tag in (2, 0, 1):  # and in any order
            got = finish(pair[1], pair[1].irecv(0, tag, spec_of(arrays[tag])))[0]
            assert bits(got) == bits(arrays[tag])

    def test_tags_out_of_order(self, pair: list[Transport]) -> None:
        receives = [pair[1].irecv(0, tag, ArraySpec((2,), "int32")) for tag in (3, 1, 2)]
        sends = [pair[0].isend(1, tag, np.full((2,), tag, np.int32)) for tag in (1, 2, 3)]
        finish(pair[0], *sends)
        assert [int(got[0]) for got in finish(pair[1], *receives)] == [3, 1, 2]

    def test_the_sender_may_change_its_array_once_it_is_done(self, pair: list[Transport]) -> None:
        arrays = [np.full(size, 7, np.int8) for size in (8, 1 << 18, 1 << 21)]
        finish(pair[0], *(pair[0].isend(1, tag, array) for tag, array in enumerate(arrays)))
        for array in arrays:
            array[...] = 9
        for tag, array in enumerate(arrays):
            got = finish(pair[1], pair[1].irecv(0, tag, spec_of(array)))[0]
            assert (got == 7).all()
            got[...] = 8  # nor does the receiver's array reach back
            assert (array == 9).all()

    def test_what_is_not_contiguous_is_refused(self, pair: list[Transport]) -> None:
        matrix = np.zeros((4, 6), np.float32)
        for array in (matrix[:, ::2], matrix.T, matrix[:, 1:]):
            with pytest.raises(TransportError, match="contiguous") as caught:
                pair[0].isend(1, 5, array)
            assert "rank 1" in str(caught.value)

    @pytest.mark.parametrize("dtype", ["O", "M8[s]", "U3", "i4,f4", ">f4"])
    def test_other_dtypes_are_refused(self, pair: list[Transport], dtype: str) -> None:
        with pytest.raises(TransportError, match="dtype"):
            pair[0].isend(1, 5, np.zeros((2,), dtype))
        with pytest.raises(TransportError, match="dtype"):
            pair[1].irecv(0, 5, ArraySpec((2,), np.dtype(dtype).str))

    @pytest.mark.parametrize(
        ("expected", "shown"),
        [
            (ArraySpec((3, 2), "float32"), "float32[3,2]"),
            (ArraySpec((2, 3), "int32"), "int32[2,3]"),
            (ArraySpec((6,), "float32"), "float32[6]"),
        ],
    )
    @pytest.mark.parametrize("first", ["send", "receive"])
    def test_what_was_not_expected_is_an_error_at_the_receiver(
        self, pair: list[Transport], expected: ArraySpec, shown: str, first: str
    ) -> None:
        array = np.zeros((2, 3), np.float32)
        if first == "send":
            finish(pair[0], pair[0].isend(1, 8, array))
        request = pair[1].irecv(0, 8, expected)
        if first == "receive":
            finish(pair[0], pair[0].isend(1, 8, array))
        with pytest.raises(TransportError) as caught:
            pair[1].wait([request], timeout=PATIENCE)
        text = str(caught.value)
        assert "float32[2,3]" in text
        assert shown in text
        assert "rank 0" in text
        assert "tag 8" in text
        # The connection is still good for other messages.
        self_test = np.arange(4, dtype=np.int32)
        finish(pair[0], pair[0].isend(1, 9, self_test))
        assert bits(finish(pair[1], pair[1].irecv(0, 9, spec_of(self_test)))[0]) == bits(self_test)

    def test_a_failure_is_told_before_the_other_requests_are_done(
        self, pair: list[Transport]
    ) -> None:
        never = pair[1].irecv(0, 1, ArraySpec((2,), "int32"))
        wrong = pair[1].irecv(0, 2, ArraySpec((5,), "int32"))
        finish(pair[0], pair[0].isend(1, 2, np.zeros((2,), np.int32)))
        with pytest.raises(TransportError, match="tag 2"):
            pair[1].wait([never, wrong], timeout=PATIENCE)

    def test_a_dead_peer_is_named_at_once(self, fabric: Fabric, three: list[Transport]) -> None:
        array = np.arange(3, dtype=np.int32)
        finish(three[1], three[1].isend(0, 1, array))
        assert bits(finish(three[0], three[0].irecv(1, 1, spec_of(array)))[0]) == bits(array)
        finish(three[1], three[1].isend(0, 2, array))
        request = three[0].irecv(1, 3, spec_of(array))
        fabric.kill(three[1])
        assert eventually(request.done)
        # What had arrived is still there; nothing else will come, and nothing can be sent.
        assert bits(finish(three[0], three[0].irecv(1, 2, spec_of(array)))[0]) == bits(array)
        with pytest.raises(TransportError, match="rank 1"):
            three[0].wait([three[0].irecv(1, 4, spec_of(array))], timeout=PATIENCE)
        with pytest.raises(TransportError, match="rank 1"):
            three[0].isend(1, 5, array)
        # The others are not concerned.
        finish(three[2], three[2].isend(0, 6, array))
        assert bits(finish(three[0], three[0].irecv(2, 6, spec_of(array)))[0]) == bits(array)

    def test_a_rank_that_is_not_connected(self, pair: list[Transport]) -> None:
        with pytest.raises(TransportError, match="rank 5"):
            pair[0].isend(5, 0, np.zeros((2,), np.int32))
        with pytest.raises(TransportError, match="rank 5"):
            pair[0].irecv(5, 0, ArraySpec((2,), "int32"))

    def test_a_result_before_its_time(self, pair: list[Transport]) -> None:
        request = pair[1].irecv(0, 2, ArraySpec((2,), "int32"))
        assert not request.done()
        with pytest.raises(TransportError, match="tag 2"):
            request.result()

    def test_views_keep_a_buffer_lent(self, fabric: Fabric, pair: list[Transport]) -> None:
        sent = np.arange(1 << 17, dtype=np.int32)
        for turn in range(4):
            finish(pair[0], pair[0].isend(1, turn, sent + turn))
        requests = [pair[1].irecv(0, turn, spec_of(sent)) for turn in range(4)]
        arrays = finish(pair[1], *requests)
        del requests
        views = [array.reshape(2, -1)[1, 5:9].view(np.uint8) for array in arrays]
        del arrays
        gc.collect()
        assert sum(fabric.lent(transport) for transport in pair) == 4
        for turn in range(4):  # new messages do not land in memory that is in use
            finish(pair[0], pair[0].isend(1, turn, np.zeros_like(sent)))
            got = finish(pair[1], pair[1].irecv(0, turn, spec_of(sent)))[0]
            del got
        half = len(sent) // 2
        for turn, view in enumerate(views):
            assert view.tobytes() == (sent + turn)[half + 5 : half + 9].tobytes()
        del view, views
        assert eventually(lambda: sum(fabric.lent(transport) for transport in pair) == 0)

    def test_jax_takes_an_array_over_without_a_copy(
        self, fabric: Fabric, pair: list[Transport]
    ) -> None:
        sent = np.arange(1 << 17, dtype=np.float32)
        finish(pair[0], pair[0].isend(1, 1, sent))
        request = pair[1].irecv(0, 1, spec_of(sent))
        (got,) = finish(pair[1], request)
        assert got.ctypes.data % 64 == 0
        array = jax.device_put(got, jax.devices("cpu")[0])
        array.block_until_ready()
        assert array.unsafe_buffer_pointer() == got.ctypes.data
        del got, request
        gc.collect()
        assert sum(fabric.lent(transport) for transport in pair) == 1
        finish(pair[0], pair[0].isend(1, 2, np.zeros_like(sent)))
        finish(pair[1], pair[1].irecv(0, 2, spec_of(sent)))
        np.testing.assert_array_equal(np.asarray(array), sent)
        del array
        assert eventually(lambda: sum(fabric.lent(transport) for transport in pair) == 0)

    def test_a_closed_transport_says_so(self, pair: list[Transport]) -> None:
        request = pair[0].irecv(1, 1, ArraySpec((2,), "int32"))
        pair[0].close()
        with pytest.raises(TransportError, match="closed"):
            pair[0].wait([request], timeout=PATIENCE)
        with pytest.raises(TransportError, match="closed"):
            pair[0].isend(1, 1, np.zeros((2,), np.int32))
        with pytest.raises(TransportError, match="closed"):
            pair[0].irecv(1, 1, ArraySpec((2,), "int32"))

    def test_threads_that_wait_for_different_tags(self, pair: list[Transport]) -> None:
        def waits(tag: int) -> Body:
            def body(transport: Transport) -> int:
                request = transport.irecv(0, tag, ArraySpec((1,), "int32"))
                return int(finish(transport, request)[0][0])

            return body

        def sends(transport: Transport) -> None:
            time.sleep(SHORT / 4)
            for tag in range(4):
                finish(transport, transport.isend(1, tag, np.full((1,), tag, np.int32)))

        one = pair[1]
        got = run_ranks([pair[0], *[one] * 4], sends, *(waits(tag) for tag in range(4)))
        assert got[1:] == [0, 1, 2, 3]

    def test_random_messages_between_all(
        self, fabric: Fabric, three: list[Transport], *, full: bool
    ) -> None:
        """Each rank posts sends and receives in an order of its own, and drops what it got."""
        for seed in range(40 if full else 3):
            plan = _random_messages(np.random.default_rng(seed), count=60)
            run_ranks(three, *(_carry_out(plan, seed) for _ in three))
        assert eventually(lambda: all(fabric.lent(transport) == 0 for transport in three))


@dataclass(frozen=True, slots=True)
class _Message:
    sender: int
    target: int
    tag: int
    array: np.ndarray[Any, Any]


def _random_messages(rng: np.random.Generator, *, count: int) -> list[_Message]:
    """Messages whose (sender, target, tag) occur once or several times."""
    made = []
    for _ in range(count):
        sender, target = map(int, rng.choice(3, size=2, replace=False))
        size = int(rng.choice([0, 1, 500, 16_000, 40_000, 300_000]))
        array = random_array((size,), str(rng.choice(["int8", "bfloat16", "complex64"])), rng)
        made.append(_Message(sender, target, int(rng.integers(8)), array))
    return made


def _carry_out(plan: Sequence[_Message], seed: int) -> Body:
    def body(transport: Transport) -> None:
        mine = [m for m in plan if transport.rank in (m.sender, m.target)]
        # Any interleaving of the (peer, tag) sequences, each of which keeps its order.
        rng = np.random.default_rng([seed, transport.rank])
        order = rng.permutation([_sequence(m) for m in mine]).tolist()
        queues = {key: deque(m for m in mine if _sequence(m) == key) for key in set(order)}
        posted: deque[tuple[Request, _Message]] = deque()
        for key in order:
            message = queues[key].popleft()
            if message.sender == transport.rank:
                request = transport.isend(message.target, message.tag, message.array)
            else:
                spec = spec_of(message.array)
                request = transport.irecv(message.sender, message.tag, spec)
            posted.append((request, message))
        for request, message in posted:
            (got,) = finish(transport, request)
            assert got is None or bits(got) == bits(message.array)

    return body


def _sequence(message: _Message) -> int:
    return message.sender * 100 + message.target * 10 + message.tag
