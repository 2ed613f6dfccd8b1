"""Strangers, wrong secrets, and peers that do not keep to the frames."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from autopar.errors import TransportError
from autopar.runtime.transport.base import DRIVER, ArraySpec, Transport
from autopar.runtime.transport.handshake import dial
from autopar.runtime.transport.shm import ShmTransport
from autopar.runtime.transport.tcp import TcpTransport
from autopar.runtime.transport.wire import PREFIX, Header, Kind, encode
from tests.runtime.transport.contract import (
    PATIENCE,
    SHORT,
    bits,
    connect_all,
    eventually,
    finish,
    nothing_left,
    spec_of,
)

SECRET, OTHER = bytes(range(32)), bytes(range(1, 33))
Make = Callable[[int, bytes], Transport]


def tcp(rank: int, secret: bytes) -> Transport:
    return TcpTransport(rank, secret=secret)


def shm(rank: int, secret: bytes) -> Transport:
    return ShmTransport(rank, secret=secret)


def raw_socket(address: str) -> socket.socket:
    scheme, _, rest = address.partition(":")
    if scheme == "shm":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(f"\0{rest}")
        return sock
    host, _, port = rest.rpartition(":")
    return socket.create_connection((host, int(port)))


def _hung_up(sock: socket.socket) -> bool:
    """Read until the end, which must come before the time-out of the socket."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def works(one: Transport, other: Transport, tag: int) -> None:
    array = np.arange(5, dtype=np.int32)
    finish(one, one.isend(other.rank, tag, array))
    got = finish(other, other.irecv(one.rank, tag, spec_of(array)))[0]
    assert bits(got) == bits(array)


@pytest.fixture(params=[tcp, shm])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[Transport] = []

    def keep(rank: int, secret: bytes) -> Transport:
        made.append(request.param(rank, secret))
        return made[-1]

    with nothing_left():
        yield keep
        for transport in made:
            transport.close()


def test_a_wrong_secret_is_refused_by_name_and_disturbs_nobody(make: Make) -> None:
    zero, one, stranger = make(0, SECRET), make(1, SECRET), make(2, OTHER)
    connect_all([zero, one])
    with pytest.raises(TransportError) as caught:
        stranger.connect({0: zero.address}, timeout=PATIENCE)
    text = str(caught.value)
    assert "rank 2 cannot connect to rank 0" in text
    assert "another secret" in text
    assert zero.address in text
    with pytest.raises(TransportError) as caught:
        zero.connect({1: one.address, 2: stranger.address}, timeout=SHORT)
    text = str(caught.value)
    assert "rank 2 did not connect to rank 0 within 0.2 s" in text
    assert "says that it is rank 2, but it has another secret" in text
    works(zero, one, 1)
    works(one, zero, 2)
    # The real rank 2 is welcome afterwards.
    connect_all([zero, one, make(2, SECRET)])


def test_an_acceptor_must_know_the_secret_too() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        # It repeats what it hears: right magic, right ranks, but no proof of its own.
        theirs.sendall(struct.pack("<8si32s", b"autopar\x01", 0, bytes(32)))
        theirs.sendall(struct.pack("<B32s", 1, bytes(32)))
        with pytest.raises(TransportError, match="another secret"):
            dial(ours, secret=SECRET, rank=1, peer=0, deadline=time.monotonic() + PATIENCE)


def test_a_proof_cannot_be_reflected() -> None:
    """Who does not know the secret and sends our own proof back is no acceptor."""
    ours, theirs = socket.socketpair()

    def reflect() -> None:
        theirs.sendall(struct.pack("<8si32s", b"autopar\x01", 0, bytes(32)))
        hello = theirs.recv(4096)
        theirs.sendall(b"\x01" + hello[-32:])

    with ours, theirs:
        thread = threading.Thread(target=reflect)
        thread.start()
        with pytest.raises(TransportError, match="another secret"):
            dial(ours, secret=SECRET, rank=1, peer=0, deadline=time.monotonic() + PATIENCE)
        thread.join()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n" * 10, os.urandom(300), b"\0" * 76])
