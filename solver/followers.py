"""Ops whose strategy follows from how one operand is made, and so need no decision of their own.

An op follows an operand that has all of the op's indices if *every* way the operand can be made,
pending sums included, admits exactly one strategy that takes it as it is. A cast, a residual add,
a layer norm's arithmetic or a reduction qualify; a nonlinear op on a value that may be a pending
sum does not (where to finish the sum is a real decision), and neither does an op with an index of
its own (a contraction, a broadcast). Among several such operands the one whose root is oldest is
taken: a residual stream then has one layout, and backward elementwise ops have that of the saved
forward value.

Followers define the space that is searched: within it the solvers are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.ir.graph import Literal, Op, OpGraph
from autopar.ir.sharding import Sharding
from autopar.rules.rule import Rule
from autopar.rules.strategy import Strategy

Mapping = NDArray[np.intp]
"""Per choice of the root, the follower's own choice."""


@dataclass(frozen=True, slots=True)
class Group:
    """What one node (input or op) follows: `mapping[root's choice]` is its own choice."""

    root: int
    mapping: Mapping


@dataclass(frozen=True, slots=True)
class Nodes:
    """What decides: input leaves, then ops, then the layouts in which shared sums are finished.

    Attributes:
        graph, rules: what is planned.
        inputs: per graph input, its candidate shardings.
        ops: per op, its candidate strategies.
        settled: value ids whose pending sum is finished once for all their uses.
        layouts: per settled value, its candidate shardings.
    """

    graph: OpGraph
    rules: tuple[Rule, ...]
    inputs: tuple[tuple[Sharding, ...], ...]
    ops: tuple[tuple[Strategy, ...], ...]
    settled: tuple[int, ...]
    layouts: tuple[tuple[Sharding, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of choices per node."""
        return tuple(len(options) for options in (*self.inputs, *self.ops, *self.layouts))

    def op_node(self, index: int) -> int:
        """The node of op `index`."""
        return len(self.inputs) + index

    def layout_node(self, number: int) -> int:
        """The node of the `number`-th settled value."""
        return len(self.inputs) + len(self.ops) + number


GroupPolicy = Callable[[Nodes], tuple[Group, ...]]
"""Decides which nodes follow which."""


def independent(nodes: Nodes) -> tuple[Group, ...]:
    """Nobody follows anybody: the full space."""
    return tuple(Group(node, np.arange(size)) for node, size in enumerate(nodes.sizes))


@dataclass(frozen=True, slots=True)
class _Made:
    """How a value comes to its consumers: by which root, how old, in which sharding per choice."""

    root: int
    age: int
    states: tuple[Sharding, ...]


def follow_oldest(nodes: Nodes) -> tuple[Group, ...]:
    """Merge every true follower with its oldest root."""
    groups = list(independent(nodes))
    made = {
        entry.value: _Made(node, node, nodes.inputs[node])
        for node, entry in enumerate(nodes.graph.inputs)
    }
    layout_of = {value: number for number, value in enumerate(nodes.settled)}
    indexes: dict[tuple[int, int], dict[Sharding, int]] = {}
    for op in nodes.graph.ops:
        node, options = nodes.op_node(op.index), nodes.ops[op.index]
        whole = whole_operands(nodes.rules[op.index])
        group, age = _oldest((op, whole), options, made, indexes) or (groups[node], node)
        groups[node] = group
        for position, value in enumerate(op.outputs):
            number = layout_of.get(value)
            if number is not None:
                made[value] = _Made(nodes.layout_node(number), node, nodes.layouts[number])
                continue
            states = tuple(options[choice].outs[position] for choice in group.mapping)
            made[value] = _Made(group.root, age, states)
    return tuple(groups)


def _oldest(
    candidates: tuple[Op, tuple[int, ...]],
    options: Sequence[Strategy],
    made: dict[int, _Made],
    indexes: dict[tuple[int, int], dict[Sharding, int]],
) -> tuple[Group, int] | None:
    best: tuple[Group, int] | None = None
    op, positions = candidates
    for position in positions:
        operand = op.inputs[position]
        if isinstance(operand, Literal):
            continue
        source = made[operand]
        if best is not None and source.age >= best[1]:
            continue
        key = (id(options), position)
        if key not in indexes:
            indexes[key] = _unique_by_operand(options, position)
        found = [indexes[key].get(state, -1) for state in source.states]
        if min(found) >= 0:
            best = Group(source.root, np.array(found, dtype=np.intp)), source.age
    return best


def whole_operands(rule: Rule) -> tuple[int, ...]:
    """Operands whose dims hold every index of the op: a layout of theirs says all."""
    wanted = {
        position
        for position, factor in enumerate(rule.factors)
        if factor.size is not None and factor.size > 1
    }
    return tuple(
        position
        for position, dims in enumerate(rule.ins)
        if wanted <= {factor for factors in dims for factor in factors}
    )


def _unique_by_operand(options: Sequence[Strategy], position: int) -> dict[Sharding, int]:
    """The strategy for each sharding of one operand, where there is exactly one."""
    found: dict[Sharding, int] = {}
    for index, strategy in enumerate(options):
        sharding = strategy.ins[position]
        found[sharding] = -1 if sharding in found else index
    return found
