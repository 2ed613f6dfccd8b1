"""How much of the speed of a memory copy does each transport reach?

`python -m benchmarks.transport [--pairs N] [--json FILE]`

Two processes (for `in-process`: two ranks of one) on this host. A large message is timed from its
sending to the receipt of an empty answer, which its receiver sends when it holds the array; a small
one as half of a round trip. The yardstick is `numpy.copyto` between warm buffers of the same size
in the sender's process, in pairs of random order (see `pairs.py`). Buffers of all sides are warm.

    share of memcpy   time of the copy over time of the message: its throughput, as a share
    copies            time of a small message, in copies of as many bytes

The target: shared memory has a share of at least 0.7 for 64 MB, by the lower end of the interval.
"""

from __future__ import annotations

import argparse
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from autopar.runtime.transport.base import ArraySpec, Transport
from autopar.runtime.transport.in_process import InProcessHub
from autopar.runtime.transport.shm import ShmTransport
from autopar.runtime.transport.tcp import TcpTransport
from benchmarks.pairs import Interval, median_interval, time_pairs

LARGE, SMALL = 64_000_000, 1_000
ROUNDS_OF_SMALL = 200
COPIES_OF_SMALL = 2_000
WARM_UP = 4
PATIENCE = 60.0
TARGET = 0.7

ORDER, DATA, ANSWER = 0, 1, 2
"""Tags: what comes next (bytes, bytes of the answer, how often), the messages, the answers."""

