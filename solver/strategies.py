"""All strategies of every op: each mesh axis to one factor of the op's rule, or to none.

Left out are only choices that cannot help: those that do not divide, and those that would keep
pending sums of operands that no producer can leave partial (masking a replicated operand to sum it
again later costs what replication costs, and then a reduction).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Op, OpGraph
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.rules.rule import Rule
from autopar.rules.strategy import Strategy, resolve
from autopar.solver.cost.resharding import all_shardings


def use_counts(graph: OpGraph) -> tuple[int, ...]:
    """Per value, how often it is used: as an operand or as a result of the function."""
    counts = [0] * len(graph.values)
    for values in (*(op.reads for op in graph.ops), graph.returned):
        for value in values:
            counts[value] += 1
    return tuple(counts)


@dataclass(frozen=True, slots=True)
class PendingSums:
    """Which values can be pending sums.

    Attributes:
        offered: values that consumers may take as pending sums: they are used once.
        settled: values that some strategy makes as pending sums but that are used more than
            once: the sum is finished once, before the first use, in a layout of its own choice.
    """

    offered: frozenset[int]
    settled: tuple[int, ...]


def pending_sums(graph: OpGraph, rules: Sequence[Rule]) -> PendingSums:
    """Find the values that some strategy may make as pending sums."""
    counts = use_counts(graph)
    offered: set[int] = set()
    settled: list[int] = []
    for op, rule in zip(graph.ops, rules, strict=True):
        made: set[int] = set()
        for factor in rule.factors:
            kept = factor.kind == "linear" and any(
                op.inputs[position] in offered for position in factor.partial_in
            )
            if kept or (factor.kind == "sum" and factor.size != 1):
                made.update(factor.partial_out)
        for position in sorted(made):
            value = op.outputs[position]
            if graph.values[value].summable and counts[value] == 1:
                offered.add(value)
            elif graph.values[value].summable:
                settled.append(value)
    return PendingSums(frozenset(offered), tuple(settled))


def _usable(op: Op, rule: Rule, partial: frozenset[int], graph: OpGraph) -> tuple[bool, ...]:
    """Per factor, whether giving an axis to it can be legal and useful."""

    def ok(position: int) -> bool:
        factor = rule.factors[position]
        results = [graph.values[op.outputs[o]] for o in factor.partial_out]
        if not all(value.summable for value in results):
            return False
        if factor.kind != "linear":
            return factor.size is None or factor.size > 1
        return any(op.inputs[position] in partial for position in factor.partial_in)

    return tuple(ok(position) for position in range(len(rule.factors)))


def _assignments(rule: Rule, usable: tuple[bool, ...], mesh: Mesh) -> Iterator[tuple[int, ...]]:
    options: list[list[int]] = []
    for size in mesh.sizes:
        fits = [
            position
            for position, factor in enumerate(rule.factors)
            if usable[position] and (factor.size is None or factor.size % size == 0)
        ]
        options.append([-1, *fits] if size > 1 else [-1])
    return itertools.product(*options)


def enumerate_strategies(
    graph: OpGraph, rules: Sequence[Rule], mesh: Mesh
) -> tuple[tuple[Strategy, ...], ...]:
    """Per op, its strategies in a fixed order; equal ops share one tuple (by identity)."""
    partial = pending_sums(graph, rules).offered
    cache: dict[object, tuple[Strategy, ...]] = {}
    made = []
    for op, rule in zip(graph.ops, rules, strict=True):
        usable = _usable(op, rule, partial, graph)
        key = (rule.factors, rule.ins, rule.outs, usable)
        if key not in cache:
            resolved = (resolve(rule, a, mesh) for a in _assignments(rule, usable, mesh))
            cache[key] = tuple(strategy for strategy in resolved if strategy is not None)
        made.append(cache[key])
    return tuple(made)


def split_contractions(
    rules: Sequence[Rule], ops: Sequence[tuple[Strategy, ...]]
) -> tuple[tuple[Strategy, ...], ...]:
    """Keep, for contractions, only the strategies that divide the work most.

    For clusters whose compute is free: there a replicated contraction costs nothing, and only this
    makes the answer mean something.
    """
    cache: dict[int, tuple[Strategy, ...]] = {}
    made = []
    for rule, options in zip(rules, ops, strict=True):
        if rule.flops == 0:
            made.append(options)
            continue
        if id(options) not in cache:
            most = max(strategy.work for strategy in options)
            cache[id(options)] = tuple(s for s in options if s.work == most)
        made.append(cache[id(options)])
    return tuple(made)


def input_shardings(shape: tuple[int, ...], mesh: Mesh) -> tuple[Sharding, ...]:
    """Every way a value may enter or leave: whole blocks, nothing pending, replicated first."""
    return tuple(all_shardings(shape, mesh, summable=False))
