"""From (pipeline plan, graph) to what the workers run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.errors import PlanError
from autopar.ir.graph import Literal, OpGraph
from autopar.ir.reshard import Step
from autopar.ir.sharding import Sharding
from autopar.layers.divide import Staged, divide_step, into_stages
from autopar.lower.instructions import StepProgram
from autopar.lower.program import Decisions
from autopar.lower.spmd import abstract_mesh, named_shardings
from autopar.lower.step_program import StageLowering, step_program
from autopar.lower.tasks import StageTask, stage_tasks, task_function
from autopar.plan.fingerprint import check_fingerprint
from autopar.plan.pipeline import PipelinePlan
from autopar.plan.plan import FrozenPlan
from autopar.plan.resolve import plan_strategies
from autopar.rules.rule import Rule


@dataclass(frozen=True, slots=True)
class LoweredPipeline:
    """A pipeline plan carried out on its function.

    Attributes:
        staged: the function in stages.
        stages: each with its tasks.
        step: instruction lists of all workers.
        results: per result of the function, a position among the results of `step`, or a literal.
    """

    staged: Staged
    stages: tuple[StageLowering, ...]
    step: StepProgram
    results: tuple[int | Literal, ...]


def lower_pipeline(plan: PipelinePlan, graph: OpGraph, rules: Sequence[Rule]) -> LoweredPipeline:
    """Carry out a plan.

    Raises:
        PlanError: it is the plan of another function, or damaged.
    """
    check_fingerprint(plan, graph)
    batch = [(graph.inputs[position].value, dim) for position, dim in plan.batch]
    divided = divide_step(graph, rules, batch, plan.micro_batches)
    staged = into_stages(divided, [stage.start for stage in plan.stages])
    stages = tuple(
        lower_stage(staged, number, stage.plan) for number, stage in enumerate(plan.stages)
    )
    micro = divided.micro.graph
    forms = []
    for operand in micro.outputs:
        assert not isinstance(operand, Literal)
        value = micro.values[operand]
        forms.append((value.shape, str(value.dtype)))
    step = step_program(
        stages,
        plan.schedule,
        arguments=len(graph.inputs) - graph.num_hidden,
        hidden=graph.num_hidden,
        results=forms,
    )
    return LoweredPipeline(staged, stages, step, divided.results)


def lower_stage(staged: Staged, number: int, plan: FrozenPlan) -> StageLowering:
    """One stage under its plan.

    Raises:
        PlanError: the plan is of another stage, or damaged.
    """
    stage, rules = staged.graphs[number], staged.rules(number)
    check_fingerprint(plan, stage.graph)
    chosen = {(c.value, c.source, c.target): c.steps for c in plan.reshards}

    def steps_of(value: int, source: Sharding, target: Sharding) -> tuple[Step, ...]:
        steps = chosen.get((value, source, target))
        if steps is None:
            raise PlanError(f"the plan has no way from {source} to {target} for v{value}")
        return steps

    decisions = Decisions(
        tuple(entry.sharding for entry in plan.inputs),
        plan_strategies(plan, stage.graph, rules),
        plan.settled,
        tuple(entry.sharding for entry in plan.outputs),
    )
    return StageLowering(
        stage,
        plan.mesh,
        decisions.inputs,
        decisions.outputs,
        stage_tasks(stage, rules, plan.mesh, decisions, steps_of),
    )


Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


def jit_task(task: StageTask, mesh: Mesh, donated: Sequence[int]) -> Callable[..., Any]:
    """`jax.jit` of a task with its boundary shardings and donations."""
    ins, outs = task.forms()
    return jax.jit(
        task_function(task, mesh),
        in_shardings=named_shardings([form.sharding for form in ins], mesh),
        out_shardings=named_shardings([form.sharding for form in outs], mesh),
        donate_argnums=tuple(donated),
    )


def export_task(task: StageTask, donated: Sequence[int], platforms: Sequence[str]) -> bytes:
    """The task as `jax.export` bytes, which run on any mesh of the same shape.

    Raises:
        PlanError: it calls back into Python.
    """
    mesh = abstract_mesh(task.program.mesh)
    ins, _ = task.forms()
    shardings = named_shardings([form.sharding for form in ins], mesh)
    shapes = [
        jax.ShapeDtypeStruct(form.shape, form.dtype, sharding=sharding)
        for form, sharding in zip(ins, shardings, strict=True)
    ]
    if callback := next((op for op in task.program.graph.ops if op.effects), None):
        raise PlanError(
            f"{callback.name} cannot be sent to a worker",
            where=callback.source,
            why="it calls back into this Python process",
            remedy="Cluster.local() runs it; or leave the callback out",
        )
    jitted: Any = jit_task(task, mesh, donated)
    return bytes(jax.export.export(jitted, platforms=list(platforms))(*shapes).serialize())
