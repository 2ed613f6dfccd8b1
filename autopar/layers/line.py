"""The forward of one micro-batch as a line of ops, with the work of each and the cuts between them.

Ops that need no parameter (masks, positions, labels) are not on the line: who needs their results
makes them again from the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.rules.rule import Rule
from autopar.trace.backward import FORWARD
from autopar.trace.batch import LOOP
from autopar.trace.micro_graph import MicroGraph


@dataclass(frozen=True, slots=True)
class Line:
    """The ops between which stages may be cut.

    Attributes:
        ops: indices into the micro graph, in execution order.
        work: floating-point operations of each, backward not counted.
        cuts: bytes alive before each: made earlier on the line and used at it or later.
    """

    ops: tuple[int, ...]
    work: tuple[float, ...]
    cuts: tuple[float, ...]


def forward_line(micro: MicroGraph, rules: Sequence[Rule]) -> Line:
    """The line of a micro graph."""
    ops = tuple(
        op.index
        for op in micro.graph.ops
        if micro.phases[op.index] == LOOP
        and micro.regions[op.index] == FORWARD
        and not micro.free.issuperset(op.outputs)
    )
    place = {op: number for number, op in enumerate(ops)}
    graph = micro.graph
    made = {v: number for number, op in enumerate(ops) for v in graph.ops[op].outputs}
    last = dict(made)
    for op in graph.ops:
        if op.index in place:
            for operand in op.reads:
                if operand in made:
                    last[operand] = place[op.index]
    change = [0.0] * (len(ops) + 1)
    for value, number in made.items():
        if last[value] > number:
            change[number + 1] += graph.values[value].nbytes
            change[min(last[value] + 1, len(ops))] -= graph.values[value].nbytes
    cuts, alive = [], 0.0
    for number in range(len(ops)):
        alive += change[number]
        cuts.append(alive)
    # What no contraction bounds is bound by memory: its elements count as one operation each.
    work = tuple(
        rules[op].flops + sum(graph.values[v].size for v in graph.ops[op].outputs) for op in ops
    )
    return Line(ops, work, tuple(cuts))
