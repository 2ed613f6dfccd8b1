"""Workers as Ray actors: the only module that imports Ray.

Ray starts the processes, tells who has died, and ends them. Everything else (what to do, batches,
results, activations) goes over our own transport, which also tells a lost peer within milliseconds.
Ray's calls carry only bytes, strings and numbers, and none of them is made in a step, but to ask
workers on other hosts where they are when one is slow.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from autopar.errors import AutoparError, ClusterError
from autopar.lower.instructions import StepProgram, WorkerProgram
from autopar.runtime.board import Board, Positions
from autopar.runtime.driver import START_SECONDS, ProcessPipeline
from autopar.runtime.faults import DIED
from autopar.runtime.remote_worker import RemoteWorker, make_transport
from autopar.runtime.transport.base import DRIVER, Transport

THREADS_PER_DEVICE = 4
"""As in autopar.launch: with fewer than two a collective can starve."""

ASK_SECONDS = 1.0
"""Until a worker on another host has said where it is."""


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that Ray reads when it starts; restored afterwards.

    So is what Ray itself sets and leaves behind: other programs of this process, which speak with
    another Ray, would look for a token.
    """
    before = {name: os.environ.get(name) for name in (*values, "RAY_AUTH_MODE")}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def start_ray(address: str | None) -> str:
    """Connect to a running Ray, or start one on this machine alone.

    A Ray of ours listens on the loopback interface, with a token of this run, and keeps its files
    in a folder of its own: left alone it writes a token into the user's home, listens everywhere,
    and leaves its files behind.

    Returns:
        The folder of the Ray that was started, for `stop_ray`; empty if one was running.
    """
    if ray.is_initialized():
        return ""
    if address is not None:
        ray.init(address=address, log_to_driver=False)
        return ""
    folder = tempfile.mkdtemp(prefix="ap-")
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
            _temp_dir=folder,
            object_store_memory=80 * 2**20,
        )
    return folder


def stop_ray(folder: str) -> None:
    """End the Ray that `start_ray` started in that folder; nothing if it is empty."""
    if folder:
        # Ray starts anew by itself if it is asked for something after its end.
        if ray.is_initialized():
            ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _own_host(kind: str) -> str:
    """Where a transport of this process listens."""
    return "127.0.0.1" if kind == "shm" else str(ray.util.get_node_ip_address())


class _Actor(RemoteWorker):
    """A worker in an actor; `serve` runs while `where` and `abort` answer."""

    def __init__(self, rank: int, secret: bytes, kind: str, board: str, timeout: float) -> None:
        super().__init__(rank, secret, kind, _own_host(kind), board, timeout)


class _Asked:
    """Where workers on other hosts are, by their own word."""

    def __init__(self, actors: Mapping[int, Any]) -> None:
        self._actors = actors

    def where(self, rank: int) -> tuple[int, int] | None:
        """Ask it; one that is gone does not answer."""
        try:
            step, position = ray.get(self._actors[rank].where.remote(), timeout=ASK_SECONDS)
        except ray.exceptions.RayError:
            return None
        return step, position


