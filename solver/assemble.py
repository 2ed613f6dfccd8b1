"""From a graph, a mesh and a cluster to the abstract pairwise problem, and back to decisions.

Nodes are input leaves (choice: how the leaf is laid out) and ops (choice: a strategy). The cost of
a node is its compute and the reductions inside it, the cost of an edge the reshard between what the
producer leaves and what the consumer wants. A result that is the next step's value of an input
is an edge back to that input, so that a plan is priced in its steady state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster
from autopar.ir.graph import Literal, OpGraph, Value
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import COLLECTIVES, LOCAL_STEPS, Step
from autopar.ir.sharding import Sharding, replicated
from autopar.lower.program import Decisions
from autopar.rules.rule import Rule
from autopar.rules.strategy import Assignment, Strategy
from autopar.solver.cost.collectives import CollectiveModel
from autopar.solver.cost.op_costs import OpCosts
from autopar.solver.cost.resharding import ReshardTable, make_table
from autopar.solver.followers import Group, GroupPolicy, Nodes, follow_oldest
from autopar.solver.intra.problem import Edge, Problem
from autopar.solver.strategies import (
    enumerate_strategies,
    input_shardings,
    pending_sums,
    split_contractions,
)

ALL_STEPS = (*COLLECTIVES, *LOCAL_STEPS)

InputFilter = Callable[[int, tuple[Sharding, ...]], tuple[Sharding, ...]]
"""Given an input's position and its possible shardings, those that are allowed."""


@dataclass(frozen=True, slots=True)
class Restriction:
    """What may not be chosen.

    Attributes:
        allowed: how inputs may be laid out; None: freely.
        steps: kinds of reshard step that may be used.
        fixed: assignments of ops that are decided already, by op index.
    """

    allowed: InputFilter | None = None
    steps: tuple[str, ...] = ALL_STEPS
    fixed: Mapping[int, Assignment] = field(default_factory=dict)


FREE = Restriction()


@dataclass(frozen=True)
class IntraModel:
    """The problem with what its numbers mean.

    Attributes:
        graph, rules, mesh: what is planned.
        collectives: prices.
        nodes: what is decided, with the candidates.
        groups: per node which root it follows.
        problem: its nodes are the roots, in order.
    """

    graph: OpGraph
    rules: tuple[Rule, ...]
    mesh: Mesh
    collectives: CollectiveModel
    nodes: Nodes
    groups: tuple[Group, ...]
    problem: Problem
    tables: Mapping[object, ReshardTable]

    def decode(self, choices: Sequence[int]) -> Decisions:
        """What a solution of the problem decides."""
        position = {root: number for number, root in enumerate(roots_of(self.groups))}
        own = [int(g.mapping[choices[position[g.root]]]) for g in self.groups]
        return self.decide(own)

    def decide(self, own: Sequence[int]) -> Decisions:
        """Decisions from one choice per node, followers included."""
        nodes = self.nodes
        options: tuple[tuple[Any, ...], ...] = (*nodes.inputs, *nodes.ops, *nodes.layouts)
        picked = [o[c] for o, c in zip(options, own, strict=True)]
        inputs = tuple(picked[: len(nodes.inputs)])
        ops = tuple(picked[len(nodes.inputs) : nodes.layout_node(0)])
        settled = tuple(zip(nodes.settled, picked[nodes.layout_node(0) :], strict=True))
        return Decisions(inputs, ops, settled, self._outputs(inputs, ops, dict(settled)))

    def _outputs(
        self,
        inputs: Sequence[Sharding],
        ops: Sequence[Strategy],
        settled: Mapping[int, Sharding],
    ) -> tuple[Sharding, ...]:
        made = {**produced_shardings(self.graph, inputs, ops), **settled}
        tied = {
            entry.tied_output: inputs[position]
            for position, entry in enumerate(self.graph.inputs)
            if entry.tied_output >= 0
        }
        found = []
        for number, operand in enumerate(self.graph.outputs):
            if isinstance(operand, Literal):
                found.append(replicated(len(operand.shape)))
            elif number in tied:
                found.append(tied[number])
            else:
                found.append(self._cheapest_whole(operand, made[operand]))
        return tuple(found)

    def _cheapest_whole(self, value: int, source: Sharding) -> Sharding:
        table = self.tables[table_key(self.graph.values[value])]
        targets = [s for s in table.states if not s.partial]
        costs = table.between([source], targets)[0]
        if source in targets:
            return source
        return targets[int(np.argmin(costs))]

    def compute_seconds(self, decisions: Decisions) -> float:
        """Roofline seconds of all ops, without the reductions inside them."""
        costs = OpCosts(self.graph, self.rules, self.collectives)
        return math.fsum(
            costs.seconds(index, strategy) for index, strategy in enumerate(decisions.ops)
        )

    def steps(self, value: int, source: Sharding, target: Sharding) -> tuple[Step, ...]:
        """Cheapest reshard steps of a value."""
        return self.tables[table_key(self.graph.values[value])].path(source, target)


