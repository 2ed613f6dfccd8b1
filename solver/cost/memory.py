"""Bytes alive on one device while a program runs, by liveness over its steps.

A donated input may be reused from its last use on; results of fused chains take no room. Reshard
targets live until their last use, like values.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.graph import Literal
from autopar.ir.sharding import Sharding
from autopar.lower.program import Program, Reshard
from autopar.rules.rule import Rule
from autopar.solver.cost.traffic import memory_traffic

Buffer = tuple[int, Sharding]


def peak_bytes(program: Program, rules: Sequence[Rule]) -> int:
    """The most bytes alive at once on one device."""
    graph = program.graph
    stored = {entry.value for entry in graph.inputs}
    for op, traffic in zip(graph.ops, memory_traffic(graph, rules), strict=True):
        stored.update(op.outputs[position] for position in traffic.writes)
    born, last = _lifetimes(program)
    size = len(program.steps) + 2
    change = [0] * (size + 1)
    for buffer, start in born.items():
        value, sharding = buffer
        if value not in stored:
            continue
        entry = graph.values[value]
        itemsize = int(getattr(entry.dtype, "itemsize", 4))
        held = sharding.local_size(entry.shape, program.mesh) * itemsize
        change[start] += held
        change[last[buffer] + 1] -= held
    alive = peak = 0
    for delta in change:
        alive += delta
        peak = max(peak, alive)
    return peak


def _lifetimes(program: Program) -> tuple[dict[Buffer, int], dict[Buffer, int]]:
    """First and last step of every buffer; step 0 is before the first, the end after the last."""
    graph = program.graph
    end = len(program.steps) + 1
    born: dict[Buffer, int] = {}
    last: dict[Buffer, int] = {}
    for entry, sharding in zip(graph.inputs, program.inputs, strict=True):
        born[entry.value, sharding] = 0
        last[entry.value, sharding] = 0 if entry.donated else end
    for number, step in enumerate(program.steps, start=1):
        if isinstance(step, Reshard):
            used = [(step.value, step.source)]
            made = [(step.value, step.target)]
        else:
            op = graph.ops[step.op]
            pairs = zip(op.inputs, step.strategy.ins, strict=True)
            used = [(o, s) for o, s in pairs if not isinstance(o, Literal)]
            made = list(zip(op.outputs, step.strategy.outs, strict=True))
        for buffer in used:
            last[buffer] = max(last[buffer], number)
        for buffer in made:
            born[buffer] = last[buffer] = number
    for operand, sharding in zip(graph.outputs, program.outputs, strict=True):
        if not isinstance(operand, Literal):
            last[operand, sharding] = end
    return born, last
