"""When each op runs: before, in or after the loop over micro-batches.

An abstract interpretation over the states of `trace/batch.py`, swept in execution order until
nothing new is learnt. Information flows both ways: the batch dim of an activation comes down from
the inputs, and the batch dim of a cotangent, born from a scalar (`broadcast_in_dim 1/B`, zeros,
iota), comes up from where it meets an activation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from autopar.errors import MicrobatchError
from autopar.ir.graph import Literal, Op, OpGraph
from autopar.rules.rule import Rule
from autopar.trace.batch import (
    AFTER,
    BEFORE,
    LATE,
    LOOP,
    ONCE,
    SAME,
    SPLIT,
    SUM,
    Looped,
    Position,
    Refused,
    State,
    Step,
    View,
    can_make_split,
    position_in,
    result_zeros,
    try_in_loop,
    without_whole_rows,
)
from autopar.trace.loops import is_scan, try_scan


@dataclass(frozen=True, slots=True)
class Facts:
    """What never changes while the placement is worked out.

    Attributes:
        graph, rules, count: the step, its ops' rules, the number of micro-batches.
        inputs: states of the graph's inputs.
        maker: the op that makes a value.
        on_batch: values that depend on the batch.
        on_params: values that depend on a parameter (a floating input outside the batch).
    """

    graph: OpGraph
    rules: tuple[Rule, ...]
    count: int
    inputs: Mapping[int, State]
    maker: Mapping[int, Op]
    on_batch: frozenset[int]
    on_params: frozenset[int]

    def free(self, value: int) -> bool:
        """Whether the whole value can be had before the loop."""
        return value not in self.on_batch or value not in self.on_params


@dataclass(slots=True)
class Choice:
    """What the sweeps learn; `whole` and `unwanted` only grow, so the sweeps come to an end.

    Attributes:
        whole: values to make whole before the loop.
        wanted: values that no batch input feeds, and where their uses want them split.
        unwanted: values that are wanted in two ways, or that cannot be: sliced at each use.
    """

    whole: set[int] = field(default_factory=set)
    wanted: dict[int, Position] = field(default_factory=dict)
    unwanted: set[int] = field(default_factory=set)


def gather_facts(
    graph: OpGraph, rules: Sequence[Rule], batch: Sequence[tuple[int, int]], count: int
) -> Facts:
    """Dependences and input states.

    Raises:
        MicrobatchError: a batch dim does not divide.
    """
    inputs = {entry.value: State(ONCE) for entry in graph.inputs}
    for value, dim in batch if count > 1 else ():
        inputs[value] = State(SPLIT, _batch_position(graph, value, dim, count))
    rows = frozenset(value for value, _ in batch)
    params = [
        entry.value
        for entry in graph.inputs
        if entry.value not in rows
        and getattr(graph.values[entry.value].dtype, "kind", "?") in "fcV"
    ]
    return Facts(
        graph,
        tuple(rules),
        count,
        inputs,
        {value: op for op in graph.ops for value in op.outputs},
        descendants(graph, sorted(rows)),
        descendants(graph, params),
    )


def _batch_position(graph: OpGraph, value: int, dim: int, count: int) -> Position:
    size = graph.values[value].shape[dim]
    if size == 0 or size % count:
        raise MicrobatchError(
            f"the batch does not divide into {count} micro-batches",
            where=graph.values[value].name,
            got=f"dim {dim} of shape {graph.values[value].shape}",
            remedy=f"a number of micro-batches that divides {size}",
        )
    return Position(dim, size // count)


def descendants(graph: OpGraph, roots: Sequence[int]) -> frozenset[int]:
    """All values that depend on `roots`, and `roots`."""
    found = set(roots)
    for op in graph.ops:
        if not found.isdisjoint(op.reads):
            found.update(op.outputs)
    return frozenset(found)


def place_ops(facts: Facts) -> tuple[list[Step], dict[int, State], frozenset[int]]:
    """When each op runs, the state of each value, and the values made whole before the loop."""
    choice = Choice()
    while True:
        sweep = _Sweep(facts, choice)
        steps = sweep.run()
        if not sweep.learnt:
            return steps, sweep.states, frozenset(choice.whole)


def _place_body(
    graph: OpGraph, rules: tuple[Rule, ...], states: Sequence[State], count: int
) -> tuple[list[Step], dict[int, State]]:
    """Place the ops of a loop's body, whose inputs are in `states`.

    Only what no micro-batch changes is free there: whatever else is whole would be late.
    """
    inputs = {entry.value: state for entry, state in zip(graph.inputs, states, strict=True)}
    moving = [value for value, state in inputs.items() if state.kind != ONCE or state.scale]
    maker = {value: op for op in graph.ops for value in op.outputs}
    everything = frozenset(value.id for value in graph.values)
    facts = Facts(graph, rules, count, inputs, maker, descendants(graph, moving), everything)
    steps, found, _ = place_ops(facts)
    return steps, found


class _Sweep:
    """One pass in execution order; what it learns is kept in `choice` for the next."""

    def __init__(self, facts: Facts, choice: Choice) -> None:
        self.facts = facts
        self.choice = choice
        self.learnt = False
        self.restart = False
        self.states = {
            value: replace(state, kind=ONCE) if value in choice.whole else state
            for value, state in facts.inputs.items()
        }

    def run(self) -> list[Step]:
        """The steps; cut short where a value is to be whole, which changes all that follows."""
        steps: list[Step] = []
        for op in self.facts.graph.ops:
            step = self._place(op, self._view(op))
            self.states.update(zip(op.outputs, step.outs, strict=True))
            steps.append(step)
            if self.restart:
                break
        return steps

    def _view(self, op: Op) -> View:
        graph = self.facts.graph
        return View(
            self.facts.rules[op.index],
            tuple(-1 if isinstance(o, Literal) else o for o in op.inputs),
            tuple(graph.shape_of(o) for o in op.inputs),
            tuple(graph.values[v].shape for v in op.outputs),
            tuple(
                _literal_state(o) if isinstance(o, Literal) else self.states[o] for o in op.inputs
            ),
            tuple(self.choice.wanted.get(v) for v in op.outputs),
            self.facts.count,
        )

    def _place(self, op: Op, view: View) -> Step:
        if op.effects:
            # A callback sees what it would see of the whole batch, and is called once.
            return Step(AFTER, _late(view), (), "it calls back, which must happen once")
        kinds = {state.kind for state in view.states}
        scaled = any(state.scale for state in view.states)
        wanted = any(at is not None for at in view.wanted)
        rows = any(state.position is not None for state in view.states)
        if self.choice.whole.issuperset(op.outputs):
            return _made_whole(view, self._try(op, view))
        if kinds <= {ONCE} and not (scaled or wanted or rows):
            return _made_whole(view, None)
        if not (rows or wanted):
            return self._place_without_batch_dim(op, view, kinds)
        tried = self._try(op, view)
        if isinstance(tried, Looped):
            self._want_operands(view, tried)
            return Step(LOOP, tried.outs, tried.uses, "", tried.body)
        if SPLIT not in kinds:
            for value, at in zip(op.outputs, view.wanted, strict=True):
                if at is not None:
                    self._unwant(value)
            if kinds <= {ONCE} and not scaled:
                return _made_whole(view, None, tried.why)
            return self._place_without_batch_dim(op, without_whole_rows(view), kinds)
        self._learn_whole(op, view, tried)
        return Step(AFTER, _late(view), (), tried.why)

    def _try(self, op: Op, view: View) -> Looped | Refused:
        """Run the op in the loop, on slices of what is held whole if possible."""
        scan = is_scan(op) and bool(view.rule.reason)
        run = partial(try_scan, op, place=_place_body) if scan else try_in_loop
        tried = run(view)
        bare = without_whole_rows(view)
        if isinstance(tried, Looped) or not any(s.position is not None for s in bare.states):
            return tried
        again = run(bare) if bare != view else tried
        return again if isinstance(again, Looped) else tried

    def _place_without_batch_dim(self, op: Op, view: View, kinds: set[str]) -> Step:
        grows = any(shape != () for shape in view.out_shapes)
        stays = kinds <= {ONCE, SAME} and not any(state.scale for state in view.states)
        sums = kinds <= {ONCE, SAME, SUM} and SUM in kinds
        scales = kinds <= {ONCE, SAME, LATE} and grows
        tried = try_in_loop(view) if stays or sums or scales else Refused("")
        if isinstance(tried, Refused):
            self._learn_whole(op, view, tried)
            return Step(AFTER, _late(view))
        if kinds <= {ONCE, LATE}:
            # Made before the loop, with 1 for the scalar that is not there yet.
            return Step(BEFORE, tuple(replace(s, kind=ONCE) for s in tried.outs), tried.uses)
        return Step(LOOP, tried.outs, tried.uses)

    def _learn_whole(self, op: Op, view: View, refused: Refused) -> None:
        """Find values that need no parameter and, made whole first, let the op run in the loop."""
        free = self.facts.free
        if all(free(value) for value in op.outputs):
            self._make_whole(op.outputs)
            return
        pairs = list(zip(view.operands, view.states, strict=True))
        pending = [v for v, state in pairs if v >= 0 and state.kind in (SUM, LATE) and free(v)]
        if pending:
            self._make_whole(pending)
            return
        late = [p for p, (_, state) in enumerate(pairs) if state.kind == LATE]
        if any(view.in_shapes[p] != () for p in late):
            return
        if any(state.kind == SPLIT and not free(v) for v, state in pairs):
            blamed = [pairs[p] for p in refused.culprits]
            self._make_whole([v for v, state in blamed if state.kind == SPLIT and free(v)])

    def _make_whole(self, values: Sequence[int]) -> None:
        """Make `values`, and all they are made from, whole before the loop."""
        todo = list(values)
        while todo:
            value = todo.pop()
            if value in self.choice.whole:
                continue
            self.learnt = self.restart = True
            self.choice.whole.add(value)
            self.choice.wanted.pop(value, None)
            if value in self.facts.maker:
                op = self.facts.maker[value]
                todo += op.outputs
                todo += op.reads

    def _want_operands(self, view: View, looped: Looped) -> None:
        """Whole operands that the loop slices are better born as slices, where they can be."""
        for value, use in zip(view.operands, looped.uses, strict=True):
            if value >= 0 and use.kind == "slice" and use.position is not None:
                self._want(value, use.position)

    def _want(self, value: int, at: Position) -> None:
        todo = [(value, at)]
        while todo:
            value, at = todo.pop()
            known = self.choice.wanted.get(value)
            settled = value in self.choice.whole or value in self.choice.unwanted
            if settled or known == at or self.states[value].kind != ONCE:
                continue
            if known is not None:
                self._unwant(value)
            elif value in self.facts.maker:
                todo += self._want_made(value, at)

    def _want_made(self, value: int, at: Position) -> list[tuple[int, Position]]:
        """Want an op's result split; the operands that must then be split too."""
        op = self.facts.maker[value]
        view = self._view(op)
        slot = can_make_split(view, op.outputs.index(value), at)
        if slot is None:
            return []
        self.choice.wanted[value] = at
        self.learnt = True
        below = [
            (operand, position_in(view.rule, dims, slot))
            for operand, dims in zip(view.operands, view.rule.ins, strict=True)
        ]
        return [(v, position) for v, position in below if v >= 0 and position is not None]

    def _unwant(self, value: int) -> None:
        if value not in self.choice.unwanted:
            self.learnt = True
            self.choice.unwanted.add(value)
            self.choice.wanted.pop(value, None)


def _literal_state(literal: Literal) -> State:
    return State(ONCE, zero=bool(np.all(np.asarray(literal.value) == 0)))


def _made_whole(view: View, sliced: Looped | Refused | None, why: str = "") -> Step:
    """The op runs before the loop; `sliced` tells where the batch's rows lie in its results."""
    zeros = result_zeros(view.rule, view.states, len(view.out_shapes))
    rows: list[Position | None] = [None] * len(zeros)
    if isinstance(sliced, Looped):
        rows = [state.position for state in sliced.outs]
    outs = tuple(State(ONCE, at, zero=zero) for at, zero in zip(rows, zeros, strict=True))
    return Step(BEFORE, outs, (), why)


def _late(view: View) -> tuple[State, ...]:
    return tuple(State(LATE) for _ in view.out_shapes)
