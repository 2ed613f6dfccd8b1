"""From (graph, cluster, PipeshardParallel) to a pipeline plan."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import jax

from autopar.cluster import Cluster
from autopar.errors import ArgumentError, MicrobatchError
from autopar.ir.graph import Literal, OpGraph
from autopar.ir.sharding import Sharding, replicated
from autopar.layers.divide import Divided, Staged, divide_step, into_stages
from autopar.layers.grouping import group
from autopar.layers.stage_graph import BACKWARD_TASK, FORWARD_TASK
from autopar.methods import (
    AutoStages,
    ManualStages,
    PipeshardParallel,
    ShardParallel,
    UniformStages,
)
from autopar.plan.boundaries import argument_boundaries, result_boundaries
from autopar.plan.fingerprint import fingerprint, signatures
from autopar.plan.pipeline import PipelinePlan, StagePlan, TransferCost
from autopar.plan.plan import Boundary, CostSummary, SolverReport
from autopar.plan.schedule import Schedule
from autopar.rules.rule import Rule
from autopar.solver.inter.cuts import Cut, auto_cut, manual_cut, uniform_cut
from autopar.solver.inter.links import TransferPrices
from autopar.solver.inter.stage_plan import plan_stage
from autopar.solver.schedules.communicate import Edges
from autopar.solver.schedules.registry import make_schedule
from autopar.solver.schedules.simulate import Durations, Memory, Timeline, simulate

Progress = Callable[[str], None]


def solve_pipeline(
    graph: OpGraph,
    rules: Sequence[Rule],
    cluster: Cluster,
    method: PipeshardParallel | ShardParallel,
    *,
    batch: Mapping[int, int],
    progress: Progress = lambda text: None,
) -> PipelinePlan:
    """Plan a step in micro-batches, in one stage or several.

    Args:
        graph, rules: the whole step.
        cluster: all devices.
        method: stages; ShardParallel is one stage that accumulates gradients.
        batch: positions of the inputs that hold one row per example, with their batch dims.
        progress: told what is being worked on.

    Raises:
        MicrobatchError: micro-batches would not be exact.
        SolveError: no stages fit.
    """
    begin = time.perf_counter()
    progress("dividing the batch")
    if method.num_micro_batches > 1 and not batch:
        raise MicrobatchError(
            "no argument is the batch",
            why="micro-batches are slices of the arguments that hold one row per example",
            remedy="name these arguments in batch_argnums",
        )
    pairs = tuple(sorted(batch.items()))
    values = [(graph.inputs[position].value, dim) for position, dim in pairs]
    divided = divide_step(graph, rules, values, method.num_micro_batches)
    shard = method if isinstance(method, ShardParallel) else method.shard
    name = "gpipe" if isinstance(method, ShardParallel) else method.schedule
    _check_schedule(divided, name)
    progress("choosing stages")
    cut = _cut(divided, cluster, method, progress)
    staged = into_stages(divided, cut.starts)
    stages = []
    for number, (stage, place) in enumerate(zip(staged.graphs, cut.places, strict=True)):
        progress(f"solving stage {number} of {len(staged.graphs)}")
        stages.append(
            plan_stage(
                stage,
                staged.rules(number),
                place.cluster,
                shard,
                start=cut.starts[number],
                devices=place.devices,
            )
        )
    schedule = make_schedule(name, len(stages), method.num_micro_batches)
    transfers = _transfers(staged, TransferPrices(cluster, [p.devices for p in cut.places]))
    timeline = timeline_of(stages, schedule, transfers)
    cost = _cost(stages, schedule, timeline)
    seconds = time.perf_counter() - begin
    first, second = cut.report(timeline.makespan)
    return PipelinePlan(
        function=graph.name,
        jax_version=jax.__version__,
        fingerprint=fingerprint(graph),
        signatures=signatures(graph),
        cluster=cluster,
        method=type(method).__name__,
        batch=pairs,
        inputs=_inputs(graph, staged, stages),
        outputs=_outputs(graph, staged, stages),
        num_hidden=graph.num_hidden,
        schedule=schedule,
        stages=tuple(stages),
        transfers=transfers,
        cost=cost,
        solver=SolverReport(
            cut.name, timeline.makespan, first, second, seconds, _notes(stages, cut)
        ),
        notes=(*graph.notes, *_memory_notes(timeline, cluster)),
    )


def _check_schedule(divided: Divided, name: str) -> None:
    backward = any(
        phase == "loop" and region == "backward" and not divided.micro.free.issuperset(op.outputs)
        for op, phase, region in zip(
            divided.micro.graph.ops, divided.micro.phases, divided.micro.regions, strict=True
        )
    )
    if backward and name == "inference":
        raise ArgumentError(
            "the schedule inference runs no backward, and this function has one",
            got=divided.micro.graph.name,
            remedy='schedule="1f1b"',
        )


def _cut(
    divided: Divided,
    cluster: Cluster,
    method: PipeshardParallel | ShardParallel,
    progress: Progress,
) -> Cut:
    if isinstance(method, ShardParallel):
        return uniform_cut(cluster, (0,), "one stage")
    stages = method.stages
    if isinstance(stages, ManualStages):
        return manual_cut(divided, cluster, stages)
    if isinstance(stages, AutoStages):
        return auto_cut(divided, cluster, method, progress)
    return _uniform(divided, cluster, method, stages)


def _uniform(
    divided: Divided, cluster: Cluster, method: PipeshardParallel, stages: UniformStages
) -> Cut:
    line, layers = divided.line, method.layers.count or stages.count
    if stages.count > layers:
        raise ArgumentError(
            "there are fewer layers than stages",
            got=f"AutoLayers({layers}), UniformStages({stages.count})",
        )
    firsts = group(line.work, line.cuts, layers)
    if layers == stages.count:
        return uniform_cut(cluster, firsts, "uniform stages")
    ends = [*firsts[1:], len(line.ops)]
    work = [math.fsum(line.work[a:b]) for a, b in zip(firsts, ends, strict=True)]
    chosen = group(work, [line.cuts[first] for first in firsts], stages.count)
    return uniform_cut(cluster, tuple(firsts[n] for n in chosen), "uniform stages")


# --- figures -----------------------------------------------------------------------------------


def _transfers(staged: Staged, prices: TransferPrices) -> tuple[TransferCost, ...]:
    """What one micro-batch moves between each pair of stages."""
    readers: dict[tuple[int, int], list[int]] = {}
    for target in staged.graphs:
        for port in target.ports:
            if port.kind == "recv":
                readers.setdefault((port.stage, port.source), []).append(target.stage)
    found: dict[tuple[int, int, str], int] = {}
    for source in staged.graphs:
        graph = source.graph
        task_of = {
            v: task for op, task in zip(graph.ops, source.tasks, strict=True) for v in op.outputs
        }
        for exit_, value in zip(source.exits, graph.returned, strict=True):
            task = task_of.get(value, "")
            if exit_.kind == "recv" and task in (FORWARD_TASK, BACKWARD_TASK):
                for target_stage in readers.get((source.stage, exit_.target), []):
                    pair = (source.stage, target_stage, task)
                    found[pair] = found.get(pair, 0) + graph.values[value].nbytes
    return tuple(
        TransferCost(a, b, kind, size, prices.seconds(a, b, size))
        for (a, b, kind), size in sorted(found.items())
    )


def timeline_of(
    stages: Sequence[StagePlan], schedule: Schedule, transfers: Sequence[TransferCost]
) -> Timeline:
    """The simulated step."""
    seconds = {(t.source, t.target, t.kind): t.seconds for t in transfers}
    edges = Edges(
        tuple((t.source, t.target) for t in transfers if t.kind == FORWARD_TASK),
        tuple((t.source, t.target) for t in transfers if t.kind == BACKWARD_TASK),
    )
    durations = Durations(
        forward=tuple(stage.forward_seconds for stage in stages),
        backward=tuple(stage.backward_seconds for stage in stages),
        update=tuple(stage.update_seconds for stage in stages),
        transfer=lambda source, target, kind: seconds.get((source, target, kind), 0.0),
    )
    memory = Memory(
        tuple(stage.base_bytes + stage.workspace_bytes for stage in stages),
        tuple(stage.activation_bytes for stage in stages),
    )
    return simulate(schedule, durations, memory, edges)


def _cost(stages: Sequence[StagePlan], schedule: Schedule, timeline: Timeline) -> CostSummary:
    """Seconds of the simulated step; what it is longer than pure work counts as communication."""
    count = schedule.micro_batches
    work = max(stage.busy_seconds(count) for stage in stages)
    return CostSummary(work, max(0.0, timeline.makespan - work), int(max(timeline.peak_bytes)))


def _notes(stages: Sequence[StagePlan], cut: Cut) -> tuple[str, ...]:
    notes = list(cut.notes)
    for number, stage in enumerate(stages):
        report = stage.plan.solver
        notes.append(
            f"stage {number}: {report.name} on mesh {stage.plan.mesh}, gap {report.gap:.2g}"
        )
    return tuple(notes)


def _memory_notes(timeline: Timeline, cluster: Cluster) -> tuple[str, ...]:
    limit = cluster.device.memory_bytes
    return tuple(
        f"stage {number} needs {int(peak):,} bytes a device, more than the device has"
        for number, peak in enumerate(timeline.peak_bytes)
        if peak > limit
    )


def _inputs(graph: OpGraph, staged: Staged, stages: Sequence[StagePlan]) -> tuple[Boundary, ...]:
    """Leaves with their layout on the stage that keeps them, or on the first that reads them."""
    layout: dict[int, Sharding] = {}
    for stage, plan in zip(staged.graphs, stages, strict=True):
        for port, entry in zip(stage.ports, plan.plan.inputs, strict=True):
            if port.kind in ("whole", "micro"):
                layout.setdefault(port.source, entry.sharding)
    shardings = [
        layout.get(number, replicated(len(graph.values[leaf.value].shape)))
        for number, leaf in enumerate(graph.inputs)
    ]
    return argument_boundaries(graph, shardings)


def _outputs(graph: OpGraph, staged: Staged, stages: Sequence[StagePlan]) -> tuple[Boundary, ...]:
    layout = {
        exit_.target: entry.sharding
        for stage, plan in zip(staged.graphs, stages, strict=True)
        for exit_, entry in zip(stage.exits, plan.plan.outputs, strict=True)
        if exit_.kind == "result"
    }
    shardings = []
    for operand, where in zip(graph.outputs, staged.divided.results, strict=True):
        known = -1 if isinstance(where, Literal) else where
        shardings.append(layout.get(known, replicated(len(graph.shape_of(operand)))))
    return result_boundaries(graph, shardings)