MAKERS: dict[str, Callable[[int, bytes], Transport]] = {
    "shared-memory": lambda rank, secret: ShmTransport(rank, secret=secret),
    "shared-memory-socket": lambda rank, secret: ShmTransport(rank, secret=secret, capacity=0),
    "tcp": lambda rank, secret: TcpTransport(rank, secret=secret),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One transport.

    Attributes:
        transport: its name.
        share: of memcpy's throughput, for `LARGE` bytes.
        copies: of `SMALL` bytes that take as long as a message of them one way.
    """

    transport: str
    share: Interval
    copies: Interval


def copies(size: int, count: int) -> Callable[[], float]:
    """Seconds of one warm copy, the mean of `count`."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)

    def run() -> float:
        start = time.perf_counter()
        for _ in range(count):
            np.copyto(target, source)
        return (time.perf_counter() - start) / count

    return run


def receive(transport: Transport, peer: int, tag: int, size: int) -> np.ndarray:
    """Receive uint8 [size]."""
    request = transport.irecv(peer, tag, ArraySpec((size,), "uint8"))
    transport.wait([request], timeout=PATIENCE)
    return np.asarray(request.result())


def answer(transport: Transport) -> None:
    """The far side: do as rank 0 orders, until it orders nothing."""
    while True:
        request = transport.irecv(0, ORDER, ArraySpec((3,), "int64"))
        transport.wait([request], timeout=PATIENCE)
        size, back, count = map(int, request.result())
        del request
        if count == 0:
            return
        reply = np.ones(back, np.uint8)
        for _ in range(count):
            receive(transport, 0, DATA, size)
            transport.isend(0, ANSWER, reply)


def message(transport: Transport, size: int, back: int, count: int) -> Callable[[], float]:
    """Seconds of one message and its answer, the mean of `count`."""
    source = np.ones(size, np.uint8)

    def run() -> float:
        order = transport.isend(1, ORDER, np.array([size, back, count], np.int64))
        transport.wait([order], timeout=PATIENCE)
        time.sleep(0.002)  # the far side is waiting now
        start = time.perf_counter()
        for _ in range(count):
            transport.isend(1, DATA, source)
            receive(transport, 1, ANSWER, back)
        return (time.perf_counter() - start) / count

    return run


def stop(transport: Transport) -> None:
    """Order nothing more of the far side."""
    transport.wait([transport.isend(1, ORDER, np.zeros(3, np.int64))], timeout=PATIENCE)


def within(hub: InProcessHub, size: int, count: int) -> Callable[[], float]:
    """Seconds of one message between two ranks of this process, the mean of `count`."""
    ends = [hub.transport(rank) for rank in (0, 1)]
    for end in ends:
        end.connect({1 - end.rank: ""}, timeout=PATIENCE)
    source = np.ones(size, np.uint8)

    def run() -> float:
        start = time.perf_counter()
        for _ in range(count):
            ends[0].isend(1, DATA, source)
            receive(ends[1], 0, DATA, size)
        return (time.perf_counter() - start) / count

    return run


@contextmanager
def far_side(name: str) -> Iterator[Transport]:
    """Rank 0 here, connected to a rank 1 in a process of its own."""
    secret = secrets.token_bytes(32)
    near = MAKERS[name](0, secret)
    far = subprocess.Popen(
        (sys.executable, "-m", "benchmarks.transport", "--far", name),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert far.stdin is not None
        assert far.stdout is not None
        far.stdin.write(f"{secret.hex()} {near.address}\n")  # not where `ps` would show it
        far.stdin.flush()
        near.connect({1: far.stdout.readline().strip()}, timeout=PATIENCE)
        yield near
        stop(near)
        far.wait(PATIENCE)
    finally:
        far.kill()
        far.communicate()
        near.close()


def be_far_side(name: str) -> None:
    """Rank 1, as a process of its own."""
    secret, address = sys.stdin.readline().split()
    far = MAKERS[name](1, bytes.fromhex(secret))
    print(far.address, flush=True)
    far.connect({0: address}, timeout=PATIENCE)
    answer(far)
    far.close()


def compare(
    name: str, large: Callable[[], float], small: Callable[[], float], *, pairs: int, seed: int
) -> Row:
    """Time both sizes of a transport against copies."""
    copy_large, copy_small = copies(LARGE, 1), copies(SMALL, COPIES_OF_SMALL)
    for run in (large, small, copy_large, copy_small):
        for _ in range(WARM_UP):
            run()
    shares = [pair.ratio for pair in time_pairs(copy_large, large, pairs=pairs, seed=seed)]
    counts = [pair.ratio for pair in time_pairs(small, copy_small, pairs=pairs, seed=seed)]
    return Row(name, median_interval(shares, seed=seed), median_interval(counts, seed=seed))


def measure(*, pairs: int, seed: int) -> tuple[Row, ...]:
    """All transports."""
    rows = []
    for name in MAKERS:
        with far_side(name) as near:
            there_and_back = message(near, SMALL, SMALL, ROUNDS_OF_SMALL)

            def half(run: Callable[[], float] = there_and_back) -> float:
                return run() / 2

            rows.append(compare(name, message(near, LARGE, 0, 1), half, pairs=pairs, seed=seed))
    large = within(InProcessHub(), LARGE, 1)
    small = within(InProcessHub(), SMALL, ROUNDS_OF_SMALL)
    rows.append(compare("in-process", large, small, pairs=pairs, seed=seed))
    return tuple(rows)


def passed(rows: Sequence[Row]) -> bool:
    """Whether shared memory is fast enough."""
    return all(row.share.low >= TARGET for row in rows if row.transport == "shared-memory")


def table(rows: Sequence[Row]) -> str:
    """The rows for people."""
    lines = [f"{'':22}{'64 MB: share of memcpy':>26}{'1 KB: copies':>26}"]
    for row in rows:
        share, count = (
            f"{interval.median:{form}} [{interval.low:{form}}, {interval.high:{form}}]"
            for interval, form in ((row.share, ".3f"), (row.copies, ".0f"))
        )
        lines.append(f"{row.transport:22}{share:>26}{count:>26}")
    lines.append(f"shared memory at least {TARGET}: {passed(rows)}")
    return "\n".join(lines)


def main() -> int:
    """Measure; the exit status says whether the target is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--far", choices=sorted(MAKERS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.far:
        be_far_side(options.far)
        return 0
    rows = measure(pairs=options.pairs, seed=options.seed)
    print(table(rows))
    if options.json:
        record = {"rows": [asdict(row) for row in rows], "passed": passed(rows)}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if passed(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
