"""Workers as Ray actors: the only module that imports Ray.

Ray starts the processes, tells who has died, and ends them. Everything else (what to do, batches,
results, activations) goes over our own transport, which also tells a lost peer within milliseconds.
Ray's calls carry only bytes, strings and numbers, and none of them is made in a step.
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

from autopar.errors import AutoparError, ClusterError
from autopar.lower.instructions import StepProgram, WorkerProgram
from autopar.runtime.driver import START_SECONDS, ProcessPipeline
from autopar.runtime.faults import DIED
from autopar.runtime.remote_worker import RemoteWorker, make_transport
from autopar.runtime.transport.base import DRIVER, Transport

THREADS_PER_DEVICE = 4
"""As in autopar.launch: with fewer than two a collective can starve."""


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


class _Actor(RemoteWorker):
    """A worker in an actor; `serve` runs while `where` and `abort` answer."""


class RayProcesses:
    """The worker processes of one pipeline.

    Args:
        address: of a running Ray; None starts a local one.
    """

    def __init__(self, address: str | None) -> None:
        self._local = address is None
        self._folder = start_ray(address)
        self._actors: dict[int, Any] = {}
        self._loading: list[Any] = []
        self._serving: dict[int, Any] = {}

    @property
    def _kind(self) -> tuple[str, str]:
        """Transport, and the host on which this process listens."""
        return ("shm", "127.0.0.1") if self._local else ("tcp", ray.util.get_node_ip_address())

    def start(
        self, rank: int, worker: WorkerProgram, secret: bytes, board: str, timeout: float
    ) -> None:
        """Start an actor with as many CPU devices as the worker's mesh has."""
        kind, host = self._kind
        self._actors[rank] = _actor(worker.mesh.size, rank).remote(
            rank, secret, kind, host, board if self._local else "", timeout
        )

    def connect(self, secret: bytes, timeout: float) -> Transport:
        """Exchange addresses; then all connect at the same time."""
        kind, host = self._kind
        transport = make_transport(kind, DRIVER, secret, host)
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


def _actor(devices: int, rank: int) -> Any:
    """An actor class for a worker with so many CPU devices."""
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
        runtime_env={"env_vars": environment},
    )
