"""Seconds of ops under their strategies: roofline compute, and the reductions inside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.ir.graph import Operand, OpGraph
from autopar.rules.rule import Rule
from autopar.rules.strategy import Strategy
from autopar.solver.cost.collectives import CollectiveModel
from autopar.solver.cost.compute import compute_seconds
from autopar.solver.cost.traffic import Traffic, memory_traffic


@dataclass(frozen=True)
class OpCosts:
    """Prices of one graph's ops on one mesh.

    Attributes:
        graph, rules: what is priced.
        collectives: prices of collectives, and the device.
        traffic: per op, what it moves to and from memory.
    """

    graph: OpGraph
    rules: Sequence[Rule]
    collectives: CollectiveModel
    traffic: tuple[Traffic, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "traffic", memory_traffic(self.graph, self.rules))

    def _sized(self, operand: Operand) -> tuple[tuple[int, ...], int]:
        dtype = self.graph.dtype_of(operand)
        return self.graph.shape_of(operand), int(getattr(dtype, "itemsize", 4))

    def key(self, index: int) -> object:
        """Ops with equal keys and equal strategies cost the same."""
        op, traffic = self.graph.ops[index], self.traffic[index]
        ins = tuple(self._sized(o) for o in op.reads)
        outs = tuple(self._sized(value) for value in op.outputs)
        return traffic, ins, outs, self._dtype(index), self.rules[index].flops

    def _dtype(self, index: int) -> str:
        op = self.graph.ops[index]
        return str(self.graph.dtype_of(op.inputs[0])) if op.inputs else "float32"

    def seconds(self, index: int, strategy: Strategy) -> float:
        """Roofline seconds of one op on one device."""
        op, traffic, mesh = self.graph.ops[index], self.traffic[index], self.collectives.mesh
        moved = 0
        for position in traffic.reads:
            shape, itemsize = self._sized(op.inputs[position])
            moved += strategy.ins[position].local_size(shape, mesh) * itemsize
        for position in traffic.writes:
            shape, itemsize = self._sized(op.outputs[position])
            moved += strategy.outs[position].local_size(shape, mesh) * itemsize
        flops = self.rules[index].flops / strategy.work
        return compute_seconds(flops, moved, self.collectives.cluster.device, self._dtype(index))

    def finishes(self, index: int, strategy: Strategy) -> float:
        """Seconds of the reductions that the op finishes itself."""
        op, mesh = self.graph.ops[index], self.collectives.mesh
        parts = []
        for finish in strategy.finishes:
            shape, itemsize = self._sized(op.outputs[finish.output])
            size = strategy.outs[finish.output].local_size(shape, mesh) * itemsize
            parts.append(self.collectives.seconds("all-reduce", finish.axes, float(size)))
        return math.fsum(parts)
