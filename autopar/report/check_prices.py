"""The checker's own prices: ring collectives, the roofline, and bytes alive.

Nothing here is shared with the solver's cost model but the cluster's figures: two writings of the
same formulas that must agree.

A ring of n devices that holds B bytes of the full tensor takes (Thakur, Rabenseifner, Gropp 2005)

    all-gather, reduce-scatter   alpha +     beta * B * (n - 1) / n
    all-reduce                   alpha + 2 * beta * B * (n - 1) / n
    all-to-all                   alpha +     beta * B * (n - 1) / n / n

and a collective over several levels of the cluster takes one ring on each, from the inside out,
on 1/n of the bytes of the ring before (an all-to-all: on n / N of the bytes, N in all).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.cluster import Cluster, Piece
from autopar.hardware import Link
from autopar.ir.graph import Literal, OpGraph
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.rules.rule import Rule
from autopar.rules.strategy import Strategy

PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
"""How often the bytes go around the ring."""

Buffer = tuple[int, Sharding, int]
"""A value in one layout, before (0) or after (1) its pending sum was finished for all uses."""


@dataclass(frozen=True)
class RingPrices:
    """Seconds of collectives on one logical mesh.

    Attributes:
        cluster, mesh: the hardware, and how its devices are named.
    """

    cluster: Cluster
    mesh: Mesh
    _pieces: dict[str, tuple[Piece, ...]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        pieces = dict(zip(self.mesh.names, self.cluster.axis_costs(self.mesh), strict=True))
        object.__setattr__(self, "_pieces", pieces)

    def seconds(self, kind: str, axes: Sequence[str], full_bytes: float) -> float:
        """Seconds of one collective on `full_bytes` of the full tensor over `axes`."""
        rings = self._rings(axes)
        total = math.prod(ring[1] for ring in rings)
        spent, held = 0.0, float(full_bytes)
        for piece, size in rings:
            on = full_bytes * size / total if kind == "all-to-all" else held
            spent += self._ring(kind, piece, size, on)
            held /= size
        return spent

    def _rings(self, axes: Sequence[str]) -> list[tuple[Piece, int]]:
        """(figures, devices) from the inside out; axes with the same links make one ring."""
        sizes: dict[tuple[int, float, float], int] = {}
        figures: dict[tuple[int, float, float], Piece] = {}
        for axis in axes:
            for piece in self._pieces[axis]:
                key = (-piece.level, piece.beta, piece.alpha)
                sizes[key] = sizes.get(key, 1) * piece.size
                figures.setdefault(key, piece)
        return [(figures[key], sizes[key]) for key in sorted(sizes)]

    def _ring(self, kind: str, piece: Piece, size: int, on: float) -> float:
        own = _line(kind, piece, size, on)
        if kind != "all-reduce" or not piece.links:
            return own
        # measured figures may say that an all-reduce beats its own first half: it does not
        halves = (_line(half, piece, size, on) for half in ("reduce-scatter", "all-gather"))
        return max(own, *halves)


def _line(kind: str, piece: Piece, size: int, on: float) -> float:
    """Seconds of one ring; a larger size never costs less than the end of a smaller range."""
    share = PASSES[kind] * (size - 1) / size / (size if kind == "all-to-all" else 1)
    links = [link for link in piece.links if link.kind == kind]
    links = links or [Link(kind, piece.alpha, piece.beta)]
    floor = 0.0
    for link in links:
        if link.max_bytes is None or on <= link.max_bytes or link is links[-1]:
            return max(floor, link.alpha + link.beta * share * on)
        floor = max(floor, link.alpha + link.beta * share * link.max_bytes)
    raise AssertionError("a piece has at least one link")


def in_memory(graph: OpGraph, rules: Sequence[Rule]) -> frozenset[int]:
    """Values that go through memory.

    The result of an op that XLA fuses stays in registers if the only thing that uses it is another
    such op. Fused are ops that reduce nothing, look nothing up and multiply no matrices.
    """
    uses: Counter[int] = Counter()
    user: dict[int, int] = {}
    for op in graph.ops:
        for operand in op.reads:
            uses[operand] += 1
            user[operand] = op.index
    # a result is used by the caller, who is not fused
    uses.update(2 * graph.returned)
    fused = [
        rule.flops == 0
        and not rule.reason
        and {factor.kind for factor in rule.factors} <= {"pass", "linear"}
        for rule in rules
    ]
    registers = {
        value
        for op in graph.ops
        if fused[op.index]
        for value in op.outputs
        if uses[value] == 1 and fused[user[value]]
    }
    return frozenset(range(len(graph.values))) - registers


def op_seconds(
    graph: OpGraph, rules: Sequence[Rule], strategies: Sequence[Strategy], prices: RingPrices
) -> float:
    """Roofline seconds of all ops on one device: the larger of arithmetic and memory traffic."""
    stored, device = in_memory(graph, rules), prices.cluster.device
    spent = []
    for op, rule, strategy in zip(graph.ops, rules, strategies, strict=True):
        operands = [
            (operand, sharding)
            for operand, sharding in zip(op.inputs, strategy.ins, strict=True)
            if not isinstance(operand, Literal)
        ]
        results = zip(op.outputs, strategy.outs, strict=True)
        traffic = sum(
            local_bytes(graph, value, sharding.local_size(graph.values[value].shape, prices.mesh))
            for value, sharding in (*operands, *results)
            if value in stored
        )
        dtype = str(graph.dtype_of(op.inputs[0])) if op.inputs else "float32"
        arithmetic = rule.flops / strategy.work / device.peak(dtype)
        spent.append(max(arithmetic, traffic / device.memory_bandwidth))
    return math.fsum(spent)


def local_bytes(graph: OpGraph, value: int, elements: int) -> int:
    """Bytes of `elements` of a value."""
    return elements * item_bytes(graph, value)


def item_bytes(graph: OpGraph, value: int) -> int:
    """Bytes of one element; of a random key 4."""
    return int(getattr(graph.values[value].dtype, "itemsize", 4))


@dataclass(frozen=True, slots=True)
class Event:
    """One step of the program, as buffers that it reads and makes."""

    reads: tuple[Buffer, ...]
    makes: tuple[Buffer, ...]


def peak_of(
    events: Sequence[Event],
    sizes: dict[Buffer, int],
    kept: frozenset[Buffer],
    given: Sequence[Buffer],
) -> int:
    """The most bytes held at once, by counting readers: a buffer goes with its last one.

    Args:
        events: in execution order.
        sizes: bytes of each buffer on one device; others take no room.
        kept: buffers that are never given up: results, and arguments that are not donated.
        given: buffers there at the start.
    """
    readers = Counter(buffer for event in events for buffer in event.reads)
    alive = dict.fromkeys(given)
    held = peak = sum(sizes.get(buffer, 0) for buffer in alive)

    def give_up(buffers: Sequence[Buffer]) -> int:
        gone = [b for b in buffers if b in alive and not readers[b] and b not in kept]
        for buffer in dict.fromkeys(gone):
            del alive[buffer]
        return sum(sizes.get(buffer, 0) for buffer in dict.fromkeys(gone))

    held -= give_up(given)
    for event in events:
        fresh = [buffer for buffer in event.makes if buffer not in alive]
        alive.update(dict.fromkeys(fresh))
        held += sum(sizes.get(buffer, 0) for buffer in fresh)
        peak = max(peak, held)
        readers.subtract(event.reads)
        held -= give_up((*event.reads, *event.makes))
    return peak
