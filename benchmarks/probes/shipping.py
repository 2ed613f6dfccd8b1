"""Does a stage program travel as bytes to a Ray worker, run there with donation, and die cleanly?

`python -m benchmarks.probes.shipping --fault worker|driver|none`

The driver has one device. It exports a stage program (explicit `shard_map` with a `psum`) over an
`AbstractMesh` of four devices, and ships the bytes to an actor that owns four virtual devices. The
actor runs it with donation, twice, and the driver holds the result against numpy. Then a long step
is started and a fault injected in its middle::

    worker   the worker is killed (SIGKILL): the driver must raise within 5 s, naming the worker
    driver   the driver itself fails: cleaning up must not depend on the happy path
    none     the step is left to end

Whatever happened, no process, no shared-memory object and no folder of the probe may be left. Each
answer is a JSON line; the exit status is 0 when all of them hold.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import secrets
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ray
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DEVICES = 4
ROWS = 64
STAGE = 2
WORKER = f"worker-0 (stage {STAGE})"
MARK = (
    "AUTOPAR_PROBE"  # an environment variable: children inherit it, so /proc shows whose they are
)
SHARED_MEMORY = Path("/dev/shm")
ERROR_LIMIT_SECONDS = 5.0
GONE_LIMIT_SECONDS = 10.0
START_LIMIT_SECONDS = 60.0
# Long enough that no machine ends the step before it is killed: about 1e9 small sums.
ENDLESS = 1_000_000_000


class WorkerLostError(RuntimeError):
    """A worker died inside a step; the message names worker, stage and step."""


def stage_program(state: jax.Array, x: jax.Array, repeats: jax.Array) -> tuple[jax.Array, ...]:
    """Local part of the stage: `state += sum of x over the mesh`, `repeats` times.

    Args:
        state: f32[ROWS/4], this device's rows; donated.
        x: f32[ROWS/4], this device's rows.
        repeats: i32[], equal on every device, since it guards the psum.
    """

    def body(_: jax.Array, held: jax.Array) -> jax.Array:
        return jnp.add(held, jax.lax.psum(jnp.sum(x), "x"))

    state = jax.lax.fori_loop(0, repeats, body, state)
    return state, jax.lax.psum(jnp.sum(state), "x")


def export_stage() -> bytes:
    """The stage as portable bytes, made over a mesh that has no devices."""
    mesh = AbstractMesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    program = jax.jit(
        jax.shard_map(
            stage_program,
            mesh=mesh,
            in_specs=(P("x"), P("x"), P()),
            out_specs=(P("x"), P()),
            check_vma=False,
        ),
        donate_argnums=(0,),
    )
    rows = jax.ShapeDtypeStruct((ROWS,), jnp.float32, sharding=split)
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    exported = jax.export.export(program, platforms=["cpu"])(rows, rows, count)
    return bytes(exported.serialize())


class StageWorker:
    """Owns four virtual devices and one loaded stage; plain Python, made an actor by the driver."""

    def __init__(self) -> None:
        self._position = "idle"
        self._mesh: Any = None
        self._program: Any = None
        self._x: Any = None

    def load(self, blob: bytes, segment: str) -> dict[str, int]:
        """Loads the stage and reads its input, f32[ROWS], from a shared-memory segment."""
        exported = jax.export.deserialize(bytearray(blob))
        self._mesh = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
        # Donation does not travel: it is asked for again where the program is called.
        self._program = jax.jit(exported.call, donate_argnums=(0,))
        with Path(segment).open("rb") as handle:
            view = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        rows = np.frombuffer(view, dtype=np.float32).copy()
        self._x = jax.device_put(rows, NamedSharding(self._mesh, P("x")))
        return {"pid": os.getpid(), "devices": len(jax.devices())}

    def run(self, step: int, repeats: int) -> dict[str, Any]:
        """Runs one step; tells the total and whether the donated buffer was really given up."""
        state = jax.device_put(np.zeros(ROWS, np.float32), NamedSharding(self._mesh, P("x")))
        count = jax.device_put(np.int32(repeats), NamedSharding(self._mesh, P()))
        jax.block_until_ready((state, count))
        self._position = f"step {step}"
        updated, total = self._program(state, self._x, count)
        jax.block_until_ready((updated, total))
        self._position = "idle"
        return {"total": float(total), "donated": state.is_deleted()}

    def position(self) -> str:
        """What the worker is at; answered while a step runs."""
        return self._position


@dataclass(frozen=True, slots=True)
class Finding:
    """One question of the probe and its answer."""

    question: str
    holds: bool
    seen: str


@contextmanager
def _cluster(folder: Path) -> Iterator[None]:
    """A local Ray that lives exactly as long as the block, whatever ends the block.

    It listens on the loopback interface only, and its calls carry a token of this run: left alone,
    Ray writes one of its own into the user's home and listens on every interface.
    """
    try:
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
            object_store_memory=80 * 2**20,
            _temp_dir=str(folder),
        )
        yield
    finally:
        ray.shutdown()


@contextmanager
def _segment(token: str, values: np.ndarray[Any, Any]) -> Iterator[Path]:
    """A named shared-memory object; the driver owns the name, so a killed worker leaves none."""
    path = SHARED_MEMORY / f"autopar-{token}"
    try:
        path.write_bytes(values.tobytes())
        yield path
    finally:
        path.unlink(missing_ok=True)


def _start_worker() -> Any:
    environment = {
        "JAX_PLATFORMS": "cpu",
        "NPROC": "32",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
    }
    actor = ray.remote(StageWorker)
    return actor.options(
        name=WORKER, num_cpus=1, max_concurrency=2, runtime_env={"env_vars": environment}
    ).remote()


def _await_step(worker: Any, step: int, call: Any) -> None:
    """Returns once the worker is inside the step and has been for a moment."""
    end = time.monotonic() + START_LIMIT_SECONDS
    while ray.get(worker.position.remote(), timeout=START_LIMIT_SECONDS) != f"step {step}":
        if time.monotonic() > end:
            raise TimeoutError(f"{WORKER} never reached step {step}")
        time.sleep(0.05)
    time.sleep(0.5)
    done, _ = ray.wait([call], timeout=0)
    if done:
        raise RuntimeError(f"{WORKER} left step {step} before the fault: {ray.get(done[0])}")


def _result(call: Any, step: int) -> dict[str, Any]:
    """The result of a step, or an error of ours that names worker, stage and step."""
    try:
        result: dict[str, Any] = ray.get(call, timeout=START_LIMIT_SECONDS)
    except ray.exceptions.RayActorError as error:
        raise WorkerLostError(f"{WORKER} died in step {step}: {error}") from error
    return result


def _ship_and_run(worker: Any, segment: Path, x: np.ndarray[Any, Any]) -> tuple[int, list[Finding]]:
    blob = export_stage()
    loaded = ray.get(worker.load.remote(blob, str(segment)), timeout=START_LIMIT_SECONDS)
    findings = [
        Finding(
            "one device here, four there, the program travels as bytes",
            len(jax.devices()) == 1 and loaded["devices"] == DEVICES,
            f"{len(blob)} bytes, {len(jax.devices())} and {loaded['devices']} devices",
        )
    ]
    for step, repeats in enumerate((1, 3)):
        result = _result(worker.run.remote(step, repeats), step)
        expected = float(np.sum(x, dtype=np.float64)) * repeats * ROWS
        close = bool(np.isclose(result["total"], expected, rtol=1e-5))
        findings.append(
            Finding(
                f"step {step} agrees with numpy and gives up its donated state",
                close and result["donated"],
                f"ratio {result['total'] / expected:.7f}, donated {result['donated']}",
            )
        )
    return int(loaded["pid"]), findings


def _kill_mid_step(worker: Any, pid: int) -> list[Finding]:
    step = 2
    call = worker.run.remote(step, ENDLESS)
    _await_step(worker, step, call)
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    try:
        result = _result(call, step)
    except WorkerLostError as error:
        share = (time.monotonic() - start) / ERROR_LIMIT_SECONDS
        named = WORKER in str(error) and f"step {step}" in str(error)
        first = str(error).splitlines()[0]
        return [
            Finding(
                "a worker killed in its step is an error within 5 s that names it",
                share < 1 and named,
                f"{share:.3f} of the limit: {first}",
            )
        ]
    return [Finding("a worker killed in its step is an error", holds=False, seen=str(result))]


def _inject(fault: str, worker: Any, pid: int) -> list[Finding]:
    if fault == "worker":
        return _kill_mid_step(worker, pid)
    if fault == "driver":
        call = worker.run.remote(2, ENDLESS)
        _await_step(worker, 2, call)
        raise KeyboardInterrupt("injected into the driver while the worker is in step 2")
    return []


def _processes(token: str) -> list[str]:
    """Processes other than this one that inherited the probe's mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if f"{MARK}={token}".encode() in (entry / "environ").read_bytes():
                found.append(f"{entry.name} {(entry / 'comm').read_text().strip()}")
        except OSError:  # gone meanwhile, or not ours to read
            continue
    return found