def produced_shardings(
    graph: OpGraph, inputs: Sequence[Sharding], ops: Sequence[Strategy]
) -> dict[int, Sharding]:
    """Per value id, the sharding in which it is made."""
    made = {e.value: s for e, s in zip(graph.inputs, inputs, strict=True)}
    for op, strategy in zip(graph.ops, ops, strict=True):
        made.update(zip(op.outputs, strategy.outs, strict=True))
    return made


def merge_groups(
    groups: Sequence[Group],
    costs: Sequence[NDArray[np.float64]],
    edges: Sequence[Edge],
    names: Sequence[str],
) -> Problem:
    """The problem over roots: followers' costs and edges are summed into their roots'."""
    roots = roots_of(groups)
    position = {root: number for number, root in enumerate(roots)}
    nodes = [np.zeros(len(groups[root].mapping)) for root in roots]
    for group, cost in zip(groups, costs, strict=True):
        nodes[position[group.root]] += cost[group.mapping]
    between: dict[tuple[int, int], NDArray[np.float64]] = {}
    cache: dict[object, NDArray[np.float64]] = {}
    for edge in edges:
        one, other = groups[edge.a], groups[edge.b]
        a, b = position[one.root], position[other.root]
        if a == b:
            nodes[a] += edge.costs[one.mapping, other.mapping]
            continue
        key = (id(edge.costs), one.mapping.tobytes(), other.mapping.tobytes())
        if key not in cache:
            cache[key] = edge.costs[np.ix_(one.mapping, other.mapping)]
        costs_ab, pair = cache[key], (a, b)
        if a > b:
            costs_ab, pair = costs_ab.T, (b, a)
        between[pair] = between[pair] + costs_ab if pair in between else costs_ab
    merged = tuple(Edge(a, b, costs) for (a, b), costs in between.items() if costs.any())
    return Problem(tuple(nodes), merged, tuple(names[root] for root in roots))


def roots_of(groups: Sequence[Group]) -> tuple[int, ...]:
    """The nodes that decide for themselves, in order."""
    return tuple(node for node, group in enumerate(groups) if group.root == node)


def table_key(value: Value) -> object:
    """Values with equal keys share one reshard table."""
    return (value.shape, getattr(value.dtype, "itemsize", 4), value.summable)


