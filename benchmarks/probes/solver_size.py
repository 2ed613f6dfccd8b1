"""How large is the intra-op problem of a 4-layer GPT train step, and who solves it?

`python -m benchmarks.probes.solver_size [--mesh 8 --mesh 2x4] [--solver NAME] [--json FILE]`

For each mesh: nodes, edges and choices as enumerated, after followers are merged, after the exact
simplification (absent and dominated choices, single ones), in the kernel after elimination of low
degrees, and after pruning by reduced costs; the order's width, its largest table and its work. Then
each solver, in a process of its own: objective, bound, gap, seconds, and the most bytes that the
process (for an ILP, its child) held above what it had before.

It looks inside the solver. Peak bytes are read from Linux's /proc.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopar.cluster import Cluster
from autopar.errors import SolveError
from autopar.ir.mesh import Mesh
from autopar.rules.registry import rules_of
from autopar.solver.assemble import IntraModel, assemble
from autopar.solver.intra.elimination import solve_elimination
from autopar.solver.intra.ilp_process import solve_ilp
from autopar.solver.intra.low_degree import eliminate_low_degree
from autopar.solver.intra.ordering import Order, best_order
from autopar.solver.intra.problem import Limits, Problem, Solution
from autopar.solver.intra.pruning import narrow
from autopar.solver.intra.simplify import EXACT_PASSES, simplify
from autopar.trace.build import build_graph
from autopar.trace.jaxpr import trace_function
from examples import gpt

MESHES = ("8", "2x4", "4x4", "2x2x2")
LEVELS = 3
# Of a made-up but plausible cluster, from the outside in: links of 10, 30 and 100 GB/s.
ALPHA = (1e-5, 3e-6, 1e-6)
BETA = (1e-10, 3e-11, 1e-11)
PEAK_FLOPS, MEMORY_BANDWIDTH, MEMORY_BYTES = 1e14, 1e12, 80e9

ILP_SECONDS = 60.0
ELIMINATION_LIMITS = Limits(time_limit=600.0, table_bytes=4 << 30)

SOLVERS: dict[str, Callable[[Problem], Solution]] = {
    "elimination": functools.partial(solve_elimination, limits=ELIMINATION_LIMITS),
    "elimination, no reuse": functools.partial(
        solve_elimination, limits=ELIMINATION_LIMITS, reuse=False
    ),
    "ilp-highs": functools.partial(
        solve_ilp, backend="highs", limits=Limits(time_limit=ILP_SECONDS)
    ),
}
"""What is compared, by name; `--job size` is the measuring of the problem itself."""


@dataclass(frozen=True, slots=True)
class Size:
    """A problem at one point of the way.

    Attributes:
        stage: which point.
        nodes, edges: how many.
        choices: of all nodes together.
        most: choices of the largest node.
        entries: of the largest edge table.
    """

    stage: str
    nodes: int
    edges: int
    choices: int
    most: int
    entries: int

    @property
    def mean(self) -> float:
        """Choices a node."""
        return self.choices / self.nodes if self.nodes else 0.0


@dataclass(frozen=True, slots=True)
class Elimination:
    """The best order of a problem and what it costs.

    Attributes:
        stage: of which problem.
        width: most neighbours of a node when it is eliminated.
        largest: entries of the largest table looked at.
        entries: looked at in all.
        peak_bytes: of tables alive together.
    """

    stage: str
    width: int
    largest: int
    entries: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """One solver on one mesh.

    Attributes:
        solver, mesh: which.
        objective, lower_bound: seconds of a step; NaN if there is no answer.
        gap: relative.
        seconds: of the solve.
        peak_bytes: held above what was held before.
        notes: the solver's.
    """

    solver: str
    mesh: str
    objective: float
    lower_bound: float
    gap: float
    seconds: float
    peak_bytes: int
    notes: tuple[str, ...]


def model_of(mesh: str, config: gpt.Config = gpt.FOUR_LAYERS) -> IntraModel:
    """The problem of the GPT train step on a logical mesh such as `2x4`, each axis a level."""
    sizes = tuple(int(size) for size in mesh.split("x"))
    inner = LEVELS - len(sizes)
    cluster = Cluster.abstract(
        shape=sizes,
        alpha=ALPHA[inner:],
        beta=BETA[inner:],
        peak_flops=PEAK_FLOPS,
        memory_bandwidth=MEMORY_BANDWIDTH,
        memory_bytes=MEMORY_BYTES,
    )
    step, args, _ = gpt.build(config)
    graph = build_graph(trace_function(step, args, {})).graph
    return assemble(graph, rules_of(graph), cluster, Mesh.of(*sizes))


def size_of(stage: str, problem: Problem) -> Size:
    """How large a problem is."""
    sizes = problem.sizes
    entries = max((edge.costs.size for edge in problem.edges), default=0)
    return Size(stage, len(sizes), len(problem.edges), sum(sizes), max(sizes, default=0), entries)


def enumerated(model: IntraModel) -> Size:
    """The full space: every op decides for itself."""
    graph, sizes = model.graph, model.nodes.sizes
    uses = [operand for op in graph.ops for operand in op.inputs if isinstance(operand, int)]
    tied = sum(entry.tied_output >= 0 for entry in graph.inputs)
    edges = len(uses) + len(model.nodes.settled) + tied
    return Size("enumerated", len(sizes), edges, sum(sizes), max(sizes), 0)


def elimination_of(stage: str, problem: Problem) -> Elimination:
    """What exact elimination of a problem costs."""
    order = best_order(problem)
    largest = max(bags(problem, order), default=0)
    return Elimination(stage, order.width, largest, order.entries, order.peak_bytes)


def bags(problem: Problem, order: Order) -> Iterator[int]:
    """Entries of the table that each elimination looks at."""
    near: list[set[int]] = [set() for _ in problem.sizes]
    for edge in problem.edges:
        near[edge.a].add(edge.b)
        near[edge.b].add(edge.a)
    for node in order.nodes:
        scope = near[node]
        yield problem.sizes[node] * math.prod(problem.sizes[other] for other in scope)
        for other in scope:
            near[other] |= scope
            near[other] -= {node, other}


def sizes(model: IntraModel) -> tuple[tuple[Size, ...], tuple[Elimination, ...]]:
    """The problem's size at each point of the way, and what elimination would cost there."""
    merged = model.problem
    simple = simplify(merged, EXACT_PASSES).problem
    kernel = simplify(merged, (*EXACT_PASSES, eliminate_low_degree)).problem
    pruned = simplify(narrow(kernel).problem, (*EXACT_PASSES, eliminate_low_degree)).problem
    stages = (("followers merged", merged), ("simplified", simple))
    last = (("kernel", kernel), ("kernel, pruned", pruned))
    return (
        (enumerated(model), *(size_of(name, problem) for name, problem in (*stages, *last))),
        tuple(elimination_of(name, problem) for name, problem in (stages[1], *last)),
    )


