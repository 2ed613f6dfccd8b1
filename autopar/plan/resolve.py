"""From a frozen plan and a graph back to the strategies it names."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import PlanError, VerifyError
from autopar.ir.graph import OpGraph
from autopar.plan.plan import FrozenPlan
from autopar.rules.rule import Rule
from autopar.rules.strategy import Strategy, parse_assignment, resolve


def plan_strategies(
    plan: FrozenPlan, graph: OpGraph, rules: Sequence[Rule]
) -> tuple[Strategy, ...]:
    """Per op, its strategy.

    Raises:
        PlanError: a strategy does not fit its op.
    """
    made = []
    for op, rule, text in zip(graph.ops, rules, plan.strategies, strict=True):
        try:
            strategy = resolve(rule, parse_assignment(rule, text, plan.mesh), plan.mesh)
        except VerifyError as error:
            raise PlanError(str(error), where=op.source) from error
        if strategy is None:
            raise PlanError(
                f"strategy {text!r} of op {op.index} ({op.name}) does not divide",
                where=op.source,
                got=rule.spec,
            )
        made.append(strategy)
    return tuple(made)
