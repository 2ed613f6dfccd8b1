"""Which rule an op has. A primitive without one runs replicated, and says so."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import Op, OpGraph
from autopar.rules import contraction, elementwise, indexing, layout, reduction, windows
from autopar.rules.rule import Eqn, Rule, RuleMaker, replicate

TABLE: Mapping[str, RuleMaker] = {
    **elementwise.RULES,
    **contraction.RULES,
    **reduction.RULES,
    **layout.RULES,
    **indexing.RULES,
    **windows.RULES,
}


def eqn_of(graph: OpGraph, op: Op) -> Eqn:
    """The rule maker's view of an op."""
    return Eqn(
        op.name,
        op.params,
        tuple(graph.shape_of(operand) for operand in op.inputs),
        tuple(graph.values[value].shape for value in op.outputs),
        tuple(graph.dtype_of(operand) for operand in op.inputs),
        tuple(graph.values[value].dtype for value in op.outputs),
    )


def rule_of(eqn: Eqn, table: Mapping[str, RuleMaker] = TABLE) -> Rule:
    """The rule of one equation."""
    maker = table.get(eqn.name)
    if maker is None:
        return replicate(eqn, f"no rule for primitive {eqn.name!r}")
    return maker(eqn)


def rules_of(graph: OpGraph, table: Mapping[str, RuleMaker] = TABLE) -> tuple[Rule, ...]:
    """The rules of all ops, in op order."""
    return tuple(rule_of(eqn_of(graph, op), table) for op in graph.ops)
