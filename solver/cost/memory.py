"""Bytes alive on one device while a program runs, by liveness over its steps.

A donated input may be reused from its last use on; results of fused chains take no room. Reshard
targets live until their last use, like values.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autopar.ir.graph import Literal
from autopar.ir.sharding import Sharding
from autopar.lower.program import Program, Reshard, RunOp
from autopar.rules.rule import Rule
from autopar.solver.cost.traffic import memory_traffic

Buffer = tuple[int, Sharding]


def peak_bytes(program: Program, rules: Sequence[Rule]) -> int:
    """The most bytes alive at once on one device."""
    graph = program.graph
    stored = {entry.value for entry in graph.inputs}
    for op, traffic in zip(graph.ops, memory_traffic(graph, rules), strict=True):
        stored.update(op.outputs[position] for position in traffic.writes)
    change = [0] * (len(program.steps) + 3)
    for (value, sharding), start, end in _lifetimes(program):
        if value not in stored:
            continue
        entry = graph.values[value]
        itemsize = int(getattr(entry.dtype, "itemsize", 4))
        held = sharding.local_size(entry.shape, program.mesh) * itemsize
        change[start] += held
        change[end + 1] -= held
    return max(itertools.accumulate(change))


def _lifetimes(program: Program) -> list[tuple[Buffer, int, int]]:
    """Buffers with their first and last step; 0 is before the first step, the end after the last.

    A value may be brought to the same layout twice (away from it and back): two lifetimes.
    """
    graph = program.graph
    end = len(program.steps) + 1
    alive: dict[Buffer, tuple[int, int]] = {}
    done: list[tuple[Buffer, int, int]] = []
    for entry, sharding in zip(graph.inputs, program.inputs, strict=True):
        alive[entry.value, sharding] = (0, 0 if entry.donated else end)
    for number, step in enumerate(program.steps, start=1):
        used, made = _touched(program, step)
        for buffer in used:
            alive[buffer] = (alive[buffer][0], max(alive[buffer][1], number))
        for buffer in made:
            if buffer in alive:
                done.append((buffer, *alive[buffer]))
            alive[buffer] = (number, number)
    for operand, sharding in zip(graph.outputs, program.outputs, strict=True):
        if not isinstance(operand, Literal):
            alive[operand, sharding] = (alive[operand, sharding][0], end)
    return [*done, *((buffer, *span) for buffer, span in alive.items())]


def _touched(program: Program, step: Reshard | RunOp) -> tuple[list[Buffer], list[Buffer]]:
    """Buffers that a step reads and makes."""
    if isinstance(step, Reshard):
        return [(step.value, step.source)], [(step.value, step.target)]
    op = program.graph.ops[step.op]
    pairs = zip(op.inputs, step.strategy.ins, strict=True)
    used = [(operand, s) for operand, s in pairs if not isinstance(operand, Literal)]
    return used, list(zip(op.outputs, step.strategy.outs, strict=True))
