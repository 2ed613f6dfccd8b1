"""Which ops touch memory: chains of elementwise and layout ops are fused, as XLA fuses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.graph import Literal, OpGraph
from autopar.rules.rule import Rule


@dataclass(frozen=True, slots=True)
class Traffic:
    """What an op reads from and writes to memory.

    Attributes:
        reads: operand positions that are read from memory.
        writes: result positions that are written.
    """

    reads: tuple[int, ...]
    writes: tuple[int, ...]


def fusible(rule: Rule) -> bool:
    """Whether XLA would fuse the op into a consumer: nothing is reduced or looked up."""
    plain = all(factor.kind in ("pass", "linear") for factor in rule.factors)
    return rule.flops == 0 and not rule.reason and plain


def memory_traffic(graph: OpGraph, rules: Sequence[Rule]) -> tuple[Traffic, ...]:
    """Per op, what it moves. A fusible op's result stays in registers if its one consumer is
    fusible too; everything else goes through memory once."""
    consumers: list[list[int]] = [[] for _ in graph.values]
    for op in graph.ops:
        for operand in op.reads:
            consumers[operand].append(op.index)
    returned = set(graph.returned)
    stored = {entry.value for entry in graph.inputs}
    for op in graph.ops:
        for value in op.outputs:
            users = consumers[value]
            inside = (
                fusible(rules[op.index])
                and len(users) == 1
                and fusible(rules[users[0]])
                and value not in returned
            )
            if not inside:
                stored.add(value)
    return tuple(
        Traffic(
            tuple(p for p, o in enumerate(op.inputs) if not isinstance(o, Literal) and o in stored),
            tuple(p for p, v in enumerate(op.outputs) if v in stored),
        )
        for op in graph.ops
    )
