"""The checker's walk through a plan: every use of every value, and how it comes to its layout.

It follows the plan's own reshard steps, one by one; it never looks for better ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.errors import AutoparError, VerifyError
from autopar.ir.graph import Literal, OpGraph
from autopar.ir.reshard import COLLECTIVES, Step, apply_step, full_elements
from autopar.ir.sharding import Sharding, check_sharding
from autopar.plan.plan import FrozenPlan
from autopar.report.check_prices import Buffer, Event, RingPrices, item_bytes
from autopar.rules.strategy import Strategy

Key = tuple[int, Sharding, Sharding]


@dataclass(frozen=True, slots=True)
class Ran:
    """One collective that the plan runs.

    Attributes:
        kind, axes, reduction: as in the price list.
        elements, bytes: of the full tensor on these axes.
        seconds: of one run.
        source: the line of the op that first needs it.
    """

    kind: str
    axes: tuple[str, ...]
    elements: int
    bytes: int
    seconds: float
    source: str
    reduction: str


@dataclass
class Replay:
    """What a walk gathers.

    Attributes:
        problems: what is wrong, one sentence each.
        ran: collectives, each reshard once, as the program runs them.
        per_use: seconds of the reshards of every single use, as the objective counts them.
        finishes: seconds of the reductions inside ops.
        events: the program as buffers read and made.
        base: per value, the layout that its uses start from.
        final: values that have been settled.
    """

    plan: FrozenPlan
    graph: OpGraph
    prices: RingPrices
    problems: list[str] = field(default_factory=list)
    ran: list[Ran] = field(default_factory=list)
    per_use: list[float] = field(default_factory=list)
    finishes: list[float] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    base: dict[int, Sharding] = field(default_factory=dict)
    final: set[int] = field(default_factory=set)
    _paths: dict[Key, tuple[Step, ...]] = field(default_factory=dict)
    _done: dict[Key, float] = field(default_factory=dict)
    _walked: set[Key] = field(default_factory=set)

    def run(self, strategies: Sequence[Strategy]) -> Replay:
        """Walk through the whole plan."""
        self._read_paths()
        settled = dict(self.plan.settled)
        for entry, boundary in zip(self.graph.inputs, self.plan.inputs, strict=True):
            self.base[entry.value] = boundary.sharding
        for op, strategy in zip(self.graph.ops, strategies, strict=True):
            pairs = zip(op.inputs, strategy.ins, strict=True)
            reads = [(o, s) for o, s in pairs if not isinstance(o, Literal)]
            for value, wanted in reads:
                self.use(value, wanted, op.index)
            makes = list(zip(op.outputs, strategy.outs, strict=True))
            for value, made in makes:
                self._legal(value, made, f"op {op.index} ({op.name}) at {op.source}")
                self.base[value] = made
            self._finish(op.index, strategy)
            self.events.append(
                Event(tuple(self.buffer(*r) for r in reads), tuple(self.buffer(*m) for m in makes))
            )
            for value in op.outputs:
                if value in settled:
                    self.settle(value, settled[value], op.index)
        for operand, boundary in zip(self.graph.outputs, self.plan.outputs, strict=True):
            if not isinstance(operand, Literal):
                self.use(operand, boundary.sharding, len(self.graph.ops))
        self._unused()
        return self

    def buffer(self, value: int, sharding: Sharding) -> Buffer:
        """A value in a layout; what was made before the value was settled is another buffer."""
        return (value, sharding, int(value in self.final))

    def settle(self, value: int, layout: Sharding, op: int) -> None:
        """Bring a value to the layout from which all its uses start."""
        if self.base[value] == layout:
            return
        made = self.buffer(value, self.base[value])
        self.per_use.append(self._walk((value, self.base[value], layout), op))
        self.base[value] = layout
        self.final.add(value)
        self.events.append(Event((made,), (self.buffer(value, layout),)))

    def use(self, value: int, wanted: Sharding, op: int) -> None:
        """One use of a value: pays its way from where the value is made or settled."""
        source = self.base[value]
        key = (value, source, wanted)
        if source == wanted:
            return
        if key not in self._done:
            self._done[key] = self._walk(key, op)
            reads, makes = self.buffer(value, source), self.buffer(value, wanted)
            self.events.append(Event((reads,), (makes,)))
        self.per_use.append(self._done[key])

    def _walk(self, key: Key, op: int) -> float:
        value, state, target = key
        where = self._place(op)
        steps = self._paths.get(key)
        self._walked.add(key)
        if steps is None:
            self.problems.append(f"{where}: no way for v{value} from {state} to {target}")
            return math.nan
        shape, spent = self.graph.values[value].shape, 0.0
        for step in steps:
            if step.kind == "mask" and not self.graph.values[value].summable:
                self.problems.append(f"{where}: v{value} is masked, but it cannot be summed")
            try:
                elements = full_elements(state, step, shape, self.prices.mesh)
                state = apply_step(state, step, self.prices.mesh)
                check_sharding(state, shape, self.prices.mesh)
            except AutoparError as error:
                self.problems.append(f"{where}: v{value}, step {step}: {error.what}")
                return math.nan
            if step.kind in COLLECTIVES:
                sums = step.kind in ("all-reduce", "reduce-scatter")
                spent += self._collective(
                    (step.kind, step.axes, elements), value, op, "sum" if sums else ""
                )
        if state != target:
            self.problems.append(f"{where}: v{value} is brought to {state}, not to {target}")
        return spent

    def _collective(
        self, what: tuple[str, tuple[str, ...], int], value: int, op: int, reduction: str
    ) -> float:
        kind, axes, elements = what
        size = elements * item_bytes(self.graph, value)
        seconds = self.prices.seconds(kind, axes, size)
        source = self.graph.ops[op].source if op < len(self.graph.ops) else ""
        self.ran.append(Ran(kind, axes, elements, size, seconds, source, reduction))
        return seconds

    def _finish(self, op: int, strategy: Strategy) -> None:
        for finish in strategy.finishes:
            value = self.graph.ops[op].outputs[finish.output]
            shape = self.graph.values[value].shape
            elements = strategy.outs[finish.output].local_size(shape, self.prices.mesh)
            what = ("all-reduce", finish.axes, elements)
            self.finishes.append(self._collective(what, value, op, finish.kind))

    def _read_paths(self) -> None:
        for choice in self.plan.reshards:
            key = (choice.value, choice.source, choice.target)
            if self._paths.setdefault(key, choice.steps) != choice.steps:
                self.problems.append(f"two ways for v{key[0]} from {key[1]} to {key[2]}")

    def _legal(self, value: int, sharding: Sharding, where: str) -> None:
        try:
            check_sharding(sharding, self.graph.values[value].shape, self.prices.mesh)
        except VerifyError as error:
            self.problems.append(f"{where}: {error.what}: {error.got}")
        if sharding.partial and not self.graph.values[value].summable:
            self.problems.append(f"{where}: {sharding} is pending, but it cannot be summed")

    def _unused(self) -> None:
        for value, source, target in self._paths:
            if (value, source, target) not in self._walked:
                self.problems.append(f"the way of v{value} from {source} to {target} is never used")

    def _place(self, op: int) -> str:
        if op == len(self.graph.ops):
            return "results"
        return f"op {op} ({self.graph.ops[op].name}) at {self.graph.ops[op].source}"
