"""In which region is each equation of a train step, and do micro-batches give the same result?

`python -m benchmarks.probes.split_table [STEP ...] [--equations] [--json FILE]`

For each step of `tests/models/loss_variants.py`: how many equations stand in each region and run
before, in and after the loop over micro-batches; how many values cross out of the loop; and the
largest relative difference between the micro-batched step and plain `jax.jit`, or the error.
`--equations` lists every equation.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import jax
import numpy as np

from autopar.errors import MicrobatchError
from autopar.rules.registry import rules_of
from autopar.trace.backward import REGIONS, RUNS, MicroSplit, split_step
from autopar.trace.batch import batch_values
from autopar.trace.build import build_graph
from autopar.trace.jaxpr import trace_function
from autopar.trace.microbatch import run_microbatched
from tests.models.loss_variants import Variant, refused_variants, variants

COUNTS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Row:
    """One step in so many micro-batches.

    Attributes:
        step, count: which.
        regions, runs: equations by region and by when they run.
        crossing: values that leave the loop.
        difference: largest relative difference of any result; None if the step is refused.
        within: whether that is within the step's tolerance.
        error: the refusal.
    """

    step: str
    count: int
    regions: dict[str, int]
    runs: dict[str, int]
    crossing: int
    difference: float | None
    within: bool
    error: str = ""


def relative_difference(got: Sequence[jax.Array], wanted: Sequence[jax.Array]) -> float:
    """Largest absolute difference of any result over its largest magnitude."""
    worst = 0.0
    for one, other in zip(got, wanted, strict=True):
        scale = float(np.max(np.abs(np.asarray(other)), initial=0.0)) or 1.0
        worst = max(worst, float(np.max(np.abs(np.asarray(one) - np.asarray(other)))) / scale)
    return worst


def measure(name: str, variant: Variant, count: int) -> tuple[Row, MicroSplit | None]:
    """Divide, run and compare one step."""
    traced = trace_function(variant.step, variant.args, {})
    built = build_graph(traced)
    last = len(variant.args) - 1
    batch = batch_values(traced, built.graph, (last,), batch_dims=variant.batch_dim)
    try:
        split = split_step(built.graph, rules_of(built.graph), batch, count)
    except MicrobatchError as error:
        return Row(name, count, {}, {}, 0, None, False, str(error)), None
    got = run_microbatched(split, [*jax.tree.leaves(variant.args), *built.hidden])
    wanted = jax.tree.leaves(jax.jit(variant.step)(*variant.args))
    difference = relative_difference(got, wanted)
    regions = Counter(placed.region for placed in split.placed)
    runs = Counter(placed.runs for placed in split.placed)
    within = difference <= variant.tolerance
    return Row(name, count, regions, runs, len(split.crossing), difference, within), split


def _equations(split: MicroSplit) -> str:
    lines = []
    for op, placed in zip(split.graph.ops, split.placed, strict=True):
        states = ", ".join(map(str, placed.outs))
        lines.append(f"  {placed.region:9}{placed.runs:7}{op.name:24}{states:18} {op.source}")
    return "\n".join(lines)


def _line(row: Row) -> str:
    regions = "".join(f"{row.regions.get(name, 0):9}" for name in REGIONS)
    runs = "".join(f"{row.runs.get(name, 0):7}" for name in RUNS)
    if row.difference is None:
        return f"{row.step:16}{row.count:3}  refused: {row.error.splitlines()[2].strip()}"
    verdict = "equal" if row.within else "DIFFERS"
    return (
        f"{row.step:16}{row.count:3}{regions}{runs}{row.crossing:6} {row.difference:9.1e} {verdict}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("steps", nargs="*", help="names of steps; all if none is given")
    parser.add_argument("--equations", action="store_true", help="list every equation")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON")
    options = parser.parse_args()
    known = {**variants(), **refused_variants()}
    heads = "".join(f"{name:>9}" for name in REGIONS) + "".join(f"{name:>7}" for name in RUNS)
    print(f"{'step':16}{'mb':>3}{heads}{'cross':>6} {'max diff':>9}")
    rows = []
    for name in options.steps or known:
        for count in COUNTS:
            row, split = measure(name, known[name], count)
            rows.append(row)
            print(_line(row))
            if options.equations and split is not None and count == COUNTS[1]:
                print(_equations(split))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)


if __name__ == "__main__":
    main()
