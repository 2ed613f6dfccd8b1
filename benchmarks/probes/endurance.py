"""Does the CPU client survive thousands of steps with one step in flight per device set?

`python -m benchmarks.probes.endurance --steps 2000 --mode plan8|threads4x2|unawaited`

The CPU client runs the 8 virtual devices on one thread pool. Programs that nobody awaits pile up in
it; a collective then waits for partners that hold no thread, and XLA ends the process. Three modes
tell the cure from the cause::

    plan8        one 8-device program, each step awaited before the next is started
    threads4x2   two 4-device programs in two threads, each awaits its own steps
    unawaited    plan8 without the wait: what users' plain loops do

The parent starts a child with the environment that a worker gets, follows its progress lines, and
ends it when a lane (a device set with its thread) stands still. It prints JSON lines; the last one
holds the outcome: `completed`, `aborted` (a signal), `failed` (an exception) or `hung` (the lanes
that stood still, with their stacks).
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DEVICES = 8
LAYERS = 4
WIDTH = 64
ROWS = 64
LEARNING_RATE = 1e-2
STEPS_PER_LINE = 100
# XLA itself gives up on a rendezvous after 40 s, and that is an abort, not a hang.
STALL_SECONDS = 90.0
LANES = {
    "plan8": ("devices 0-7",),
    "threads4x2": ("devices 0-3", "devices 4-7"),
    "unawaited": ("devices 0-7",),
}

Params = tuple[jax.Array, ...]
Step = Callable[[Params, jax.Array, jax.Array], tuple[Params, jax.Array]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, and how far every lane had come."""

    kind: str
    detail: str
    steps: dict[str, int]


def worker_environment(nproc: int) -> dict[str, str]:
    """The environment of a process that owns virtual devices; read at the first backend use."""
    inherited = {name: value for name, value in os.environ.items() if name != "NPROC"}
    return {
        **inherited,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
        **({"NPROC": str(nproc)} if nproc else {}),
    }


