"""Rank 1 as a process of its own, for the tests: `python -m tests.runtime.transport.peer_process`.

Its first line of input says `transport secret address`; it answers with its own address, connects
to rank 0, and then does what each further line says, and prints a line when it has:

    echo tag size dtype     receive [size] from rank 0 and send it back under the same tag
    hold tag size dtype     receive, and keep it until the process ends
    give tag size           send int8 [size] of ones
    wait tag                wait for what never comes; prints the first line of the error
    quit                    close, and end
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from autopar.errors import TransportError
from autopar.runtime.transport.base import ArraySpec, Transport
from autopar.runtime.transport.shm import ShmTransport
from autopar.runtime.transport.tcp import TcpTransport

PATIENCE = 20.0
CAPACITY = 1 << 24


def make(name: str, rank: int, secret: bytes) -> Transport:
    """A transport of that name."""
    if name == "tcp":
        return TcpTransport(rank, secret=secret)
    return ShmTransport(rank, secret=secret, capacity=CAPACITY)


def _receive(transport: Transport, tag: str, size: str, dtype: str) -> Any:
    request = transport.irecv(0, int(tag), ArraySpec((int(size),), dtype))
    transport.wait([request], timeout=PATIENCE)
    return request.result()


def main() -> None:
    """Do what the input says."""
    name, secret, address = sys.stdin.readline().split()
    transport = make(name, 1, bytes.fromhex(secret))
    print(transport.address, flush=True)
    transport.connect({0: address}, timeout=PATIENCE)
    held = []
    for line in sys.stdin:
        match line.split():
            case ["echo", tag, size, dtype]:
                array = _receive(transport, tag, size, dtype)
                transport.wait([transport.isend(0, int(tag), array)], timeout=PATIENCE)
                del array
                print("echoed", flush=True)
            case ["hold", tag, size, dtype]:
                held.append(_receive(transport, tag, size, dtype))
                print("holds", flush=True)
            case ["give", tag, size]:
                ones = np.ones(int(size), np.int8)
                transport.wait([transport.isend(0, int(tag), ones)], timeout=PATIENCE)
                print("gave", flush=True)
            case ["wait", tag]:
                request = transport.irecv(0, int(tag), ArraySpec((1,), "int8"))
                print("waits", flush=True)
                try:
                    transport.wait([request], timeout=PATIENCE)
                except TransportError as error:
                    print(str(error).replace("\n", " | "), flush=True)
            case ["quit"]:
                break
    transport.close()


if __name__ == "__main__":
    main()
