"""Workers as Ray actors: the only module that imports Ray.

Ray starts the processes, tells who has died, and ends them. Everything else (what to do, batches,
results, activations) goes over our own transport, which also tells a lost peer within milliseconds.
Ray's calls carry only bytes, strings and numbers, and none of them is made in a step.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import ray

from autopar.errors import ClusterError, TransportError, WorkerError
from autopar.lower.cross_mesh import TilePlan, source_slice, target_slices
from autopar.lower.instruction_text import instruction_text, worker_program_to_json
from autopar.lower.instructions import WHOLE, ArgumentUse, BufferSpec, StepProgram
from autopar.runtime.arrays import DistributedArray
from autopar.runtime.board import Board
from autopar.runtime.control import (
    DELETES,
    FAILED,
    FED,
    FIRST_ARRAY_TAG,
    Kind,
    expect_reply,
    frame_size,
    read_reply,
    send_message,
)
from autopar.runtime.pipeline import micro_part
from autopar.runtime.remote_worker import (
    Key,
    RemoteWorker,
    feed_plan,
    feeds_of,
    fetch_plan,
    make_transport,
    results_of,
)
from autopar.runtime.transfer import message_tag
from autopar.runtime.transport.base import DRIVER, ArraySpec

LOG = logging.getLogger(__name__)

START_SECONDS = 180.0
"""Until all workers are up, connected, and have compiled their tasks."""

HANG_SECONDS = 120.0
"""A worker whose position has not changed for so long hangs, unless something is being compiled."""

GRACE_SECONDS = 2.0
"""How long workers may take to say what went wrong, once something has."""

POLL_SECONDS = 0.5

THREADS_PER_DEVICE = 4


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that Ray reads when it starts; restored afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def start_ray(address: str | None) -> bool:
    """Connect to a running Ray, or start one on this machine alone; whether it was started.

    A Ray of ours listens on the loopback interface, with a token of this run: left alone it writes
    one into the user's home and listens everywhere.
    """
    if ray.is_initialized():
        return False
    if address is not None:
        ray.init(address=address, log_to_driver=False)
        return False
    LOG.info("starting a local Ray")
    token = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with _environment(token), warnings.catch_warnings():
        # Ray's processes are started by fork and exec; nothing of JAX runs in between.
        warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
        warnings.filterwarnings("ignore", category=FutureWarning, module="ray")
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address="127.0.0.1",
            object_store_memory=80 * 2**20,
        )
    return True


class _Actor(RemoteWorker):
    """A worker in an actor; `serve` runs while `where` and `abort` answer."""


@dataclass
class _Peer:
    """What the driver knows of one worker."""

    rank: int
    stage: str
    actor: Any
    feeds: tuple[tuple[Key, BufferSpec], ...]
    plans: tuple[TilePlan, ...]
    results: tuple[tuple[int, BufferSpec], ...]
    texts: tuple[str, ...]
    serving: Any = None
    pid: int = 0
    unwanted: list[int] = field(default_factory=list)


class RayPipeline:
    """A step program on Ray workers, one a stage.

    Args:
        step: verified.
        code: per worker, per task its `jax.export` bytes.
        hidden: closed-over arrays.
        address: of a running Ray; None starts a local one.
        timeout: seconds that a wait inside a step may take.
        hang_seconds: a worker that does not move for so long is given up.
        progress: told what is being done.

    Raises:
        ClusterError: workers did not start.
    """

    def __init__(  # noqa: PLR0913 - a keyword each
        self,
        step: StepProgram,
        code: Sequence[Mapping[str, bytes]],
        hidden: Sequence[Any] = (),
        *,
        address: str | None = None,
        timeout: float = 60.0,
        hang_seconds: float = HANG_SECONDS,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.step = step
        self.timeout = timeout
        self.hang_seconds = hang_seconds
        self._lock = threading.RLock()
        self._closed = ""
        self._pending: dict[int, Any] = {}
        self._number = 0
        self._next = 0
        self._sent = 0
        self._folder = Path(tempfile.mkdtemp(prefix="autopar-"))
        self._board = Board(self._folder, len(step.workers))
        self._peers: list[_Peer] = []
        self._transport: Any = None
        progress("starting Ray")
        self._owns_ray = start_ray(address)
        self._finalizer = weakref.finalize(
            self, _clean_up, self._peers, self._folder, self._owns_ray
        )
        atexit.register(self._finalizer)
        try:
            self._start(code, hidden, progress, local=address is None)
        except Exception as error:
            self.close()
            if isinstance(error, WorkerError | TransportError | ClusterError):
                raise
            raise ClusterError(
                "the Ray workers did not start", got=f"{type(error).__name__}: {error}"
            ) from error
        self._uses = step.arguments

    # --- start ---------------------------------------------------------------------------------

    def _start(
        self,
        code: Sequence[Mapping[str, bytes]],
        hidden: Sequence[Any],
        progress: Callable[[str], None],
        *,
        local: bool,
    ) -> None:
        secret = secrets.token_bytes(32)
        kind = "shm" if local else "tcp"
        host = "127.0.0.1" if local else ray.util.get_node_ip_address()
        board = str(self._board.path) if local else ""
        progress(f"starting {len(self.step.workers)} workers")
        for worker in self.step.workers:
            actor = _actor(worker.mesh.size, worker.rank, worker.stage).remote(
                worker.rank, secret, kind, host, board, self.timeout
            )
            feeds = feeds_of(worker)
            self._peers.append(
                _Peer(
                    worker.rank,
                    worker.stage,
                    actor,
                    feeds,
                    tuple(feed_plan(spec, worker.mesh) for _, spec in feeds),
                    results_of(worker),
                    tuple(map(instruction_text, worker.instructions)),
                )
            )
        self._transport = make_transport(kind, DRIVER, secret, host)
        addresses = self._all(lambda peer: peer.actor.address.remote())
        ranks = [DRIVER, *(peer.rank for peer in self._peers)]
        everyone = [self._transport.address, *addresses]
        progress("connecting workers")
        joining = [p.actor.connect.remote(ranks, everyone, START_SECONDS) for p in self._peers]
        self._transport.connect(dict(zip(ranks[1:], addresses, strict=True)), timeout=START_SECONDS)
        ray.get(joining, timeout=START_SECONDS)
        progress("compiling on the workers")
        loading = []
        for peer, worker, tasks in zip(self._peers, self.step.workers, code, strict=True):
            text = json.dumps(worker_program_to_json(worker))
            names = sorted(tasks)
            loading.append(peer.actor.load.remote(text, names, [tasks[n] for n in names]))
            self._send_hidden(worker.hidden, peer.rank, hidden)
        for peer, pid in zip(self._peers, ray.get(loading, timeout=START_SECONDS), strict=True):
            peer.pid = pid
            peer.serving = peer.actor.serve.remote()

    def _send_hidden(
        self, wanted: Sequence[tuple[str, int]], rank: int, hidden: Sequence[Any]
    ) -> None:
        requests = [
            self._transport.isend(
                rank, message_tag(FIRST_ARRAY_TAG, index), _contiguous(np.asarray(hidden[index]))
            )
            for _, index in wanted
        ]
        self._transport.wait(requests, timeout=START_SECONDS)

    def _all(self, call: Callable[[_Peer], Any]) -> list[Any]:
        found: list[Any] = ray.get([call(peer) for peer in self._peers], timeout=START_SECONDS)
        return found

    # --- a step --------------------------------------------------------------------------------

    def run(self, leaves: Sequence[Any]) -> list[DistributedArray]:
        """One step: argument leaves to arrays that stay on the workers.

        It returns when all workers have been told; what goes wrong in it is raised by whoever next
        waits for it.

        Raises:
            WorkerError: the step before failed, or an argument was given away already.
        """
        with self._lock:
            self.settle()
            number, self._number = self._number, self._number + 1
            plan = self._arguments(leaves)
            first = self._next
            self._next += max((len(peer.results) for peer in self._peers), default=0)
            try:
                for peer in self._peers:
                    self._tell_step(peer, number, first, plan[peer.rank])
            except TransportError as error:
                raise self._failure(error) from error
            self._pending = {
                peer.rank: expect_reply(self._transport, peer.rank) for peer in self._peers
            }
            return self._results(first)

    def _arguments(self, leaves: Sequence[Any]) -> list[dict[Key, tuple[int, bool, Any]]]:
        """Per worker, per feed: handle, whether it is given away, and the array if it is fed."""
        found: list[dict[Key, tuple[int, bool, Any]]] = [{} for _ in self._peers]
        leaving: list[DistributedArray] = []
        for number, (leaf, uses) in enumerate(zip(leaves, self.step.arguments, strict=True)):
            resident = self._resident(leaf, uses)
            whole: Any = None
            for use in uses:
                key = (number, use.micro)
                if resident is not None:
                    found[use.rank][key] = (resident.parts[use.rank], use.donated, None)
                    continue
                whole = np.asarray(leaf) if whole is None else whole
                found[use.rank][key] = (FED, True, self._part(whole, use))
            if isinstance(leaf, DistributedArray) and any(use.donated for use in uses):
                leaving.append(leaf)
        for leaf in leaving:
            self._leave(leaf)
        return found

    def _leave(self, leaf: DistributedArray) -> None:
        """An argument that was given away; parts no step took are freed."""
        leaf.mark_gone("given away to a step")
        donated = {use.rank for uses in self.step.arguments for use in uses if use.donated}
        self.forget({rank: h for rank, h in leaf.parts.items() if rank not in donated})

    def _resident(self, leaf: Any, uses: Sequence[ArgumentUse]) -> DistributedArray | None:
        """The leaf, if every worker that wants it has it as it wants it."""
        if not isinstance(leaf, DistributedArray):
            return None
        leaf.check()
        if not leaf.held_by(self):
            return None
        for use in uses:
            if use.micro != WHOLE or leaf.specs.get(use.rank) != self._spec(use):
                return None
        return leaf

    def _spec(self, use: ArgumentUse) -> BufferSpec:
        return dict(self.step.workers[use.rank].buffers)[use.buffer]

    def _part(self, whole: Any, use: ArgumentUse) -> Any:
        if use.micro == WHOLE:
            return whole
        assert use.position is not None
        return micro_part(whole, use.position, self.step.micro_batches, use.micro)

    def _tell_step(
        self, peer: _Peer, number: int, first: int, args: Mapping[Key, tuple[int, bool, Any]]
    ) -> None:
        rows = [args[key] for key, _ in peer.feeds]
        unwanted, peer.unwanted = peer.unwanted[:DELETES], peer.unwanted[DELETES:]
        body = [number, first, *(row[0] for row in rows), *(int(row[1]) for row in rows), *unwanted]
        self._tell(peer, Kind.STEP, body)
        for place, (_, _, array) in enumerate(rows):
            if array is not None:
                self._feed(peer, place, array)

    def _tell(self, peer: _Peer, kind: Kind, body: Sequence[int]) -> None:
        request = send_message(self._transport, peer.rank, kind, body, frame_size(len(peer.feeds)))
        if not request.done():
            self._transport.wait([request], timeout=self.timeout)

    def _feed(self, peer: _Peer, place: int, array: Any) -> None:
        plan, spec = peer.plans[place], peer.feeds[place][1]
        array = np.asarray(array, dtype=jnp.dtype(spec.dtype))
        if array.shape != spec.shape:
            raise WorkerError(
                "an argument does not fit the plan",
                got=f"{array.dtype}{list(array.shape)}",
                why=f"the plan says {spec.dtype}{list(spec.shape)}",
            )
        requests = []
        for index, tile in enumerate(plan.tiles):
            part = _contiguous(array[source_slice(plan, tile)])
            self._sent += part.nbytes
            tag = message_tag(FIRST_ARRAY_TAG + 1 + place, index)
            requests.append(self._transport.isend(peer.rank, tag, part))
        self._transport.wait(requests, timeout=self.timeout)

    def _results(self, first: int) -> list[DistributedArray]:
        made: dict[int, DistributedArray] = {}
        for peer in self._peers:
            for place, (index, spec) in enumerate(peer.results):
                source = self.step.results[index]
                shape, dtype = spec.shape, spec.dtype
                assert source.rank == peer.rank
                made[index] = DistributedArray(
                    self, shape, dtype, {peer.rank: first + place}, {peer.rank: spec}
                )
        return [made[index] for index in range(len(self.step.results))]

    def settle(self) -> None:
        """Wait for the step under way.

        Raises:
            WorkerError: it failed; names worker, stage, step and instruction.
        """
        with self._lock:
            self._check_open()
            pending, self._pending = self._pending, {}
            if not pending:
                return
            try:
                self._await(list(pending.values()))
                for rank, head in pending.items():
                    status, text = read_reply(self._transport, rank, head, self.timeout)
                    if status == FAILED:
                        raise TransportError(json.loads(text)["what"])
            except TransportError as error:
                raise self._failure(error) from error

    def _await(self, requests: Sequence[Any]) -> None:
        """Wait in slices; between them look whether anybody still moves."""
        seen = self._positions()
        since = time.monotonic()
        while True:
            try:
                self._transport.wait(requests, timeout=POLL_SECONDS)
                return
            except TransportError:
                if not self._only_slow(requests):
                    raise
            now = self._positions()
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self.hang_seconds:
                raise TransportError(f"no worker has moved for {self.hang_seconds:g} s")

    def _only_slow(self, requests: Sequence[Any]) -> bool:
        """Whether a wait failed for want of time alone."""
        try:
            for request in requests:
                if request.done():
                    request.result()
        except TransportError:
            return False
        dead, _ = ray.wait([p.serving for p in self._peers], timeout=0)
        return not dead

    def _positions(self) -> list[tuple[int, int]]:
        return [self._board.where(peer.rank) for peer in self._peers]

    # --- faults --------------------------------------------------------------------------------

    def _failure(self, error: Exception) -> WorkerError:
        """Find out who failed, end everything, and say it."""
        step = self._number - 1
        with contextlib.suppress(Exception):
            self._transport.abort(str(error).partition("\n")[0])
        told = self._last_words()
        culprit, how, detail = self._culprit(told, error)
        lines = [self._line(peer, told) for peer in self._peers if peer is not culprit]
        at, position = self._board.where(culprit.rank)
        place = f"at instruction {position}: {self._text(culprit)}"
        if at < step:
            place = "before its first instruction"
        made = WorkerError(
            f"worker {culprit.rank} ({culprit.stage}) {how} in step {step} {place}",
            got=detail,
            why="the others: " + ("; ".join(lines) or "there are none"),
            remedy="all workers were ended; call the step again to start new ones, with state from "
            "a checkpoint",
        )
        self._closed = made.what
        self.close()
        return made

    def _last_words(self) -> dict[int, Mapping[str, Any]]:
        """What workers say of their end: an error, or that they died; nothing if they hang."""
        waiting = {peer.serving: peer for peer in self._peers if peer.serving is not None}
        told: dict[int, Mapping[str, Any]] = {}
        end = time.monotonic() + GRACE_SECONDS
        while waiting and time.monotonic() < end:
            done, _ = ray.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            for ref in done:
                peer = waiting.pop(ref)
                try:
                    text = ray.get(ref)
                    told[peer.rank] = json.loads(text) if text else {}
                except ray.exceptions.RayError as gone:
                    first = str(gone).strip().splitlines()[0]
                    told[peer.rank] = {"died": True, "text": first, "aborted": False}
        return told

    def _culprit(
        self, told: Mapping[int, Mapping[str, Any]], error: Exception
    ) -> tuple[_Peer, str, str]:
        """Who began it: one that died, one that raised, one that hangs, in this order."""
        for peer in self._peers:
            if told.get(peer.rank, {}).get("died"):
                return peer, "died", str(told[peer.rank]["text"])
        for peer in self._peers:
            words = told.get(peer.rank, {})
            if words and not words.get("aborted"):
                return peer, "failed", str(words["text"])
        silent = [peer for peer in self._peers if peer.rank not in told]
        # One that waits for another is not the one that hangs.
        busy = [p for p in silent if not self._text(p).startswith(("RECV", "FEED"))]
        for peer in busy or silent:
            return peer, "hangs", str(error)
        return self._peers[0], "failed", str(error)

    def _text(self, peer: _Peer) -> str:
        _, position = self._board.where(peer.rank)
        return peer.texts[position] if 0 <= position < len(peer.texts) else ""

    def _line(self, peer: _Peer, told: Mapping[int, Mapping[str, Any]]) -> str:
        step, position = self._board.where(peer.rank)
        where = self._text(peer) or "between steps"
        state = "" if peer.rank in told else ", still running"
        return f"worker {peer.rank} in step {step} at instruction {position} `{where}`{state}"

    def _check_open(self) -> None:
        if self._closed:
            raise WorkerError(
                "the workers were ended",
                got=self._closed,
                remedy="call the parallelised function again: it starts new workers; state that "
                "was on them is lost",
            )

    # --- arrays --------------------------------------------------------------------------------

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Put argument leaves on the workers that want them whole; the others stay."""
        with self._lock:
            self.settle()
            placed = []
            for number, (leaf, uses) in enumerate(zip(leaves, self.step.arguments, strict=True)):
                fits = uses and all(use.micro == WHOLE for use in uses)
                if not fits or self._resident(leaf, uses) is not None:
                    placed.append(leaf)
                    continue
                placed.append(self._place(number, np.asarray(leaf), uses))
            return placed

    def _place(self, number: int, array: Any, uses: Sequence[ArgumentUse]) -> DistributedArray:
        parts, specs = {}, {}
        for use in uses:
            peer = self._peers[use.rank]
            place = [key for key, _ in peer.feeds].index((number, WHOLE))
            handle, self._next = self._next, self._next + 1
            self._tell(peer, Kind.PUT, [place, handle])
            self._feed(peer, place, array)
            self._reply(peer)
            parts[use.rank], specs[use.rank] = handle, peer.feeds[place][1]
        return DistributedArray(self, array.shape, str(array.dtype), parts, specs)

    def fetch(self, array: DistributedArray) -> np.ndarray[Any, Any]:
        """The whole array, from the first worker that has it."""
        with self._lock:
            self.settle()
            rank, handle = next(iter(array.parts.items()))
            peer, spec = self._peers[rank], array.specs[rank]
            plan = fetch_plan(spec, self.step.workers[rank].mesh)
            try:
                requests = [
                    self._transport.irecv(
                        rank, message_tag(FIRST_ARRAY_TAG, index), ArraySpec(tile.shape, spec.dtype)
                    )
                    for index, tile in enumerate(plan.tiles)
                ]
                body = [handle, FIRST_ARRAY_TAG]
                self._tell(peer, Kind.FETCH, body)
                self._reply(peer)
                self._transport.wait(requests, timeout=self.timeout)
            except TransportError as error:
                raise self._failure(error) from error
            whole = np.empty(spec.shape, jnp.dtype(spec.dtype))
            for tile, request in zip(plan.tiles, requests, strict=True):
                whole[target_slices(plan, tile)[0][1]] = request.result()
            return whole

    def _reply(self, peer: _Peer) -> str:
        head = expect_reply(self._transport, peer.rank)
        self._transport.wait([head], timeout=self.timeout)
        status, text = read_reply(self._transport, peer.rank, head, self.timeout)
        if status == FAILED:
            raise WorkerError(json.loads(text)["what"])
        return text

    def forget(self, parts: Mapping[int, int]) -> None:
        """Free these with the next step."""
        for rank, handle in parts.items():
            if rank < len(self._peers):
                self._peers[rank].unwanted.append(handle)

    def discard(self, parts: Mapping[int, int]) -> None:
        """Free these now."""
        with self._lock:
            if self._closed:
                return
            self.settle()
            for rank, handle in parts.items():
                self._tell(self._peers[rank], Kind.DELETE, [handle])
                self._reply(self._peers[rank])

    # --- what can be asked -----------------------------------------------------------------------

    def stats(self) -> list[Mapping[str, int]]:
        """Per worker: live handles, their bytes, steps, resident bytes of the process."""
        found: list[Mapping[str, int]] = []
        with self._lock:
            self.settle()
            for peer in self._peers:
                while peer.unwanted:
                    some, peer.unwanted = peer.unwanted[:DELETES], peer.unwanted[DELETES:]
                    self._tell(peer, Kind.DELETE, some)
                    self._reply(peer)
                self._tell(peer, Kind.STATS, [])
                found.append(json.loads(self._reply(peer)))
        return found

    def record(self, *, on: bool) -> list[list[Mapping[str, Any]]]:
        """Begin or end timing of instructions; the events so far, per worker."""
        found = []
        with self._lock:
            self.settle()
            for peer in self._peers:
                self._tell(peer, Kind.EVENTS, [int(on)])
                found.append(json.loads(self._reply(peer)))
        return found

    @property
    def bytes_fed(self) -> int:
        """Bytes that this process has sent to workers."""
        return self._sent

    @property
    def closed(self) -> bool:
        """Whether the workers were ended, by a fault or by `close`."""
        return bool(self._closed)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers."""
        return tuple(peer.pid for peer in self._peers)

    def close(self) -> None:
        """End all workers, and Ray if it was started for them."""
        with self._lock:
            if not self._closed:
                for peer in self._peers:
                    with contextlib.suppress(Exception):
                        self._tell(peer, Kind.END, [])
            self._closed = self._closed or "the runtime was closed"
            if self._transport is not None:
                self._transport.close()
            self._board.close()
            self._finalizer()


def _actor(devices: int, rank: int, stage: str) -> Any:
    """An actor class for a worker with so many CPU devices."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        "NPROC": str(THREADS_PER_DEVICE * devices),
        "XLA_FLAGS": " ".join(
            [
                *(f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f),
                f"--xla_force_host_platform_device_count={devices}",
            ]
        ),
    }
    return ray.remote(_Actor).options(
        name=f"autopar-{os.getpid()}-{secrets.token_hex(4)}-{rank}",
        num_cpus=0,
        max_concurrency=3,
        runtime_env={"env_vars": environment},
    )


def _clean_up(peers: Sequence[_Peer], folder: Path, owns_ray: bool) -> None:  # noqa: FBT001
    """End what was started; also when the runtime is simply dropped, or Python ends."""
    # Ray starts anew by itself if it is asked for something after its end.
    for peer in peers if ray.is_initialized() else ():
        with contextlib.suppress(Exception):
            ray.kill(peer.actor, no_restart=True)
    if owns_ray and ray.is_initialized():
        with contextlib.suppress(Exception):
            ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def _contiguous(array: Any) -> np.ndarray[Any, Any]:
    """The array in C order; a scalar stays one (numpy's own function makes it a vector)."""
    made = np.asarray(array)
    return made if made.flags.c_contiguous else made.copy(order="C")