def run_solver(name: str, mesh: str, problem: Problem) -> Run:
    """Solve and measure, in this process."""
    _forget_memory()
    before, start = _held("VmRSS"), time.perf_counter()
    try:
        found = SOLVERS[name](problem)
    except SolveError as error:
        return Run(
            name,
            mesh,
            math.nan,
            math.nan,
            math.nan,
            time.perf_counter() - start,
            _peak(name, before),
            (str(error).splitlines()[0],),
        )
    return Run(
        name,
        mesh,
        found.objective,
        found.lower_bound,
        found.gap,
        found.seconds,
        _peak(name, before),
        found.notes,
    )


def _forget_memory() -> None:
    """Hand freed memory back, so that none of it is used again uncounted, and reset the peak."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _held(field: str) -> int:
    """Bytes of a field of this process's /proc status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    row = next(line for line in lines if line.startswith(f"{field}:"))
    return int(row.split()[1]) * 1024


def _peak(name: str, before: int) -> int:
    if name.startswith("ilp"):
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return _held("VmHWM") - before


def job(name: str, mesh: str) -> dict[str, Any]:
    """One measurement, as a JSON object."""
    start = time.perf_counter()
    model = model_of(mesh)
    seconds = time.perf_counter() - start
    if name != "size":
        return asdict(run_solver(name, mesh, model.problem))
    stages, orders = sizes(model)
    return {
        "mesh": mesh,
        "model_seconds": seconds,
        "sizes": [{**asdict(stage), "mean": stage.mean} for stage in stages],
        "elimination": [asdict(order) for order in orders],
    }


def in_child(name: str, mesh: str) -> dict[str, Any]:
    """The same in a process of its own."""
    program = (sys.executable, "-m", __spec__.name, "--job", name, "--mesh", mesh)
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return {"mesh": mesh, "solver": name, "failed": tail[0]}
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return made


def size_lines(found: dict[str, Any]) -> Iterator[str]:
    """The sizes of one mesh as a table."""
    yield f"mesh {found['mesh']}"
    if "failed" in found:
        yield f"  failed: {found['failed']}"
        return
    yield f"  traced, enumerated and priced in {found['model_seconds']:.1f} s"
    yield f"  {'':18}{'nodes':>7}{'edges':>7}{'choices':>9}{'mean':>7}{'most':>6}{'edge table':>12}"
    for row in found["sizes"]:
        yield (
            f"  {row['stage']:18}{row['nodes']:7}{row['edges']:7}{row['choices']:9}"
            f"{row['mean']:7.1f}{row['most']:6}{row['entries']:12,}"
        )
    yield f"  {'':18}{'width':>7}{'largest table':>16}{'entries':>18}{'peak bytes':>18}"
    for row in found["elimination"]:
        yield (
            f"  {row['stage']:18}{row['width']:7}{row['largest']:16.3g}{row['entries']:18.3g}"
            f"{row['peak_bytes']:18.3g}"
        )


def run_line(found: dict[str, Any]) -> str:
    """One solver's row."""
    if "failed" in found:
        return f"  {found['solver']:22} failed: {found['failed']}"
    notes = "; ".join(found["notes"])
    return (
        f"  {found['solver']:22}{found['objective']:14.6e} s, bound {found['lower_bound']:.6e}, "
        f"gap {found['gap']:.3%}, {found['seconds']:.2f} s, "
        f"{found['peak_bytes'] / 2**20:,.0f} MiB  {notes}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mesh", action="append", help=f"default: {', '.join(MESHES)}")
    parser.add_argument("--solver", action="append", choices=sorted(SOLVERS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows as JSON")
    parser.add_argument("--job", choices=("size", *SOLVERS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    meshes = options.mesh or list(MESHES)
    if options.job:
        print(json.dumps(job(options.job, meshes[0])))
        return
    rows: list[dict[str, Any]] = []
    for mesh in meshes:
        rows.append(in_child("size", mesh))
        print("\n".join(size_lines(rows[-1])), flush=True)
        for solver in options.solver or SOLVERS:
            rows.append(in_child(solver, mesh))
            print(run_line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
