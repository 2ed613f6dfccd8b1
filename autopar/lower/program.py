"""What will run: decisions as a list of ops, reshards and collectives, each with its tag.

This is the one place where collectives are numbered, so that a plan, its price list, the emitted
program and the audit of the compiled one speak of the same things.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autopar.errors import VerifyError
from autopar.ir.graph import Literal, OpGraph
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import LOCAL_STEPS, Step, apply_step, full_elements
from autopar.ir.sharding import Sharding, check_sharding, replicated
from autopar.rules.strategy import Finish, Strategy

StepsOf = Callable[[int, Sharding, Sharding], tuple[Step, ...]]
"""Reshard steps of a value between two shardings."""


@dataclass(frozen=True, slots=True)
class Reshard:
    """A value brought from one sharding to another, once, for all uses that want it.

    Attributes:
        value: the value's id.
        source, target: shardings.
        steps: how.
        first: number of the first collective among `steps`; the others follow.
        op: index of the op that first needs it (len(ops) for results).
    """

    value: int
    source: Sharding
    target: Sharding
    steps: tuple[Step, ...]
    first: int
    op: int


@dataclass(frozen=True, slots=True)
class RunOp:
    """An op under its strategy; `first` numbers its finishes."""

    op: int
    strategy: Strategy
    first: int


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """One collective that will run.

    Attributes:
        number: its tag is `ap<number>`.
        kind: all-reduce, reduce-scatter, all-gather or all-to-all.
        axes: mesh axes.
        elements: of the full tensor on those axes (see ir.reshard.full_elements).
        itemsize: bytes an element.
        op: index of the op that needs it, or that finishes it.
        value: the value that is moved.
        reduction: `sum`, `max`, `min`, `and`, `or`, or empty.
    """

    number: int
    kind: str
    axes: tuple[str, ...]
    elements: int
    itemsize: int
    op: int
    value: int
    reduction: str = ""

    @property
    def tag(self) -> str:
        """The named scope it runs in."""
        return f"ap{self.number}"


@dataclass(frozen=True, slots=True)
class Program:
    """The instructions in execution order.

    Attributes:
        graph, mesh: of what, on what.
        inputs, outputs: shardings at the boundary, nothing pending.
        steps: reshards and ops.
        collectives: all collectives, by number.
    """

    graph: OpGraph
    mesh: Mesh
    inputs: tuple[Sharding, ...]
    outputs: tuple[Sharding, ...]
    steps: tuple[Reshard | RunOp, ...]
    collectives: tuple[PlannedCollective, ...]


@dataclass(frozen=True, slots=True)
class Decisions:
    """One complete answer.

    Attributes:
        inputs: a sharding per graph input.
        ops: a strategy per op.
        settled: (value id, sharding) of values whose pending sum is finished once for all uses.
        outputs: a sharding per graph output.
    """

    inputs: tuple[Sharding, ...]
    ops: tuple[Strategy, ...]
    settled: tuple[tuple[int, Sharding], ...]
    outputs: tuple[Sharding, ...]


@dataclass
class _Writer:
    graph: OpGraph
    mesh: Mesh
    steps_of: StepsOf
    held: dict[int, dict[Sharding, None]]
    base: dict[int, Sharding]
    steps: list[Reshard | RunOp]
    collectives: list[PlannedCollective]

    def need(self, value: int, target: Sharding, op: int) -> None:
        """Make sure `value` is at hand in `target`; a reshard is done once."""
        if target in self.held[value]:
            return
        source = self.base[value]
        steps = self.steps_of(value, source, target)
        first = len(self.collectives)
        self._count(value, source, target, steps, op)
        self.steps.append(Reshard(value, source, target, steps, first, op))
        self.held[value][target] = None

    def _count(
        self, value: int, source: Sharding, target: Sharding, steps: tuple[Step, ...], op: int
    ) -> None:
        entry = self.graph.values[value]
        state = source
        for step in steps:
            elements = full_elements(state, step, entry.shape, self.mesh)
            state = apply_step(state, step, self.mesh)
            check_sharding(state, entry.shape, self.mesh)
            if step.kind not in LOCAL_STEPS:
                sums = step.kind in ("all-reduce", "reduce-scatter")
                self._collective(
                    step.kind, step.axes, elements, (op, value), (sums and "sum") or ""
                )
        if state != target:
            raise VerifyError(f"reshard steps of v{value} end in {state}, not in {target}")

    def _collective(
        self, kind: str, axes: tuple[str, ...], elements: int, place: tuple[int, int], red: str
    ) -> None:
        op, value = place
        itemsize = int(getattr(self.graph.values[value].dtype, "itemsize", 4))
        number = len(self.collectives)
        self.collectives.append(
            PlannedCollective(number, kind, axes, elements, itemsize, op, value, red)
        )

    def make(self, value: int, sharding: Sharding) -> None:
        self.base[value] = sharding
        self.held[value] = {sharding: None}

    def settle(self, value: int, sharding: Sharding, op: int) -> None:
        """From here on the value is what was settled, as it was priced."""
        if sharding != self.base[value]:
            self.need(value, sharding, op)
            self.make(value, sharding)

    def finish(self, op: int, value: int, finish: Finish, strategy: Strategy) -> None:
        shape = self.graph.values[value].shape
        elements = strategy.outs[finish.output].local_size(shape, self.mesh)
        self._collective("all-reduce", finish.axes, elements, (op, value), finish.kind)


def write_program(
    graph: OpGraph,
    mesh: Mesh,
    decisions: Decisions,
    steps_of: StepsOf,
) -> Program:
    """Order and number everything that runs.

    Args:
        graph: a verified graph.
        mesh: logical mesh.
        decisions: what was decided.
        steps_of: chooses the steps of a reshard.

    Raises:
        VerifyError: a sharding or a reshard does not fit.
    """
    writer = _Writer(graph, mesh, steps_of, {}, {}, [], [])
    layouts = dict(decisions.settled)
    for entry, sharding in zip(graph.inputs, decisions.inputs, strict=True):
        check_sharding(sharding, graph.values[entry.value].shape, mesh)
        writer.make(entry.value, sharding)
        writer.settle(entry.value, layouts.get(entry.value, sharding), 0)
    for op, strategy in zip(graph.ops, decisions.ops, strict=True):
        for operand, wanted in zip(op.inputs, strategy.ins, strict=True):
            if not isinstance(operand, Literal):
                writer.need(operand, wanted, op.index)
        writer.steps.append(RunOp(op.index, strategy, len(writer.collectives)))
        for finish in strategy.finishes:
            writer.finish(op.index, op.outputs[finish.output], finish, strategy)
        for value, sharding in zip(op.outputs, strategy.outs, strict=True):
            writer.make(value, sharding)
            writer.settle(value, layouts.get(value, sharding), op.index)
    for operand, sharding in zip(graph.outputs, decisions.outputs, strict=True):
        if not isinstance(operand, Literal):
            writer.need(operand, sharding, len(graph.ops))
    steps, collectives = tuple(writer.steps), tuple(writer.collectives)
    return Program(graph, mesh, decisions.inputs, decisions.outputs, steps, collectives)


def literal_steps(rank: int, target: Sharding) -> Iterator[Step]:
    """How a literal, whole everywhere, comes into `target`."""
    state = replicated(rank)
    for dim, axes in enumerate(target.dims):
        if axes != state.dims[dim]:
            yield Step("slice", axes, dim)
    if target.partial:
        yield Step("mask", target.partial)
