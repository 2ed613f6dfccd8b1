"""A worker in a process of its own: does what its driver says, until the driver is gone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import jax

from autopar.errors import AutoparError, TransportError, WorkerError
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import replicated
from autopar.lower.cross_mesh import TilePlan, plan_tiles
from autopar.lower.instruction_text import worker_program_from_json
from autopar.lower.instructions import BufferSpec, Key, WorkerProgram
from autopar.runtime.board import BoardRow
from autopar.runtime.control import (
    FAILED,
    FED,
    FIRST_ARRAY_TAG,
    OK,
    Kind,
    frame_size,
    receive_message,
    send_reply,
)
from autopar.runtime.executor import Event
from autopar.runtime.transfer import message_tag
from autopar.runtime.transport.base import DRIVER, ArraySpec, Transport
from autopar.runtime.transport.shm import ShmTransport
from autopar.runtime.transport.tcp import TcpTransport
from autopar.runtime.worker import Worker

ONE = Mesh(("x",), (1,))
"""The driver's end of a transfer: it holds whole arrays."""

FOREVER = 10.0 * 365 * 86400
"""Seconds that a worker waits for its driver's next word: it ends when the driver is gone."""


def feed_plan(spec: BufferSpec, mesh: Mesh) -> TilePlan:
    """From the driver's whole array to a worker's buffer."""
    whole = replicated(len(spec.shape))
    return plan_tiles(spec.shape, spec.dtype, ONE, whole, mesh, spec.sharding)


def fetch_plan(spec: BufferSpec, mesh: Mesh) -> TilePlan:
    """From a worker's array to the driver."""
    whole = replicated(len(spec.shape))
    return plan_tiles(spec.shape, spec.dtype, mesh, spec.sharding, ONE, whole)


def make_transport(kind: str, rank: int, secret: bytes, host: str) -> Transport:
    """One rank's end: `shm` on one host, `tcp` between hosts."""
    if kind == "shm":
        return ShmTransport(rank, secret=secret)
    return TcpTransport(rank, secret=secret, host=host)


