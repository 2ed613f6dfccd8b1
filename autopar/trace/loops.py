"""A scan over time or layers with rows of the batch in its carry, divided over micro-batches.

The batch dim goes through the body as through any graph, but the states of the carry must agree
between its start and its end: they are found as a fixed point. A gradient that a backward scan adds
up in its carry starts from zeros that no micro-batch changes and ends as a pending sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autopar._compat.loops import scan_counts
from autopar.ir.graph import Literal, Op, OpGraph
from autopar.rules.registry import rules_of
from autopar.rules.rule import Rule
from autopar.trace.batch import (
    AFTER,
    LATE,
    ONCE,
    SAME,
    SPLIT,
    SUM,
    Body,
    Looped,
    Position,
    Refused,
    State,
    Step,
    Use,
    View,
    scalars_as_scales,
)
from autopar.trace.build import BuiltGraph, build_graph
from autopar.trace.jaxpr import Leaf, TracedFunction

PlaceBody = Callable[
    [OpGraph, tuple[Rule, ...], Sequence[State], int], tuple[list[Step], dict[int, State]]
]
"""Places the ops of a graph whose inputs are in the given states."""

_MAX_ROUNDS = 8
"""A carry is refined from whole to split or summed and from unscaled to scaled: few rounds do."""


def is_scan(op: Op) -> bool:
    """Whether the op is a scan whose parameters this JAX version lets us read."""
    return op.name == "scan" and scan_counts(op.params) is not None


def try_scan(op: Op, view: View, place: PlaceBody) -> Looped | Refused:
    """Run a scan in each micro-batch, if its body allows it."""
    states = scalars_as_scales(view, ())
    if late := [p for p, state in enumerate(states) if state.kind == LATE]:
        return Refused("it needs a finished value", tuple(late))
    counts = scan_counts(op.params)
    assert counts is not None, op
    consts, carry = counts
    outer = [_inside(s) if p >= consts + carry else s for p, s in enumerate(states)]
    if None in outer:
        return Refused("it runs over the batch, example after example", (outer.index(None),))
    given = [state for state in outer if state is not None]
    built = body_graph(op.params["jaxpr"])
    rules = rules_of(built.graph)
    for _ in range(_MAX_ROUNDS):
        inputs = [*given, *(State(ONCE) for _ in built.hidden)]
        steps, found = place(built.graph, rules, inputs, view.count)
        if problem := _body_problem(built.graph, steps):
            return Refused(problem)
        ends = [_end_state(found, operand) for operand in built.graph.outputs]
        joined = [_join(*p) for p in zip(given[consts : consts + carry], ends, strict=False)]
        if None in joined:
            return Refused("its carry changes its relation to the batch from step to step")
        agreed = [state for state in joined if state is not None]
        if agreed == given[consts : consts + carry]:
            ordered = tuple(found[value.id] for value in built.graph.values)
            body = Body(
                graph=built.graph,
                rules=rules,
                count=view.count,
                placed=tuple(steps),
                states=ordered,
                ends=_ends([*agreed, *ends[carry:]], ends),
                hidden=built.hidden,
                num_consts=consts,
                num_carry=carry,
            )
            return _looped(view, states, given, [*agreed, *ends[carry:]], body)
        given[consts : consts + carry] = agreed
    return Refused("its carry changes its relation to the batch from step to step")


def body_graph(closed: Any) -> BuiltGraph:
    """The graph of a loop's body."""
    inputs, outputs = (
        tuple(Leaf(side, f"{side}{n}", f"{side}{n}", aval) for n, aval in enumerate(avals))
        for side, avals in (("in", closed.in_avals), ("out", closed.out_avals))
    )
    return build_graph(TracedFunction("body", closed, inputs, outputs, None, None))


def _inside(state: State) -> State | None:
    """The state of one slice along dim 0; None if that is the batch."""
    if state.position is None:
        return state
    if state.position.dim == 0:
        return None
    return replace(state, position=Position(state.position.dim - 1, state.position.inner))


def _outside(state: State) -> State:
    if state.position is None:
        return state
    return replace(state, position=Position(state.position.dim + 1, state.position.inner))


def _body_problem(graph: OpGraph, steps: Sequence[Step]) -> str:
    for op, step in zip(graph.ops, steps, strict=True):
        if step.runs == AFTER:
            return f"in its body, {op.name} ({op.source}): {step.why or 'needs a finished value'}"
        if any(use.kind == "one" for use in step.uses):
            return f"in its body, {op.name} ({op.source}) needs a finished sum over the batch"
    return ""


def _end_state(found: dict[int, State], operand: Any) -> State:
    return State(SAME) if isinstance(operand, Literal) else found[operand]


def _join(start: State, end: State) -> State | None:
    """The state of a carry that starts as `start` and comes back as `end`."""
    whole = (ONCE, SAME)
    if start.kind in whole and end.kind in whole:
        kind, position = SAME, None
    elif start.kind in whole or start.kind == end.kind:
        kind, position = end.kind, end.position
        if start.kind == SPLIT and start.position != end.position:
            return None
    elif start.kind == SPLIT and end.kind in whole:
        kind, position = SPLIT, start.position
    else:
        return None
    zero = start.zero and end.zero
    if start.scale != end.scale and not (start.zero or end.zero):
        return None
    return State(kind, position, end.scale if start.zero else start.scale, zero)


def _ends(wanted: Sequence[State], ends: Sequence[State]) -> tuple[Use, ...]:
    return tuple(
        Use("slice", want.position) if want.kind == SPLIT and end.kind != SPLIT else Use()
        for want, end in zip(wanted, ends, strict=True)
    )


def _looped(
    view: View,
    states: Sequence[State],
    inputs: Sequence[State],
    ends: Sequence[State],
    body: Body,
) -> Looped | Refused:
    uses = []
    for position, (state, taken) in enumerate(zip(states, inputs, strict=True)):
        if view.states[position].kind in (LATE, SUM) and state.kind == SAME:
            uses.append(Use("one"))
        elif taken.kind == SPLIT and state.kind != SPLIT:
            uses.append(Use("slice", taken.position))
        elif taken.kind == SUM and state.kind != SUM and not state.zero:
            uses.append(Use("mask"))
        else:
            uses.append(Use())
    outs = []
    for number, state in enumerate(ends):
        seen = state if number < body.num_carry else _outside(state)
        outs.append(replace(seen, kind=SAME) if seen.kind == ONCE else seen)
    return Looped(tuple(uses), tuple(outs), body)
