"""Sums over stages leave the loop: a tied weight's gradients are added once a step.

An op may run after the loop, on gathered operands, if it is jointly linear in everything that
changes from micro-batch to micro-batch and nothing else in the loop needs its result. It does so
if it would bring an array from another stage in every micro-batch, and that array is no larger than
the result (a bias gradient is the sum of a cotangent that had better not be kept).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.ir.graph import Op
from autopar.rules.rule import Rule
from autopar.trace.batch import AFTER, LOOP
from autopar.trace.micro_graph import SUMMED, MicroGraph


@dataclass(frozen=True, slots=True)
class _Loop:
    """What is known of the loop: its ops by what they make, who uses a value, what varies."""

    micro: MicroGraph
    maker: dict[int, Op]
    users: dict[int, list[Op]]
    inputs: frozenset[int]

    def has(self, op: Op) -> bool:
        return self.micro.phases[op.index] == LOOP

    def made(self, op: Op) -> list[int]:
        """The operands of `op` that the loop makes."""
        return [o for o in op.reads if o in self.maker and self.has(self.maker[o])]


def hoist_sums(
    micro: MicroGraph, rules: Sequence[Rule], of: Sequence[int]
) -> tuple[MicroGraph, frozenset[int]]:
    """Move sums over stages behind the loop.

    Args:
        micro, rules: the step.
        of: per op its stage, negative where it has none.

    Returns:
        The graph, and the ops that moved.
    """
    loop = _look(micro)
    can = _movable(loop, rules, of)
    moved: set[int] = set()
    for op in micro.graph.ops:
        if op.index in can:
            makers = [loop.maker[v] for v in loop.made(op)]
            stages = {of[op.index], *(of[maker.index] for maker in makers)}
            if len(stages) > 1 or any(maker.index in moved for maker in makers):
                moved.add(op.index)
    if not moved:
        return micro, frozenset()
    phases = tuple(AFTER if number in moved else phase for number, phase in enumerate(micro.phases))
    return replace(micro, phases=phases, gathered=_regathered(loop, moved)), frozenset(moved)


def _look(micro: MicroGraph) -> _Loop:
    users: dict[int, list[Op]] = {}
    for op in micro.graph.ops:
        for operand in op.reads:
            users.setdefault(operand, []).append(op)
    varying = frozenset(
        entry.value
        for entry, role in zip(micro.graph.inputs, micro.roles, strict=True)
        if role.kind in ("index", "micro")
    )
    return _Loop(micro, {v: op for op in micro.graph.ops for v in op.outputs}, users, varying)


def _movable(loop: _Loop, rules: Sequence[Rule], of: Sequence[int]) -> set[int]:
    """Ops of the loop that may run after it: last ones first, since users must move too."""
    gathered = dict(loop.micro.gathered)
    can: set[int] = set()
    for op in reversed(loop.micro.graph.ops):
        wanted = all(gathered.get(v, SUMMED) == SUMMED for v in op.outputs)
        users = [user for v in op.outputs for user in loop.users.get(v, [])]
        late = all(user.index in can or not loop.has(user) for user in users)
        if loop.has(op) and of[op.index] >= 0 and wanted and late and _is_linear(loop, rules, op):
            can.add(op.index)
    return can


def _is_linear(loop: _Loop, rules: Sequence[Rule], op: Op) -> bool:
    """Whether the op is jointly linear in all that changes from micro-batch to micro-batch."""
    made, values = loop.made(op), loop.micro.graph.values
    if any(values[v].size > values[op.outputs[0]].size for v in made):
        return False
    varying = {position for position, operand in enumerate(op.inputs) if operand in made}
    if not varying or not loop.inputs.isdisjoint(op.reads):
        return False
    return any(
        factor.kind == "linear"
        and varying <= set(factor.partial_in)
        and set(range(len(op.outputs))) <= set(factor.partial_out)
        for factor in rules[op.index].factors
    )


def _regathered(loop: _Loop, moved: set[int]) -> tuple[tuple[int, str], ...]:
    """What is gathered once `moved` ops run after the loop: their operands in place of results."""
    gathered = dict(loop.micro.gathered)
    for number in sorted(moved):
        op = loop.micro.graph.ops[number]
        for value in op.outputs:
            gathered.pop(value, None)
        for value in loop.made(op):
            if loop.maker[value].index not in moved:
                gathered.setdefault(value, SUMMED)
    return tuple(sorted(gathered.items()))
