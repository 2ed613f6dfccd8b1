"""What a step costs its driver: 4 workers with 200 instructions each, against one empty Ray call.

`python -m benchmarks.driver_cost`

The instructions do nothing that takes time (marks are set, once zeros are made and freed), so what
is measured is how workers are told to run a step and how their answers come back. Steps and empty
Ray calls alternate in one run; the figure is the ratio of their medians, wall clock against wall
clock. On two cores the four workers also wait for each other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import ray

from autopar.ir.mesh import Mesh
from autopar.ir.sharding import replicated
from autopar.lower.instructions import BufferSpec, Free, Mark, StepProgram, WorkerProgram, Zero
from autopar.lower.verify_instructions import verify_step
from autopar.runtime.ray_runtime import ray_pipeline, start_ray, stop_ray

WORKERS = 4
INSTRUCTIONS = 200
LIMIT = 2.0


class Empty:
    """An actor whose call does nothing."""

    def call(self) -> None:
        """Nothing."""


def idle_worker(rank: int) -> WorkerProgram:
    """A worker whose list has INSTRUCTIONS entries and no work."""
    spec = BufferSpec((), "float32", replicated(0))
    names = ["z"]
    marks = [Mark("start")] * (INSTRUCTIONS - 2)
    code: list[Zero | Free | Mark] = [Zero("z"), *marks, Free("z")]
    return WorkerProgram(
        rank,
        f"stage {rank}",
        Mesh.of(1),
        (),
        tuple((name, spec) for name in names),
        (),
        (),
        (),
        tuple(code),
    )


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(repeats: int) -> dict[str, float]:
    """Median seconds of a step and of an empty call, and their ratio."""
    step = StepProgram(1, tuple(idle_worker(rank) for rank in range(WORKERS)), (), ())
    verify_step(step)
    folder = start_ray(None)
    runtime = ray_pipeline(step, [{} for _ in range(WORKERS)])
    empty = ray.remote(Empty).options(num_cpus=0).remote()

    def one_step() -> None:
        runtime.run(())
        runtime.settle()

    try:
        for _ in range(20):
            one_step()
            ray.get(empty.call.remote())
        rows = [
            (timed(one_step), timed(lambda: ray.get(empty.call.remote()))) for _ in range(repeats)
        ]
    finally:
        runtime.close()
        stop_ray(folder)
    one, other = (statistics.median(column) for column in zip(*rows, strict=True))
    return {"step_seconds": one, "empty_call_seconds": other, "ratio": one / other}


def main() -> int:
    """Measure, print, and say whether the limit holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found = measure(arguments.repeats)
    record = {"workers": WORKERS, "instructions": INSTRUCTIONS, **found, "limit": LIMIT}
    print(f"a step of {WORKERS} workers x {INSTRUCTIONS} instructions: {found['ratio']:.2f} x")
    print(f"one empty Ray call; at most {LIMIT:g} wanted")
    print(json.dumps(record))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(record) + "\n", encoding="utf-8")
    return 0 if found["ratio"] <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
