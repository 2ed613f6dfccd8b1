"""Two operating-system processes: this one is rank 0, `peer_process.py` is rank 1."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.errors import TransportError
from autopar.runtime.transport.base import ArraySpec, Transport
from tests.runtime.transport.contract import (
    PATIENCE,
    SHORT,
    bits,
    finish,
    nothing_left,
    random_array,
    spec_of,
)
from tests.runtime.transport.peer_process import make

ROOT = Path(__file__).resolve().parents[3]
SECRET = bytes(range(1, 33))


class Peer:
    """The other process."""

    def __init__(self, name: str, near: Transport) -> None:
        self.process = subprocess.Popen(
            (sys.executable, "-m", "tests.runtime.transport.peer_process"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        address = self.say(f"{name} {SECRET.hex()} {near.address}")
        assert address, "the other process did not start"
        near.connect({1: address}, timeout=PATIENCE)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, line: str) -> str:
        self.tell(line)
        return self.hear()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def two_ranks(name: str) -> Iterator[tuple[Transport, Peer]]:
    near = make(name, 0, SECRET)
    try:
        peer = Peer(name, near)
        try:
            yield near, peer
        finally:
            peer.end()
    finally:
        near.close()


def echo(near: Transport, peer: Peer, tag: int, array: np.ndarray[Any, Any]) -> None:
    peer.tell(f"echo {tag} {array.size} {array.dtype.name}")
    finish(near, near.isend(1, tag, array))
    got = finish(near, near.irecv(1, tag, spec_of(array)))[0]
    assert got.dtype == array.dtype
    assert bits(got) == bits(array)
    assert peer.hear() == "echoed"


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_arrays_and_aborts_between_processes(name: str) -> None:
    rng = np.random.default_rng(5)
    with nothing_left(), two_ranks(name) as (near, peer):
        for tag, size in enumerate((0, 1, 1000, 1 << 17, (1 << 22) + 1, 1 << 17)):
            for dtype in ("int8", "bfloat16", "complex64"):
                echo(near, peer, tag, random_array((size,), dtype, rng))
        assert peer.say("wait 77") == "waits"
        near.abort("no more time")
        text = peer.hear()
        assert "rank 1" in text
        assert "rank 0: no more time" in text
        peer.tell("quit")
        assert peer.process.wait(PATIENCE) == 0


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_a_killed_process_is_an_error_within_a_second_and_leaves_nothing(name: str) -> None:
    with nothing_left(), two_ranks(name) as (near, peer):
        large = np.full(1 << 20, 3, np.int8)
        finish(near, near.isend(1, 1, large))
        assert peer.say(f"hold 1 {large.size} int8") == "holds"
        assert peer.say(f"give 2 {1 << 20}") == "gave"
        got = finish(near, near.irecv(1, 2, ArraySpec((1 << 20,), "int8")))[0]

        # A process that hangs holds nobody up for longer than the time-out.
        peer.process.send_signal(signal.SIGSTOP)
        requests = [near.irecv(1, tag, spec_of(large)) for tag in (4, 5)]
        flood = np.zeros(1 << 22, np.int8)
        sends = [near.isend(1, tag, flood) for tag in range(20)]  # more than any buffer takes
        start = time.monotonic()
        with pytest.raises(TransportError) as caught:
            near.wait([*sends, *requests], timeout=SHORT)
        assert time.monotonic() - start < 1.0
        assert "from rank 1: tags 4, 5" in str(caught.value)
        assert "to rank 1: tag" in str(caught.value)

        peer.process.send_signal(signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(TransportError) as caught:
            near.wait(requests, timeout=PATIENCE)
        assert time.monotonic() - start < 1.0
        text = str(caught.value)
        assert "rank 0 lost rank 1" in text
        assert "from rank 1: tags 4, 5" in text
        assert all(request.done() for request in sends)
        with pytest.raises(TransportError, match="rank 1"):
            near.isend(1, 9, large)
        # What the dead process gave is still there.
        assert (got == 1).all()
        del got, flood, sends