def test_strangers_are_sent_away(make: Make, said: bytes) -> None:
    zero, one = make(0, SECRET), make(1, SECRET)
    with raw_socket(zero.address) as stranger:
        if said:
            stranger.sendall(said)
        connect_all([zero, one])  # a stranger holds nobody up
        works(one, zero, 3)
        if said:
            stranger.settimeout(PATIENCE)
            assert _hung_up(stranger)
        works(zero, one, 4)


def test_a_rank_connects_once(make: Make) -> None:
    zero, one, twin = make(0, SECRET), make(1, SECRET), make(1, SECRET)
    connect_all([zero, one])
    with pytest.raises(TransportError, match="cannot connect to rank 0") as caught:
        twin.connect({0: zero.address}, timeout=PATIENCE)
    assert "a connection of this rank already" in str(caught.value)
    works(zero, one, 1)


def test_the_driver_is_a_rank_like_others(make: Make) -> None:
    ranks = [make(rank, SECRET) for rank in (1, DRIVER, 0)]
    connect_all(ranks)
    one, driver, zero = ranks
    works(one, driver, 1)
    works(driver, zero, 2)
    with pytest.raises(TransportError, match="rank -1"):
        driver.wait([driver.irecv(0, 5, ArraySpec((1,), "int8"))], timeout=SHORT / 4)


def test_an_aborted_rank_lets_nobody_in(make: Make) -> None:
    zero, one = make(0, SECRET), make(1, SECRET)
    zero.abort("too late")
    with pytest.raises(TransportError, match="too late"):
        zero.connect({1: one.address}, timeout=PATIENCE)
    with pytest.raises(TransportError, match="rank 1 cannot connect to rank 0"):
        one.connect({0: zero.address}, timeout=PATIENCE)


def test_an_address_of_another_rank(make: Make) -> None:
    zero, one, two = make(0, SECRET), make(1, SECRET), make(2, SECRET)
    with pytest.raises(TransportError, match="rank 2 cannot connect to rank 1") as caught:
        two.connect({1: zero.address}, timeout=PATIENCE)
    assert "who answers is rank 0" in str(caught.value)
    connect_all([zero, one, two])


@pytest.mark.parametrize("address", ["", "tcp:127.0.0.1:1", "shm:autopar-nobody", "tcp:x", "9"])
def test_an_address_where_nobody_is(make: Make, address: str) -> None:
    with pytest.raises(TransportError, match="rank 1 cannot connect to rank 0"):
        make(1, SECRET).connect({0: address}, timeout=PATIENCE)


def test_who_answers_nothing() -> None:
    with nothing_left(), socket.create_server(("127.0.0.1", 0)) as silent:
        one = tcp(1, SECRET)
        address = f"tcp:127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(TransportError, match="rank 1 cannot connect to rank 0") as caught:
            one.connect({0: address}, timeout=SHORT)
        assert address in str(caught.value)
        one.close()


def test_a_short_secret(make: Make) -> None:
    with pytest.raises(TransportError, match="too short"):
        make(0, b"secret")


def test_a_rank_that_never_comes(make: Make) -> None:
    zero = make(0, SECRET)
    with pytest.raises(TransportError, match=r"rank 1, rank 3 did not connect to rank 0"):
        zero.connect({1: "", 3: ""}, timeout=SHORT)


def test_a_dialer_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    zero, one = shm(0, SECRET), shm(1, SECRET)
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(TransportError, match="rank 1 cannot connect to rank 0"):
        one.connect({0: zero.address}, timeout=PATIENCE)
    with pytest.raises(TransportError, match=f"was refused: it is of user {mine}"):
        zero.connect({1: one.address}, timeout=SHORT)
    monkeypatch.undo()
    connect_all([zero, one])
    zero.close()
    one.close()


def test_an_abort_reaches_ranks_that_are_connected_through_others(make: Make) -> None:
    chain = [make(rank, SECRET) for rank in range(4)]
    for one, other in pairwise(chain):
        connect_all([one, other])
    request = chain[3].irecv(2, 1, ArraySpec((2,), "int32"))
    chain[0].abort("the first rank stops")
    with pytest.raises(TransportError, match="rank 0: the first rank stops") as caught:
        chain[3].wait([request], timeout=PATIENCE)
    assert "the transfers of rank 3 were aborted" in str(caught.value)


