"""From (frozen plan, graph) to its decisions, and to the program that runs."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import PlanError
from autopar.ir.graph import OpGraph
from autopar.ir.reshard import Step
from autopar.ir.sharding import Sharding
from autopar.lower.program import Decisions, Program, StepsOf, write_program
from autopar.plan.fingerprint import check_fingerprint
from autopar.plan.plan import FrozenPlan
from autopar.plan.resolve import plan_strategies
from autopar.rules.rule import Rule


def program_of(plan: FrozenPlan, graph: OpGraph, rules: Sequence[Rule]) -> Program:
    """Write the program of a plan for the function it was made for.

    Raises:
        PlanError: the plan is of another function, or damaged.
    """
    return write_program(graph, plan.mesh, *decisions_of(plan, graph, rules))


def decisions_of(
    plan: FrozenPlan, graph: OpGraph, rules: Sequence[Rule]
) -> tuple[Decisions, StepsOf]:
    """What a plan decides for the function it was made for, and the steps of its reshards.

    Raises:
        PlanError: the plan is of another function, or damaged; also when a step is asked for that
            it does not have.
    """
    check_fingerprint(plan, graph)
    chosen = {(c.value, c.source, c.target): c.steps for c in plan.reshards}

    def steps_of(value: int, source: Sharding, target: Sharding) -> tuple[Step, ...]:
        steps = chosen.get((value, source, target))
        if steps is None:
            raise PlanError(f"the plan has no way from {source} to {target} for v{value}")
        return steps

    decisions = Decisions(
        tuple(entry.sharding for entry in plan.inputs),
        plan_strategies(plan, graph, rules),
        plan.settled,
        tuple(entry.sharding for entry in plan.outputs),
    )
    return decisions, steps_of