class RemoteWorker:
    """Owns the devices of its process.

    Args:
        rank: of the worker.
        secret: of the run.
        kind: of transport.
        host: on which TCP listens.
        board: path of the progress board; empty where the driver is on another host.
        timeout: seconds that a wait inside a step may take.
    """

    def __init__(
        self, rank: int, secret: bytes, kind: str, host: str, board: str, timeout: float
    ) -> None:
        self.rank = rank
        self.timeout = timeout
        self._transport = make_transport(kind, rank, secret, host)
        row = BoardRow(board, rank) if board else None
        self._events: list[Event] | None = None
        self._worker = Worker(
            timeout=timeout, recorder=self._record, report=row.write if row else None
        )
        self._program: WorkerProgram | None = None
        self._specs: dict[int, BufferSpec] = {}
        self._last = (-1, -1)
        self._feeds: tuple[tuple[Key, BufferSpec], ...] = ()

    def _record(self, event: Event) -> None:
        if self._events is not None:
            self._events.append(event)

    def address(self) -> str:
        """Where peers reach it."""
        return self._transport.address

    def connect(self, ranks: Sequence[int], addresses: Sequence[str], timeout: float) -> None:
        """Connect to the driver and to all other workers."""
        peers = dict(zip(ranks, addresses, strict=True))
        peers.pop(self.rank, None)
        self._transport.connect(peers, timeout=timeout)

    def load(self, program: str, names: Sequence[str], codes: Sequence[bytes]) -> int:
        """Compile all tasks and place closed-over arrays, which come over the transport.

        Returns:
            The process's id.
        """
        made = worker_program_from_json(json.loads(program))
        specs = made.specs()
        hidden: dict[int, Any] = {}
        for buffer, index in made.hidden:
            spec = ArraySpec(specs[buffer].shape, specs[buffer].dtype)
            request = self._transport.irecv(DRIVER, message_tag(FIRST_ARRAY_TAG, index), spec)
            self._transport.wait([request], timeout=self.timeout)
            hidden[index] = request.result()
        arrays = [hidden.get(index) for index in range(max(hidden, default=-1) + 1)]
        devices = jax.local_devices()[: made.mesh.size]
        code: Mapping[str, Any] = dict(zip(names, codes, strict=True))
        self._worker.load(made, code, devices, self._transport, arrays)
        self._program = made
        self._feeds = made.feeds()
        self._results = made.results()
        self._plans = [feed_plan(spec, made.mesh) for _, spec in self._feeds]
        return os.getpid()

    def serve(self) -> str:
        """Do what the driver says until it says END or is gone.

        Returns:
            A JSON text: what went wrong, or empty.
        """
        try:
            while True:
                kind, body = receive_message(
                    self._transport, DRIVER, frame_size(len(self._feeds)), FOREVER
                )
                if kind is Kind.END:
                    return ""
                send_reply(self._transport, DRIVER, *self._do(kind, body), self.timeout)
        except TransportError as error:
            return error_text(error, aborted=True)
        except WorkerError as error:
            aborted = isinstance(error.__cause__, TransportError)
            return error_text(error, aborted=aborted)
        except Exception as error:  # told to the driver, whatever it is
            self._transport.abort(str(error))
            return error_text(error, aborted=False)
        finally:
            self.where()  # the driver may ask yet
            self._worker.close()
            self._transport.close()

    def _do(self, kind: Kind, body: Sequence[int]) -> tuple[int, str]:
        if kind is Kind.STEP:
            self._step(body)
            return OK, ""
        try:
            return OK, self._small(kind, body)
        except WorkerError as error:
            return FAILED, error_text(error, aborted=False)

    def _small(self, kind: Kind, body: Sequence[int]) -> str:
        """What is no step."""
        if kind is Kind.PUT:
            self._receive(body[0], body[1])
        elif kind is Kind.FETCH:
            self._fetch(*body)
        elif kind is Kind.DELETE:
            self._delete(body)
        elif kind is Kind.EVENTS:
            events, self._events = self._events, [] if body[0] else None
            return json.dumps([asdict(event) for event in events or ()])
        elif kind is Kind.STATS:
            return json.dumps({**asdict(self._worker.stats()), "rss": _resident_bytes()})
        return ""

    def _step(self, body: Sequence[int]) -> None:
        number, first = body[:2]
        count = len(self._feeds)
        handles = body[2 : 2 + count]
        flags = body[2 + count : 2 + 2 * count]
        self._delete(body[2 + 2 * count :])
        args: dict[Key, int] = {}
        gone: set[Key] = set()
        for place, ((key, _), handle, flag) in enumerate(
            zip(self._feeds, handles, flags, strict=True)
        ):
            if handle == FED:
                handle = -2 - place
                self._receive(place, handle)
                gone.add(key)
            elif flag:
                gone.add(key)
            args[key] = handle
        results = {index: first + place for place, (index, _) in enumerate(self._results)}
        self._worker.step(number, args, results, gone)
        self._specs.update((first + n, spec) for n, (_, spec) in enumerate(self._results))

    def _receive(self, place: int, handle: int) -> None:
        plan = self._plans[place]
        self._worker.receive(handle, plan, DRIVER, FIRST_ARRAY_TAG + 1 + place)
        self._specs[handle] = self._feeds[place][1]

    def _fetch(self, handle: int, tag: int) -> None:
        assert self._program is not None
        spec = self._specs.get(handle)
        if spec is None:
            raise WorkerError(f"there is no array with the handle {handle}")
        self._worker.send(handle, fetch_plan(spec, self._program.mesh), DRIVER, tag)

    def _delete(self, handles: Sequence[int]) -> None:
        self._worker.delete(handles)
        for handle in handles:
            self._specs.pop(handle, None)

    def where(self) -> tuple[int, int]:
        """(step, position) of the worker, from another thread."""
        if (progress := self._worker.progress()) is not None:
            self._last = (progress.step, progress.position)
        return self._last

    def abort(self, reason: str) -> None:
        """End what is under way, from another thread."""
        self._worker.abort(reason)
        self._transport.abort(reason)


def error_text(error: Exception, *, aborted: bool) -> str:
    """An error as JSON: what, all of it, and whether it only follows another rank's."""
    what = error.what if isinstance(error, AutoparError) else f"{type(error).__name__}: {error}"
    return json.dumps({"what": what, "text": str(error), "aborted": aborted})


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
