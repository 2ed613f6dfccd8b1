"""The audit of a pipeline: every task of every stage is compiled and held against its plan.

The parallel share of a stage compares contraction FLOPs: its tasks on one device, times how often
they run, over n times those of one of its n devices. Both are read from compiled HLO.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.mesh import Mesh
from autopar.ir.reshard import Step
from autopar.ir.sharding import Sharding, replicated
from autopar.lower.program import Decisions, Program, write_program
from autopar.lower.step_program import StageLowering
from autopar.lower.tasks import StageTask
from autopar.report.audit import AuditReport, audit_compiled
from autopar.report.compile import compile_program
from autopar.report.hlo import read_hlo
from autopar.rules.strategy import resolve


def verify_stages(
    stages: Sequence[StageLowering], *, timeout: float
) -> tuple[AuditReport, tuple[float, ...]]:
    """The merged audit of all tasks, and the parallel share of each stage.

    Args:
        stages: the lowered stages.
        timeout: seconds for each compilation.

    Raises:
        AuditError: a task did not compile in time.
    """
    reports, shares = [], []
    for lowering in stages:
        alone, planned = 0.0, 0.0
        for task in lowering.tasks:
            compiled = compile_program(task.program, task.rules, timeout=timeout)
            reports.append(audit_compiled(task.program, task.rules, compiled))
            if any(rule.flops for rule in task.rules):
                one = _on_one_device(task)
                single = compile_program(one, task.rules, timeout=timeout)
                alone += task.times * read_hlo(single.text).dot_flops
                planned += task.times * read_hlo(compiled.text).dot_flops
        shares.append(alone / (lowering.mesh.size * planned) if planned else 1.0)
    return _merged(reports), tuple(shares)


def _on_one_device(task: StageTask) -> Program:
    """The task's graph as one device runs it."""
    graph, mesh = task.program.graph, Mesh.of(1)
    strategies = []
    for rule in task.rules:
        strategy = resolve(rule, (-1,), mesh)
        assert strategy is not None
        strategies.append(strategy)

    def nothing(value: int, source: Sharding, target: Sharding) -> tuple[Step, ...]:
        raise AssertionError("one device moves nothing")

    decisions = Decisions(
        tuple(replicated(len(graph.values[e.value].shape)) for e in graph.inputs),
        tuple(strategies),
        (),
        tuple(replicated(len(graph.shape_of(o))) for o in graph.outputs),
    )
    return write_program(graph, mesh, decisions, nothing)


def _merged(reports: Sequence[AuditReport]) -> AuditReport:
    return AuditReport(
        extra=tuple(f for r in reports for f in r.extra),
        missing=tuple(f for r in reports for f in r.missing),
        merged=tuple(f for r in reports for f in r.merged),
        dropped=tuple(f for r in reports for f in r.dropped),
        hoisted=tuple(f for r in reports for f in r.hoisted),
        planned=sum(r.planned for r in reports),
        compiled=sum(r.compiled for r in reports),
        notes=tuple(dict.fromkeys(note for r in reports for note in r.notes)),
    )