def test_an_abort_passes_by_what_waits_to_be_sent(make: Make) -> None:
    """A peer that is slow to read hears of it at the next frame, not after all of them."""
    zero, one = make(0, SECRET), make(1, SECRET)
    connect_all([zero, one])
    array = np.zeros(30_000, np.int8)  # too small for shared memory
    sends = [zero.isend(1, tag, array) for tag in range(300)]
    request = one.irecv(0, 999, ArraySpec((2,), "int32"))
    zero.abort("enough")
    with pytest.raises(TransportError, match="rank 0: enough"):
        one.wait([request], timeout=PATIENCE)
    assert all(send.done() for send in sends)


def _array_header(**changed: Any) -> bytes:
    values: dict[str, Any] = {"tag": 1, "nbytes": 8, "spec": ArraySpec((2,), "int32")} | changed
    return encode(Header(Kind.MESSAGE, **values))


BROKEN = {
    "no kind": bytes(PREFIX.size),
    "too many dims": bytes([1, 65]) + bytes(PREFIX.size),
    "unknown dtype": _array_header(spec=ArraySpec((2,), "object")),
    "other size": _array_header(nbytes=9),
    "huge": _array_header(nbytes=8 << 60, spec=ArraySpec((2 << 60,), "int32")),
    "overflow": _array_header(nbytes=0, spec=ArraySpec((1 << 63, 4), "int32")),
    "long reason": encode(Header(Kind.ABORT, nbytes=1 << 40)),
    "no arena": encode(Header(Kind.PLACED, nbytes=8, spec=ArraySpec((2,), "int32"), arena=3)),
    "no descriptor": encode(Header(Kind.ARENA, nbytes=1 << 20)),
    "half a header": _array_header()[:20],
    "half an array": _array_header() + b"1234",
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_frames_lose_the_peer_that_sent_them(make: Make, name: str) -> None:
    zero, one = make(0, SECRET), make(1, SECRET)
    connect_all([zero, one])
    with raw_socket(zero.address) as rogue:
        dial(rogue, secret=SECRET, rank=2, peer=0, deadline=time.monotonic() + PATIENCE)
        zero.connect({2: ""}, timeout=PATIENCE)
        request = zero.irecv(2, 1, ArraySpec((2,), "int32"))
        rogue.sendall(BROKEN[name])
        if name.startswith("half"):
            rogue.shutdown(socket.SHUT_WR)
        with pytest.raises(TransportError, match="rank 0 lost rank 2"):
            zero.wait([request], timeout=PATIENCE)
    works(one, zero, 3)


def test_shared_memory_that_is_smaller_than_it_says() -> None:
    zero = ShmTransport(0, secret=SECRET)
    with nothing_left(), raw_socket(zero.address) as rogue:
        dial(rogue, secret=SECRET, rank=2, peer=0, deadline=time.monotonic() + PATIENCE)
        zero.connect({2: ""}, timeout=PATIENCE)
        request = zero.irecv(2, 1, ArraySpec((2,), "int32"))
        memory = os.memfd_create("small")
        os.ftruncate(memory, 4096)
        socket.send_fds(rogue, [encode(Header(Kind.ARENA, nbytes=1 << 20))], [memory])
        os.close(memory)
        with pytest.raises(TransportError, match="cannot be mapped"):
            zero.wait([request], timeout=PATIENCE)
    zero.close()


def test_a_block_outside_of_its_arena() -> None:
    zero = ShmTransport(0, secret=SECRET)
    with raw_socket(zero.address) as rogue:
        dial(rogue, secret=SECRET, rank=2, peer=0, deadline=time.monotonic() + PATIENCE)
        zero.connect({2: ""}, timeout=PATIENCE)
        request = zero.irecv(2, 1, ArraySpec((2,), "int32"))
        memory = os.memfd_create("small")
        os.ftruncate(memory, 4096)
        socket.send_fds(rogue, [encode(Header(Kind.ARENA, nbytes=4096))], [memory])
        os.close(memory)
        spec = ArraySpec((2,), "int32")
        rogue.sendall(encode(Header(Kind.PLACED, 1, 8, spec, arena=0, offset=4096)))
        with pytest.raises(TransportError, match="rank 0 lost rank 2"):
            zero.wait([request], timeout=PATIENCE)
    assert eventually(request.done)
    zero.close()