def _recognised(token: str, pid: int) -> Finding:
    """Whether the search for processes finds the worker and Ray's own, while they live."""
    found = _processes(token)
    holds = len(found) > 1 and any(line.startswith(f"{pid} ") for line in found)
    return Finding("the worker and Ray's processes bear the mark", holds, f"{len(found)} found")


def _files(token: str, folder: Path) -> frozenset[Path]:
    """Files and folders that the probe, or Ray on its behalf, may make."""
    shared = (path for path in SHARED_MEMORY.iterdir() if path.name.startswith(("autopar", "plas")))
    own = (folder, SHARED_MEMORY / f"autopar-{token}", Path.home() / ".ray" / "auth_token")
    return frozenset(path for path in (*shared, *own) if path.exists())


def _left_behind(token: str, before: frozenset[Path], folder: Path) -> list[str]:
    return _processes(token) + sorted(map(str, _files(token, folder) - before))


def probe(fault: str) -> list[Finding]:
    """Runs the whole probe and, however it ended, looks for what was left behind."""
    token = uuid.uuid4().hex[:12]
    os.environ.update(
        {
            MARK: token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
    )
    folder = Path(tempfile.mkdtemp(prefix="ap-"))
    before = _files(token, folder) - {folder}
    x = np.random.default_rng(0).normal(1.0, 1.0, ROWS).astype(np.float32)
    findings: list[Finding] = []
    try:
        with _cluster(folder), _segment(token, x) as segment:
            worker = _start_worker()
            pid, findings = _ship_and_run(worker, segment, x)
            findings.append(_recognised(token, pid))
            findings += _inject(fault, worker, pid)
    except KeyboardInterrupt as error:
        findings.append(Finding("the driver failed as injected", fault == "driver", str(error)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    end = time.monotonic() + GONE_LIMIT_SECONDS
    while (left := _left_behind(token, before, folder)) and time.monotonic() < end:
        time.sleep(0.1)
    findings.append(Finding("nothing is left behind", not left, ", ".join(left) or "nothing"))
    return findings


def main() -> int:
    """Parses the command line, runs the probe, prints a JSON line per finding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--fault", choices=("worker", "driver", "none"), default="worker")
    fault = parser.parse_args().fault
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that blocks are left
    findings = probe(fault)
    setting = {
        "probe": "shipping",
        "fault": fault,
        "jax": jax.__version__,
        "ray": ray.__version__,
        "python": platform.python_version(),
    }
    for finding in findings:
        record = {"question": finding.question, "holds": finding.holds, "seen": finding.seen}
        print(json.dumps(setting | record), flush=True)
    return 0 if all(finding.holds for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