def assemble(  # noqa: PLR0913 - each is one part of the problem
    graph: OpGraph,
    rules: Sequence[Rule],
    cluster: Cluster,
    mesh: Mesh,
    *,
    restriction: Restriction = FREE,
    follow: GroupPolicy = follow_oldest,
    times: Sequence[int] | None = None,
) -> IntraModel:
    """Build the problem of one logical mesh.

    Args:
        graph: what is planned.
        rules: its rules, in op order.
        cluster: prices.
        mesh: logical mesh of as many devices.
        restriction: what may not be chosen.
        follow: which ops need no decision of their own.
        times: how often each op runs in a step, with the reshards of its operands; once if None.
    """
    ops = enumerate_strategies(graph, rules, mesh)
    if math.isinf(cluster.device.peak("float32")):
        ops = split_contractions(rules, ops)
    ops = _fix(ops, restriction.fixed)
    inputs = []
    for position, entry in enumerate(graph.inputs):
        options = input_shardings(graph.values[entry.value].shape, mesh)
        inputs.append(restriction.allowed(position, options) if restriction.allowed else options)
    settled = pending_sums(graph, rules).settled
    layouts = tuple(input_shardings(graph.values[value].shape, mesh) for value in settled)
    nodes = Nodes(graph, tuple(rules), tuple(inputs), ops, settled, layouts)
    often = tuple(times) if times is not None else (1,) * len(graph.ops)
    prices = CollectiveModel(cluster, mesh)
    maker = _Maker(graph, tuple(rules), prices, nodes, restriction.steps, often)
    return maker.model(follow(nodes))


def _fix(
    ops: Sequence[tuple[Strategy, ...]], fixed: Mapping[int, Assignment]
) -> tuple[tuple[Strategy, ...], ...]:
    """Leave ops that are decided one strategy; equal ops still share one tuple."""
    cache: dict[tuple[int, Assignment], tuple[Strategy, ...]] = {}
    made = list(ops)
    for index, assignment in fixed.items():
        key = (id(ops[index]), assignment)
        if key not in cache:
            cache[key] = tuple(s for s in ops[index] if s.assignment == assignment)
        made[index] = cache[key]
    return tuple(made)


