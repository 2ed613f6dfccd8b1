"""Does a long run on Ray workers stay flat? `python -m benchmarks.thousand_steps`

Trains a small MLP in 2 stages x 4 devices for 1,000 steps, its state passed back in by handle. Now
and then it asks every worker for its live handles, their bytes and its resident memory, and looks
at its own. Handles and their bytes must not change at all after the first steps; resident memory
may grow by at most GROWTH from step 100 on. The exit status says whether that holds.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import jax

import autopar as ap
from autopar.runtime.driver import ProcessPipeline
from examples import mlp

GROWTH = 1.03
EVERY = 100


def resident(pid: str = "self") -> int:
    """Resident bytes of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run(steps: int) -> list[dict[str, object]]:
    """Train, and look every EVERY steps."""
    config = mlp.Config(batch=24, widths=(24, 48, 48, 24))
    train, (params, state, batch), _ = mlp.build(config)
    step = ap.parallelize(
        jax.jit(train.__wrapped__, donate_argnums=(0, 1)),
        cluster=ap.Cluster.ray(hosts=2, devices_per_host=4),
        method=ap.PipeshardParallel(4, stages=ap.UniformStages(2)),
        batch_argnums=(2,),
    )
    seen: list[dict[str, object]] = []
    try:
        for number in range(1, steps + 1):
            params, state, loss = step(params, state, batch)
            if number % EVERY == 0:
                runtime = step.runtime(params, state, batch)
                assert isinstance(runtime, ProcessPipeline)
                stats = runtime.stats()
                seen.append(
                    {
                        "step": number,
                        "loss": float(loss),
                        "handles": [s["handles"] for s in stats],
                        "bytes": [s["bytes"] for s in stats],
                        "resident": [*(s["rss"] for s in stats), resident()],
                    }
                )
                print(json.dumps(seen[-1]), flush=True)
    finally:
        step.close()
    return seen


def main() -> int:
    """Run, and say whether everything stayed flat."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    seen = run(parser.parse_args().steps)
    first = seen[0]
    same = all(s["handles"] == first["handles"] and s["bytes"] == first["bytes"] for s in seen)
    before, after = first["resident"], seen[-1]["resident"]
    assert isinstance(before, list)
    assert isinstance(after, list)
    growth = max(b / a for a, b in zip(before, after, strict=True))
    print(f"handles and their bytes the same: {same}; resident memory x {growth:.3f}")
    return 0 if same and growth <= GROWTH else 1


if __name__ == "__main__":
    raise SystemExit(main())
