"""From (pipeline plan, graph) to what the workers run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.errors import PlanError
from autopar.ir.graph import Literal, OpGraph
from autopar.layers.divide import Staged, divide_step, into_stages
from autopar.lower.from_plan import decisions_of
from autopar.lower.instructions import StepProgram
from autopar.lower.spmd import AnyMesh, abstract_mesh, form_avals, jit_forms
from autopar.lower.step_program import StageLowering, step_program
from autopar.lower.tasks import StageTask, stage_tasks, task_function
from autopar.plan.fingerprint import check_fingerprint
from autopar.plan.pipeline import PipelinePlan
from autopar.plan.plan import FrozenPlan
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
    results = [micro.values[value] for value in micro.returned]
    step = step_program(
        stages,
        plan.schedule,
        arguments=len(graph.inputs) - graph.num_hidden,
        hidden=graph.num_hidden,
        results=[(value.shape, str(value.dtype)) for value in results],
    )
    return LoweredPipeline(staged, stages, step, divided.results)


def lower_stage(staged: Staged, number: int, plan: FrozenPlan) -> StageLowering:
    """One stage under its plan.

    Raises:
        PlanError: the plan is of another stage, or damaged.
    """
    stage, rules = staged.graphs[number], staged.rules(number)
    decisions, steps_of = decisions_of(plan, stage.graph, rules)
    return StageLowering(
        stage,
        plan.mesh,
        decisions.inputs,
        decisions.outputs,
        stage_tasks(stage, rules, plan.mesh, decisions, steps_of),
    )


def jit_task(task: StageTask, mesh: AnyMesh) -> Callable[..., Any]:
    """`jax.jit` of a task with its boundary shardings; who compiles it adds what it donates."""
    made: Callable[..., Any] = jit_forms(task_function(task, mesh), mesh, *task.forms())
    return made


def export_task(task: StageTask, platforms: Sequence[str]) -> bytes:
    """The task as `jax.export` bytes, which run on any mesh of the same shape.

    Raises:
        PlanError: it calls back into Python.
    """
    if callback := next((op for op in task.program.graph.ops if op.effects), None):
        raise PlanError(
            f"{callback.name} cannot be sent to a worker",
            where=callback.source,
            why="it calls back into this Python process",
            remedy="Cluster.local() runs it; or leave the callback out",
        )
    mesh = abstract_mesh(task.program.mesh)
    ins, _ = task.forms()
    jitted: Any = jit_task(task, mesh)
    exported = jax.export.export(jitted, platforms=list(platforms))(*form_avals(ins, mesh))
    return bytes(exported.serialize())
