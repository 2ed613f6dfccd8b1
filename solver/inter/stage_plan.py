"""The intra-op plan of one stage: its graph solved with each op's price times how often it runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from autopar.cluster import Cluster
from autopar.ir.reshard import Step
from autopar.ir.sharding import Sharding
from autopar.layers.stage_graph import BACKWARD_TASK, FORWARD_TASK, LOOPED, StageGraph
from autopar.lower.boundary import outside
from autopar.lower.program import Decisions
from autopar.lower.tasks import Slot, StageTask, stage_tasks
from autopar.methods import ShardParallel
from autopar.plan.boundaries import argument_boundaries, result_boundaries
from autopar.plan.fingerprint import fingerprint, signatures
from autopar.plan.pipeline import StagePlan
from autopar.plan.plan import (
    CostSummary,
    FrozenPlan,
    ReshardChoice,
    SolverReport,
)
from autopar.rules.rule import Rule
from autopar.rules.strategy import assignment_text
from autopar.solver.assemble import IntraModel, assemble
from autopar.solver.cost.memory import peak_bytes
from autopar.solver.cost.op_costs import OpCosts
from autopar.solver.intra.problem import Limits, Solution
from autopar.solver.intra.solve import solve_problem
from autopar.solver.logical_mesh import logical_meshes
from autopar.solver.price import communication_seconds, price_list


@dataclass(frozen=True, slots=True)
class _Answer:
    model: IntraModel
    decisions: Decisions
    solution: Solution


def plan_stage(
    stage: StageGraph,
    rules: Sequence[Rule],
    cluster: Cluster,
    shard: ShardParallel,
    *,
    start: int,
    devices: tuple[int, ...],
) -> StagePlan:
    """Plan one stage on its devices.

    Args:
        stage, rules: its graph.
        cluster: its devices and their links alone.
        shard: logical mesh, solver and limits.
        start: its first position on the forward line.
        devices: their positions in the whole cluster.
    """
    meshes = logical_meshes(shard.logical_mesh, cluster.size)
    limits = Limits(time_limit=shard.time_limit / len(meshes))
    answers = []
    for mesh in meshes:
        model = assemble(stage.graph, rules, cluster, mesh, times=stage.times)
        solution = solve_problem(model.problem, solver=shard.solver, limits=limits)
        answers.append(_Answer(model, model.decode(solution.choices), solution))
    best = min(answers, key=lambda answer: answer.solution.objective)
    bound = min(answer.solution.lower_bound for answer in answers)
    return _freeze(stage, best, bound, start, devices)


def _freeze(
    stage: StageGraph, best: _Answer, bound: float, start: int, devices: tuple[int, ...]
) -> StagePlan:
    model, decisions, graph = best.model, best.decisions, stage.graph
    chosen: dict[tuple[int, Sharding, Sharding], tuple[Step, ...]] = {}

    def steps_of(value: int, source: Sharding, target: Sharding) -> tuple[Step, ...]:
        steps = model.steps(value, source, target)
        chosen[value, source, target] = steps
        return steps

    tasks = stage_tasks(stage, model.rules, model.mesh, decisions, steps_of)
    lines = {task.name: price_list(task.program, task.rules, model.collectives) for task in tasks}
    compute = _compute_seconds(stage, model, decisions)
    seconds = {
        name: compute.get(name, 0.0) + communication_seconds(lines.get(name, ()))
        for name in dict.fromkeys([*compute, *lines])
    }
    memory = _memory(tasks, model)
    times = {task.name: task.times for task in tasks}
    solution = best.solution
    gap = (solution.objective - bound) / solution.objective if solution.objective > bound else 0.0
    plan = FrozenPlan(
        function=graph.name,
        jax_version=jax.__version__,
        fingerprint=fingerprint(graph),
        signatures=signatures(graph),
        cluster=model.collectives.cluster,
        mesh=model.mesh,
        method="ShardParallel",
        inputs=argument_boundaries(graph, decisions.inputs),
        outputs=result_boundaries(graph, decisions.outputs),
        num_hidden=0,
        strategies=tuple(
            assignment_text(rule, strategy.assignment, model.mesh)
            for rule, strategy in zip(model.rules, decisions.ops, strict=True)
        ),
        settled=decisions.settled,
        reshards=tuple(ReshardChoice(*key, steps) for key, steps in chosen.items()),
        collectives=tuple(
            replace(line, times=line.times * times[name])
            for name, task_lines in lines.items()
            for line in task_lines
        ),
        cost=CostSummary(
            math.fsum(compute[name] * times.get(name, 1) for name in compute),
            math.fsum(
                communication_seconds(task_lines) * times[name]
                for name, task_lines in lines.items()
            ),
            memory.base + memory.activation + memory.workspace,
        ),
        solver=SolverReport(
            solution.name, solution.objective, bound, gap, solution.seconds, solution.notes
        ),
        notes=graph.notes,
    )
    rest = math.fsum(value for name, value in seconds.items() if name not in LOOPED)
    return StagePlan(
        start,
        devices,
        plan,
        seconds.get(FORWARD_TASK, 0.0),
        seconds.get(BACKWARD_TASK, 0.0),
        rest,
        memory.base,
        memory.activation,
        memory.workspace,
    )


def _compute_seconds(
    stage: StageGraph, model: IntraModel, decisions: Decisions
) -> dict[str, float]:
    """Roofline seconds of one run of each task."""
    costs = OpCosts(stage.graph, model.rules, model.collectives)
    found: dict[str, list[float]] = {}
    for index, (task, strategy) in enumerate(zip(stage.tasks, decisions.ops, strict=True)):
        found.setdefault(task, []).append(costs.seconds(index, strategy))
    return {task: math.fsum(parts) for task, parts in found.items()}


@dataclass(frozen=True, slots=True)
class _Memory:
    base: int
    activation: int
    workspace: int


def _memory(tasks: Sequence[StageTask], model: IntraModel) -> _Memory:
    """Bytes of one device: held through the step, by a micro-batch in flight, and besides."""
    by_name = {task.name: task for task in tasks}
    forward, backward = by_name.get(FORWARD_TASK), by_name.get(BACKWARD_TASK)
    made_in_loop = set(forward.outputs if forward else ())
    kept = [slot for slot in (backward.inputs if backward else ()) if slot in made_in_loop]
    base: dict[Slot, int] = {}
    for task in tasks:
        ins, _ = task.forms()
        for slot, form in zip(task.all_inputs, ins, strict=True):
            if slot not in made_in_loop:
                size = form.sharding.local_size(form.shape, model.mesh)
                base[slot] = size * int(form.dtype.itemsize)
    activation = sum(_local_bytes(slot, model) for slot in kept)
    workspace = max(
        (
            peak_bytes(task.program, task.rules)
            - sum(_local_bytes(slot, model) for slot in task.inputs)
            for task in tasks
        ),
        default=0,
    )
    return _Memory(sum(base.values()), activation, max(0, workspace))


def _local_bytes(slot: Slot, model: IntraModel) -> int:
    value = model.graph.values[slot.value]
    form = outside(value.shape, value.dtype, slot.sharding, model.mesh, wide=slot.wide)
    return form.sharding.local_size(form.shape, model.mesh) * int(form.dtype.itemsize)
