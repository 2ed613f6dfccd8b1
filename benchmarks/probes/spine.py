"""Does the whole way work: trace, rules, exact plan, explicit program, equal result, audit?

`python -m benchmarks.probes.spine [--model mlp|gpt] [--mesh 8 --mesh 2x4 --mesh 3] [--json FILE]`

Each of the small models is planned exactly for a cluster whose links cost next to nothing, so that
splitting work always pays, and run on as many virtual CPU devices. Its results (parameters,
optimiser state, loss and gradients) are held against the single device's, compiled collectives
against planned, the objective against an independent recomputation, and the contraction work of a
device against its even share.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import autopar as ap
from autopar.launch import request_cpu_devices
from tests.models.small_models import small_model
from tests.oracles.single_device import differences, run_single

MODELS = ("mlp", "gpt")
MESHES = ("8", "2x4", "3")
DEVICES = 8
# A nanosecond a message and a petabyte a second: nothing against any op.
ALPHA, BETA = 1e-9, 1e-15
PEAK_FLOPS, MEMORY_BANDWIDTH = 1e12, 1e11
LEAST_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Row:
    """One model on one mesh.

    Attributes:
        model, mesh: which.
        ops: of the traced step.
        collectives: that a step runs.
        gap: of the plan's objective; 0 is proven optimal.
        different: leaves of the result that are too far from the single device's.
        audit: whether the compiled program communicates as planned.
        extra, missing: collectives that do not fit.
        checked: whether the independent checker agrees.
        share: parallel share.
        plan_seconds: of tracing and solving.
    """

    model: str
    mesh: str
    ops: int
    collectives: int
    gap: float
    different: tuple[str, ...]
    audit: bool
    extra: int
    missing: int
    checked: bool
    share: float
    plan_seconds: float

    @property
    def passed(self) -> bool:
        """Whether every part of the way works."""
        sound = self.audit and self.checked and not self.different
        return sound and self.gap == 0 and self.share >= LEAST_SHARE


def measure(name: str, mesh: str) -> Row:
    """Plan, run, compare, audit."""
    model = small_model(name)
    sizes = tuple(int(size) for size in mesh.split("x"))
    cluster = ap.Cluster.abstract(
        shape=sizes,
        alpha=(ALPHA,) * len(sizes),
        beta=(BETA,) * len(sizes),
        peak_flops=PEAK_FLOPS,
        memory_bandwidth=MEMORY_BANDWIDTH,
    )
    start = time.perf_counter()
    step = ap.parallelize(model.step, cluster=cluster, method=ap.ShardParallel(logical_mesh=sizes))
    plan = step.plan(*model.args)
    seconds = time.perf_counter() - start
    found = step(*model.args)
    expected = run_single(model, model.args)
    audit = plan.audit()
    return Row(
        name,
        mesh,
        len(plan.frozen.strategies),
        sum(line.times for line in plan.collectives),
        plan.solver.gap,
        tuple(differences(model, model.args, expected, found)),
        audit.ok,
        len(audit.extra),
        len(audit.missing),
        plan.check().ok,
        plan.parallel_share(),
        seconds,
    )


def _line(row: Row) -> str:
    equal = f"{len(row.different)} differ" if row.different else "equal"
    audit = "ok" if row.audit else f"+{row.extra} -{row.missing}"
    return (
        f"{row.model:6}{row.mesh:>6}{row.ops:7}{row.collectives:13}{row.gap:8.2%}{equal:>11}"
        f"{audit:>8}{'ok' if row.checked else 'NO':>7}{row.share:8.3f}{row.plan_seconds:8.1f}"
        f"  {'passed' if row.passed else 'FAILED'}"
    )


def main() -> int:
    """Print the table; the exit status is 0 if every row passes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--mesh", action="append", help=f"default: {', '.join(MESHES)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    options = parser.parse_args()
    request_cpu_devices(DEVICES)
    print(
        f"{'model':6}{'mesh':>6}{'ops':>7}{'collectives':>13}{'gap':>8}{'result':>11}{'audit':>8}"
        f"{'check':>7}{'share':>8}{'plan s':>8}"
    )
    rows = []
    for name in options.model or MODELS:
        for mesh in options.mesh or MESHES:
            rows.append(measure(name, mesh))
            print(_line(rows[-1]), flush=True)
    if options.json:
        text = json.dumps([asdict(row) for row in rows], indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