@dataclass
class _Maker:
    """Shared look-ups of one `assemble` call."""

    graph: OpGraph
    rules: tuple[Rule, ...]
    collectives: CollectiveModel
    nodes: Nodes
    steps: tuple[str, ...]
    times: tuple[int, ...]
    tables: dict[object, ReshardTable] = field(default_factory=dict)
    edge_costs: dict[object, NDArray[np.float64]] = field(default_factory=dict)
    node_costs: dict[object, NDArray[np.float64]] = field(default_factory=dict)
    makers: dict[int, tuple[int, object, list[Sharding]]] = field(default_factory=dict)
    made_in: dict[int, int] = field(default_factory=dict)
    read_in: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for op in self.graph.ops:
            often = self.times[op.index]
            self.made_in.update(dict.fromkeys(op.outputs, often))
            for value in op.reads:
                self.read_in.setdefault(value, often)

    def model(self, groups: tuple[Group, ...]) -> IntraModel:
        self._make_tables()
        costs = [np.zeros(len(options)) for options in self.nodes.inputs]
        costs += self._op_costs()
        costs += [np.zeros(len(options)) for options in self.nodes.layouts]
        edges = self._make_values() + self._use_edges() + self._output_edges(costs)
        names = [entry.name for entry in self.graph.inputs]
        names += [f"{op.index}:{op.name} {op.source}" for op in self.graph.ops]
        names += [f"sum v{value}" for value in self.nodes.settled]
        return IntraModel(
            self.graph,
            self.rules,
            self.collectives.mesh,
            self.collectives,
            self.nodes,
            groups,
            merge_groups(groups, costs, edges, names),
            self.tables,
        )

    def _make_tables(self) -> None:
        extra: dict[object, dict[Sharding, None]] = {}
        shapes: dict[object, Value] = {}
        for value in self.graph.values:
            shapes.setdefault(table_key(value), value)
            extra.setdefault(table_key(value), {})
        seen: set[tuple[object, int, str, int]] = set()
        for op in self.graph.ops:
            options = self.nodes.ops[op.index]
            for side, operands in (("in", op.inputs), ("out", op.outputs)):
                for position, operand in enumerate(operands):
                    if isinstance(operand, Literal):
                        continue
                    key = table_key(self.graph.values[operand])
                    if (key, id(options), side, position) in seen:
                        continue
                    seen.add((key, id(options), side, position))
                    for strategy in options:
                        sharding = (strategy.ins if side == "in" else strategy.outs)[position]
                        extra[key].setdefault(sharding)
        for key, value in shapes.items():
            self.tables[key] = make_table(
                value.shape,
                getattr(value.dtype, "itemsize", 4),
                self.collectives,
                summable=value.summable,
                extra=extra[key],
                kinds=self.steps,
            )

    def _op_costs(self) -> list[NDArray[np.float64]]:
        made = []
        compute = OpCosts(self.graph, self.rules, self.collectives)
        for op in self.graph.ops:
            often = self.times[op.index]
            key = (id(self.nodes.ops[op.index]), compute.key(op.index), often)
            if key not in self.node_costs:
                seconds = [
                    compute.seconds(op.index, strategy) + compute.finishes(op.index, strategy)
                    for strategy in self.nodes.ops[op.index]
                ]
                self.node_costs[key] = np.array(seconds, dtype=np.float64) * often
            made.append(self.node_costs[key])
        return made

    def _make_values(self) -> list[Edge]:
        """Fill `makers` (value to node, key, shardings by choice); edges into settled layouts."""
        nodes = self.nodes
        for node, entry in enumerate(self.graph.inputs):
            options = list(nodes.inputs[node])
            self.makers[entry.value] = (node, ("layout", nodes.inputs[node]), options)
        for op in self.graph.ops:
            options_op = nodes.ops[op.index]
            for position, value in enumerate(op.outputs):
                outs = [strategy.outs[position] for strategy in options_op]
                key = (id(options_op), "out", position)
                self.makers[value] = (nodes.op_node(op.index), key, outs)
        edges = []
        for number, value in enumerate(nodes.settled):
            layouts = nodes.layouts[number]
            asked = ("layout", layouts)
            node = nodes.layout_node(number)
            costs = self._between(value, asked, list(layouts), self._settled_times(value))
            edges.append(Edge(self.makers[value][0], node, costs))
            self.makers[value] = (node, asked, list(layouts))
        return edges

    def _use_edges(self) -> list[Edge]:
        made = []
        for op in self.graph.ops:
            options = self.nodes.ops[op.index]
            for position, operand in enumerate(op.inputs):
                if isinstance(operand, Literal):
                    continue
                wanted = [strategy.ins[position] for strategy in options]
                asked = (id(options), "in", position)
                costs = self._between(operand, asked, wanted, self.times[op.index])
                made.append(Edge(self.makers[operand][0], self.nodes.op_node(op.index), costs))
        return made

    def _made_times(self, value: int) -> int:
        """How often a value is made in a step."""
        return self.made_in.get(value, 1)

    def _settled_times(self, value: int) -> int:
        """How often a pending sum is finished: as often as it is first read, if that is less."""
        return min(self._made_times(value), self.read_in.get(value, 1))

    def _between(
        self, value: int, wanted_key: object, wanted: list[Sharding], times: int = 1
    ) -> NDArray[np.float64]:
        _, offered_key, offered = self.makers[value]
        table = table_key(self.graph.values[value])
        key = (table, offered_key, wanted_key, times)
        if key not in self.edge_costs:
            costs = self.tables[table].between(offered, wanted) * times
            costs.setflags(write=False)
            self.edge_costs[key] = costs
        return self.edge_costs[key]

    def _output_edges(self, costs: list[NDArray[np.float64]]) -> list[Edge]:
        tied = {e.tied_output: i for i, e in enumerate(self.graph.inputs) if e.tied_output >= 0}
        made = []
        for number, operand in enumerate(self.graph.outputs):
            if isinstance(operand, Literal):
                continue
            node = self.makers[operand][0]
            if number in tied:
                wanted = self.nodes.inputs[tied[number]]
                between = self._between(operand, ("layout", wanted), list(wanted))
                made.append(Edge(node, tied[number], between))
                continue
            table = self.tables[table_key(self.graph.values[operand])]
            whole = [sharding for sharding in table.states if not sharding.partial]
            often = self._made_times(operand)
            leave = self._between(operand, ("whole",), whole, often)
            costs[node] = costs[node] + leave.min(axis=1)
        return made