def data_parallel_step(mesh: Mesh) -> Step:
    """One SGD step of an MLP, rows split over the mesh, gradients summed by an explicit psum."""

    def loss_of(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        for weight in params:
            x = jnp.tanh(x @ weight)
        return jnp.sum((x - y) ** 2) / (ROWS * WIDTH)

    def local_step(params: Params, x: jax.Array, y: jax.Array) -> tuple[Params, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        loss, grads = jax.lax.psum((loss, grads), "data")
        updated = tuple(w - LEARNING_RATE * g for w, g in zip(params, grads, strict=True))
        return updated, loss

    step: Step = jax.jit(
        jax.shard_map(
            local_step,
            mesh=mesh,
            in_specs=(P(), P("data"), P("data")),
            out_specs=(P(), P()),
            check_vma=False,
        )
    )
    return step


def _run_lane(devices: tuple[Any, ...], steps: int, *, awaited: bool) -> None:
    """Runs the steps on one device set and prints a line every hundred."""
    lane = f"devices {devices[0].id}-{devices[-1].id}"  # as LANES names it
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    params: Params = tuple(
        jax.device_put(rng.normal(0, 0.1, (WIDTH, WIDTH)).astype(np.float32), replicated)
        for _ in range(LAYERS)
    )
    x, y = (
        jax.device_put(rng.normal(size=(ROWS, WIDTH)).astype(np.float32), split) for _ in range(2)
    )
    step = data_parallel_step(mesh)
    first = float(step(params, x, y)[1])
    loss = None
    for done in range(1, steps + 1):
        params, loss = step(params, x, y)
        if awaited:
            jax.block_until_ready((params, loss))
        if done % STEPS_PER_LINE == 0 or done == steps:
            print(json.dumps({"lane": lane, "steps": done}), flush=True)
    if loss is not None:
        print(json.dumps({"lane": lane, "loss_ratio": float(loss) / first}), flush=True)


def run_child(mode: str, steps: int) -> None:
    """What the child does: drive one lane or two."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    devices = tuple(jax.devices())
    if len(devices) != DEVICES:
        raise SystemExit(f"wanted {DEVICES} devices, got {len(devices)}")
    size = DEVICES // len(LANES[mode])
    lanes = tuple(devices[at : at + size] for at in range(0, DEVICES, size))
    with ThreadPoolExecutor(len(lanes)) as pool:
        runs = [pool.submit(_run_lane, lane, steps, awaited=mode != "unawaited") for lane in lanes]
        for run in runs:
            run.result()


def _forward_lines(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _follow(
    lines: queue.Queue[str | None], stall_seconds: float, steps: dict[str, int]
) -> list[str]:
    """Reads progress into steps until the child closes its output.

    Returns the lanes that stood still, none when the child came to an end of its own.
    """
    moved = dict.fromkeys(steps, time.monotonic())
    while True:
        try:
            line = lines.get(timeout=stall_seconds)
        except queue.Empty:
            return sorted(lane for lane, at in moved.items() if at != float("inf"))
        if line is None:
            return []
        print(line, end="", flush=True)
        record = json.loads(line)
        now = time.monotonic()
        moved[record["lane"]] = float("inf") if "loss_ratio" in record else now
        if "steps" in record:
            steps[record["lane"]] = record["steps"]
        still = sorted(lane for lane, at in moved.items() if now - at > stall_seconds)
        if still:
            return still


def watch(
    command: tuple[str, ...],
    lanes: tuple[str, ...],
    *,
    nproc: int,
    stall_seconds: float = STALL_SECONDS,
) -> Outcome:
    """Starts the child, follows its lanes to their end, and says how it ended."""
    steps = dict.fromkeys(lanes, 0)
    lines: queue.Queue[str | None] = queue.Queue()
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command,
            env=worker_environment(nproc),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert child.stdout is not None
        reader = threading.Thread(target=_forward_lines, args=(child.stdout, lines))
        reader.start()
        try:
            still = _follow(lines, stall_seconds, steps)
            if still:
                child.send_signal(signal.SIGUSR1)  # the child writes the stacks of its threads
                time.sleep(1.0)
            else:
                child.wait(timeout=stall_seconds)
        finally:
            child.kill()
            child.wait()
            reader.join()
        errors.seek(0)
        stderr = errors.read()
    if still:
        return Outcome("hung", f"stood still: {', '.join(still)}\n{stderr[-2000:]}", steps)
    if child.returncode == 0:
        return Outcome("completed", "", steps)
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        return Outcome("aborted", f"{name}: {_telling_line(stderr)}", steps)
    return Outcome("failed", stderr[-2000:], steps)


def _telling_line(stderr: str) -> str:
    """The first line of XLA's that names the rendezvous, else the last line."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    telling = [line for line in lines if "erminat" in line and "endezvous" in line]
    return (telling or lines[-1:] or [""])[0][:400]


def main() -> int:
    """Parses the command line; runs the parent, or the child when asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--mode", choices=tuple(LANES), default="plan8")
    parser.add_argument("--nproc", type=int, default=32, help="NPROC of the child; 0: unset")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(options.mode, options.steps)
        return 0
    child = ("--child", "--mode", options.mode, "--steps", str(options.steps))
    outcome = watch(
        (sys.executable, "-m", "benchmarks.probes.endurance", *child),
        LANES[options.mode],
        nproc=options.nproc,
    )
    summary = {
        "probe": "endurance",
        "mode": options.mode,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "nproc": options.nproc,
        "steps_asked": options.steps,
        "steps_done": outcome.steps,
        "outcome": outcome.kind,
        "detail": outcome.detail,
    }
    print(json.dumps(summary), flush=True)
    return 0 if outcome.kind == "completed" else 1


if __name__ == "__main__":
    sys.exit(main())