class RayProcesses:
    """The worker processes of one pipeline.

    Args:
        address: of a running Ray; None starts a local one.
    """

    def __init__(self, address: str | None) -> None:
        self._local = address is None
        self._folder = start_ray(address)
        # Workers take turns over the hosts: left alone, Ray puts what asks for no CPU on one.
        alive = [node for node in ray.nodes() if node["Alive"]]
        alive.sort(key=lambda node: (str(node["NodeManagerAddress"]), str(node["NodeID"])))
        self._nodes = [str(node["NodeID"]) for node in alive]
        self._actors: dict[int, Any] = {}
        self._loading: list[Any] = []
        self._serving: dict[int, Any] = {}
        self._asked = _Asked(self._actors)

    @property
    def _kind(self) -> str:
        """Of transport."""
        return "shm" if self._local else "tcp"

    def start(
        self, rank: int, worker: WorkerProgram, secret: bytes, board: str, timeout: float
    ) -> None:
        """Start an actor with as many CPU devices as the worker's mesh has."""
        node = self._nodes[rank % len(self._nodes)]
        self._actors[rank] = _actor(worker.mesh.size, rank, node).remote(
            rank, secret, self._kind, board if self._local else "", timeout
        )

    def connect(self, secret: bytes, timeout: float) -> Transport:
        """Exchange addresses; then all connect at the same time."""
        transport = make_transport(self._kind, DRIVER, secret, _own_host(self._kind))
        actors = [self._actors[rank] for rank in sorted(self._actors)]
        addresses = ray.get([actor.address.remote() for actor in actors], timeout=timeout)
        ranks, everyone = [DRIVER, *range(len(actors))], [transport.address, *addresses]
        joining = [actor.connect.remote(ranks, everyone, timeout) for actor in actors]
        transport.connect(dict(zip(ranks[1:], addresses, strict=True)), timeout=timeout)
        ray.get(joining, timeout=timeout)
        return transport

    def load(self, rank: int, program: str, code: Mapping[str, bytes]) -> None:
        """Begin to compile."""
        names = sorted(code)
        loading = self._actors[rank].load.remote(program, names, [code[name] for name in names])
        self._loading.append(loading)

    def loaded(self, timeout: float) -> list[int]:
        """Wait until all have compiled, and let them serve."""
        pids: list[int] = ray.get(self._loading, timeout=timeout)
        self._serving = {rank: actor.serve.remote() for rank, actor in self._actors.items()}
        return pids

    def positions(self, board: Board) -> Positions:
        """The board's, or what the workers say."""
        return board if self._local else self._asked

    def last_words(self, timeout: float) -> dict[int, str]:
        """What workers that have ended had to say."""
        waiting = {ref: rank for rank, ref in self._serving.items()}
        told: dict[int, str] = {}
        end = time.monotonic() + timeout
        while waiting:
            left = max(0.0, end - time.monotonic())
            done, _ = ray.wait(list(waiting), timeout=left)
            for ref in done:
                rank = waiting.pop(ref)
                try:
                    told[rank] = ray.get(ref)
                except ray.exceptions.RayError as gone:
                    told[rank] = f"{DIED} {str(gone).strip().splitlines()[0]}"
            if not done:
                break
        return told

    def end(self) -> None:
        """Kill all actors, and end the Ray that was started for them."""
        for actor in self._actors.values() if ray.is_initialized() else ():
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        self._actors.clear()
        stop_ray(self._folder)
        self._folder = ""


def ray_pipeline(
    step: StepProgram,
    code: Sequence[Mapping[str, bytes]],
    hidden: Sequence[Any] = (),
    *,
    address: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> ProcessPipeline:
    """A step program on Ray workers, one a stage.

    Args:
        step: verified.
        code: per worker, per task its `jax.export` bytes.
        hidden: closed-over arrays.
        address: of a running Ray; None starts a local one.
        progress: told what is being done.

    Raises:
        ClusterError: workers did not start.
    """
    progress("starting Ray")
    processes = RayProcesses(address)
    try:
        return ProcessPipeline(step, code, processes, hidden, progress=progress)
    except AutoparError:
        raise
    except Exception as error:
        raise ClusterError(
            "the Ray workers did not start",
            got=f"{type(error).__name__}: {error}",
            why=f"all of them must be up, connected and compiled within {START_SECONDS:g} s",
        ) from error


def _actor(devices: int, rank: int, node: str) -> Any:
    """An actor class for a worker with so many CPU devices, on the node of that id."""
    kept = [f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f]
    environment = {
        "JAX_PLATFORMS": "cpu",
        "NPROC": str(THREADS_PER_DEVICE * devices),
        "XLA_FLAGS": " ".join([*kept, f"--xla_force_host_platform_device_count={devices}"]),
    }
    return ray.remote(_Actor).options(
        name=f"autopar-{os.getpid()}-{secrets.token_hex(4)}-{rank}",
        num_cpus=0,
        max_concurrency=3,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        runtime_env={"env_vars": environment},
    )
