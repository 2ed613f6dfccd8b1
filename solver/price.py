"""The price list of a program: what each collective is, how long it takes, whose it is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.ir.graph import Literal, Operand, OpGraph
from autopar.lower.program import PlannedCollective, Program
from autopar.plan.plan import PricedCollective
from autopar.rules.rule import Rule
from autopar.solver.cost.collectives import CollectiveModel


def value_names(graph: OpGraph, rules: Sequence[Rule]) -> dict[int, str]:
    """Names of values: parameters and what is only a view of them, and results' gradients.

    Forward, a name passes through ops with one array operand that compute nothing (rank and
    layout changes, casts); backward, from a tied result through elementwise ops to where the
    value is contracted or reduced.
    """
    names = {entry.value: entry.name for entry in graph.inputs}
    for op, rule in zip(graph.ops, rules, strict=True):
        arrays = op.reads
        plain = rule.flops == 0 and all(f.kind in ("pass", "linear") for f in rule.factors)
        if len(arrays) == 1 and plain and arrays[0] in names:
            for value in op.outputs:
                names.setdefault(value, names[arrays[0]])
    for argument in dict.fromkeys(entry.name.split("/")[0] for entry in graph.inputs):
        _name_gradients(graph, rules, argument, names)
    return names


def _name_gradients(
    graph: OpGraph, rules: Sequence[Rule], argument: str, names: dict[int, str]
) -> None:
    """Name what leads to the next values of one argument's leaves, where it has no name yet.

    Arguments are taken in order, so that a gradient is its parameter's rather than its moments'.
    """
    wanted: dict[Operand, str] = {
        graph.outputs[entry.tied_output]: entry.name
        for entry in graph.inputs
        if entry.tied_output >= 0 and entry.name.split("/")[0] == argument
    }
    for op in reversed(graph.ops):
        label = next((wanted[v] for v in op.outputs if v in wanted), None)
        if label is None or any(f.kind == "sum" for f in rules[op.index].factors):
            continue
        for value in op.reads:
            if graph.values[value].shape:
                wanted.setdefault(value, label)
    for operand, name in wanted.items():
        if not isinstance(operand, Literal):
            names.setdefault(operand, f"d {name}")


def price_list(
    program: Program, rules: Sequence[Rule], model: CollectiveModel
) -> tuple[PricedCollective, ...]:
    """Every collective with its price; equal lines are folded into one with a count."""
    names = value_names(program.graph, rules)
    lines: dict[PricedCollective, int] = {}
    for item in program.collectives:
        line = _line(item, program.graph, names, model)
        lines[line] = lines.get(line, 0) + 1
    return tuple(
        PricedCollective(
            line.kind,
            line.axes,
            line.elements,
            line.bytes,
            times,
            line.seconds,
            line.source,
            line.name,
            line.reduction,
        )
        for line, times in lines.items()
    )


def _line(
    item: PlannedCollective, graph: OpGraph, names: dict[int, str], model: CollectiveModel
) -> PricedCollective:
    size = item.elements * item.itemsize
    op = graph.ops[item.op] if item.op < len(graph.ops) else None
    label = names.get(item.value) or (op.name if op else "result")
    source = op.source if op else ""
    seconds = model.seconds(item.kind, item.axes, float(size))
    return PricedCollective(
        item.kind, item.axes, item.elements, size, 1, seconds, source, label, item.reduction
    )


def communication_seconds(lines: Sequence[PricedCollective]) -> float:
    """Seconds of all collectives of a step."""
    return math.fsum(line.seconds * line.times for line in lines)
