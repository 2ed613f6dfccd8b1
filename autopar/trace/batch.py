"""The batch factor in one op: which part of which dim it is, and what an op makes of it.

Micro-batching is sharding over time. The batch is cut into `m` contiguous slices by a pseudo axis
of size `m`, the *micro factor*, and each value is in one of five states towards it:

| state   | what is held                                          | when it is known      |
|---------|-------------------------------------------------------|-----------------------|
| `once`  | the whole value; no micro-batch changes it             | before the loop       |
| `same`  | the whole value, made anew in each micro-batch         | in the loop           |
| `split` | the micro-batch's slice along a part of one dim        | in the loop           |
| `sum`   | a term; the value is the sum of the micro-batches' terms | after the loop      |
| `late`  | the whole value                                        | after the loop        |

A value may carry a *scale*: scalars known only after the loop that still have to multiply it. A
backward pass is linear in its cotangent, so `d sqrt(mean(l))` runs in the loop with 1 in place of
`1 / (2 sqrt(mean(l)))`, and the finished gradients are multiplied once.

Dims are matched by the factors of the ops' rules alone. Sizes never decide, so a batch of 8
examples of length 8 and width 8 is no harder than any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import MicrobatchError
from autopar.ir.graph import OpGraph
from autopar.rules.rule import FINISHES, DimMap, Rule, bind_as_is
from autopar.trace.jaxpr import TracedFunction

ONCE, SAME, SPLIT, SUM, LATE = "once", "same", "split", "sum", "late"
BEFORE, LOOP, AFTER = "before", "loop", "after"


@dataclass(frozen=True, slots=True)
class Position:
    """Which part of a dim the micro factor is.

    The dim is `(outer, m, inner)`, major to minor: `inner` elements follow each other inside a
    slice, and `outer = size / (m inner)` such slices stand apart (1: the slice is contiguous).
    """

    dim: int
    inner: int

    def outer(self, shape: tuple[int, ...], count: int) -> int:
        """Number of separate runs a slice of a value of `shape` consists of."""
        return shape[self.dim] // (self.inner * count)


@dataclass(frozen=True, slots=True)
class State:
    """What is held of a value.

    Attributes:
        kind: ONCE, SAME, SPLIT, SUM or LATE.
        position: for SPLIT, of the micro factor; for ONCE, where the rows of a batch lie that is
            held whole, so that the loop takes slices of it where it can.
        scale: ids of late scalars that must still multiply the value.
        zero: whether the value is known to be all zeros.
    """

    kind: str
    position: Position | None = None
    scale: tuple[int, ...] = ()
    zero: bool = False

    def __str__(self) -> str:
        where = f"@{self.position.dim}" if self.position else ""
        return f"{self.kind}{where}{'*' * len(self.scale)}"


@dataclass(frozen=True, slots=True)
class Use:
    """How an op of the loop takes an operand.

    Attributes:
        kind: `as-is`; `slice`: the micro-batch's slice of a whole value; `mask`: the value in the
            first micro-batch and zeros in the others; `one`: 1, in place of a late scalar.
        position: for `slice`.
    """

    kind: str = "as-is"
    position: Position | None = None


@dataclass(frozen=True, slots=True)
class View:
    """What the analysis of one op needs to know of it.

    Attributes:
        rule: its factor rule.
        operands: value ids; -1 for literals.
        in_shapes, out_shapes: global shapes.
        states: of the operands.
        wanted: per result, the position at which its uses want it split, or None.
        count: number of micro-batches, at least 2.
    """

    rule: Rule
    operands: tuple[int, ...]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shapes: tuple[tuple[int, ...], ...]
    states: tuple[State, ...]
    wanted: tuple[Position | None, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Looped:
    """An op can run in each micro-batch: how it takes its operands, and what it then makes."""

    uses: tuple[Use, ...]
    outs: tuple[State, ...]
    body: Body | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """When an op runs.

    Attributes:
        runs: BEFORE, LOOP or AFTER.
        outs: states of its results.
        uses: how it takes its operands; empty where it takes them whole.
        why: for an op that takes per-example values after the loop, why it is not in the loop.
        body: for a scan in the loop, its body.
    """

    runs: str
    outs: tuple[State, ...]
    uses: tuple[Use, ...] = ()
    why: str = ""
    body: Body | None = None


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a scan over something other than the batch, divided like the step around it.

    Attributes:
        graph, rules, count: of the body; inputs are constants, carry, and one slice of the rest.
        placed, states: per op and per value; all ops run BEFORE or in the LOOP, in order.
        ends: per result, how it is taken: a whole end of a split carry is sliced.
        hidden: the values of its closed-over arrays.
        num_consts, num_carry: how its first inputs divide.
    """

    graph: OpGraph
    rules: tuple[Rule, ...]
    count: int
    placed: tuple[Step, ...]
    states: tuple[State, ...]
    ends: tuple[Use, ...]
    hidden: tuple[Any, ...]
    num_consts: int
    num_carry: int


@dataclass(frozen=True, slots=True)
class Refused:
    """An op cannot run in each micro-batch: why, and because of which operands."""

    why: str
    culprits: tuple[int, ...] = ()


Slot = tuple[int, int]
"""A factor of a rule and the number of elements of it inside the micro factor."""


def factor_at(rule: Rule, dims: DimMap, position: Position, count: int) -> Slot | None:
    """The op's factor that holds a value's micro factor; None if the op needs the dim whole."""
    minor = 1
    for factor in reversed(dims[position.dim]):
        size = rule.factors[factor].size or 1
        if position.inner % minor == 0 and (minor * size) % (position.inner * count) == 0:
            return factor, position.inner // minor
        minor *= size
    return None


def position_in(rule: Rule, dims: DimMap, slot: Slot) -> Position | None:
    """Where the micro factor `slot` is in an operand or result; None if it is not there."""
    for dim, factors in enumerate(dims):
        if slot[0] in factors:
            after = factors[factors.index(slot[0]) + 1 :]
            minor = math.prod(rule.factors[factor].size or 1 for factor in after)
            return Position(dim, slot[1] * minor)
    return None


def can_make_split(view: View, result: int, position: Position) -> Slot | None:
    """The slot by which the op could make `result` split at `position`, or None.

    An op that counts along the dim (iota, random bits) makes contiguous slices only.
    """
    rule = view.rule
    slot = factor_at(rule, rule.outs[result], position, view.count)
    if slot is None or rule.factors[slot[0]].kind != "pass":
        return None
    carried = any(position_in(rule, dims, slot) is not None for dims in rule.ins)
    apart = position.outer(view.out_shapes[result], view.count) != 1
    return None if apart and not carried else slot


def without_whole_rows(view: View) -> View:
    """The same view, with the rows of batches that are held whole forgotten."""
    states = tuple(replace(s, position=None) if s.kind == ONCE else s for s in view.states)
    return replace(view, states=states)


def try_in_loop(view: View) -> Looped | Refused:
    """Run the op in each micro-batch, if that is exact.

    The micro axis is given to every factor through which it arrives. That is right if no operand
    and no result then is split twice, summed twice, or both.
    """
    slots = _slots(view)
    if isinstance(slots, Refused):
        return slots
    states = scalars_as_scales(view, slots)
    linear = _linear_factors(view.rule, states, slots)
    if isinstance(linear, Refused):
        return linear
    given: list[Slot] = [*slots, *((factor, 0) for factor in linear)]
    reasons_in = [_reasons(view.rule, given, p, outputs=False) for p in range(len(states))]
    reasons_out = [_reasons(view.rule, given, p, outputs=True) for p in range(len(view.out_shapes))]
    if clash := _clash(states, reasons_in, reasons_out):
        return clash
    for result, reasons in enumerate(reasons_out):
        if slots and not reasons and not _stands_apart(view.rule, states, result):
            return Refused("its rule does not tie a result to the batch")
    uses: list[Use] = []
    for position, reasons in enumerate(reasons_in):
        use = _use(states[position], reasons, view, position, masks=bool(slots))
        if isinstance(use, Refused):
            return use
        uses.append(use)
    return _finish(view, states, uses, reasons_out)


def _slots(view: View) -> tuple[Slot, ...] | Refused:
    """The factors through which the micro factor reaches the op, in order of appearance."""
    found: dict[int, int] = {}
    for position, state in enumerate(view.states):
        if state.position is None:
            continue
        slot = factor_at(view.rule, view.rule.ins[position], state.position, view.count)
        if slot is None:
            reason = view.rule.reason or "it needs the whole batch at once"
            return Refused(reason, (position,))
        if problem := _slot_problem(view, position, state.position, slot):
            return Refused(problem, (position,))
        if found.setdefault(*slot) != slot[1]:
            return Refused("it sets examples of the batch against each other", (position,))
    for result, wanted in enumerate(view.wanted):
        made = can_make_split(view, result, wanted) if wanted else None
        if made is not None and found.setdefault(*made) != made[1]:
            return Refused("its result is wanted split in another way")
    return tuple(found.items())


def _slot_problem(view: View, position: int, at: Position, slot: Slot) -> str:
    factor = view.rule.factors[slot[0]]
    if factor.kind in FINISHES:
        return f"it takes the {factor.kind} over the batch"
    apart = at.outer(view.in_shapes[position], view.count) != 1
    if apart and factor.kind == "sum" and view.rule.bind is not bind_as_is:
        return "it looks up rows of a batch that is not the major part of its dim"
    return ""


def scalars_as_scales(view: View, slots: Sequence[Slot]) -> tuple[State, ...]:
    """States with late scalars (and sums, where a batch dim meets them) seen as scaled ones."""
    taken = {p for factor, _ in slots for p in view.rule.factors[factor].partial_in}
    seen = []
    for position, state in enumerate(view.states):
        late = state.kind == LATE or (state.kind == SUM and bool(slots) and position not in taken)
        if late and view.in_shapes[position] == ():
            state = State(SAME, None, (view.operands[position],))
        seen.append(state)
    return tuple(seen)


def _linear_factors(
    rule: Rule, states: Sequence[State], slots: Sequence[Slot]
) -> tuple[int, ...] | Refused:
    """The linear factors that let the pending sums among the operands through."""
    taken = {p for factor, _ in slots for p in rule.factors[factor].partial_in}
    chosen: list[int] = []
    for position, state in enumerate(states):
        if state.kind != SUM or position in taken:
            continue
        for number, factor in enumerate(rule.factors):
            if factor.kind == "linear" and position in factor.partial_in:
                chosen.append(number)
                taken |= set(factor.partial_in)
                break
        else:
            return Refused("it is not linear in a sum over the batch", (position,))
    return tuple(chosen)


def _reasons(
    rule: Rule, given: Sequence[Slot], position: int, *, outputs: bool
) -> list[Position | None]:
    """Why an operand or result is split (a Position) or a pending sum (None)."""
    dims = (rule.outs if outputs else rule.ins)[position]
    found: list[Position | None] = []
    for slot in given:
        factor = rule.factors[slot[0]]
        at = position_in(rule, dims, slot)
        if at is not None:
            found.append(at)
        if position in (factor.partial_out if outputs else factor.partial_in):
            found.append(None)
    return found


def _clash(
    states: Sequence[State],
    reasons_in: Sequence[Sequence[Position | None]],
    reasons_out: Sequence[Sequence[Position | None]],
) -> Refused | None:
    """Something would be split twice, summed twice, or both."""
    if all(len(reasons) <= 1 for reasons in (*reasons_in, *reasons_out)):
        return None
    mixed = tuple(p for p, state in enumerate(states) if state.kind in (SPLIT, SUM))
    if any(states[p].kind == SUM for p in mixed):
        return Refused("it needs a finished sum over the batch", mixed)
    return Refused("it sets examples of the batch against each other", mixed)


def _stands_apart(rule: Rule, states: Sequence[State], result: int) -> bool:
    """Whether a result is made from other operands than those the batch is in (a barrier)."""
    return any(
        factor.kind == "linear"
        and result in factor.partial_out
        and len(factor.partial_out) < len(rule.outs)
        and all(states[p].kind in (ONCE, SAME) for p in factor.partial_in)
        for factor in rule.factors
    )


def _use(
    state: State, reasons: Sequence[Position | None], view: View, position: int, *, masks: bool
) -> Use | Refused:
    whole = state.kind in (ONCE, SAME)
    if not reasons:
        if state.kind == SAME and view.states[position].kind in (LATE, SUM):
            return Use("one")
        return Use() if whole else Refused("it needs a finished value", (position,))
    at = reasons[0]
    if at is None:
        if state.kind == SUM or (whole and state.zero):
            return Use()
        if whole and masks and view.states[position].kind not in (LATE, SUM):
            return Use("mask")
        return Refused("it adds something to a sum over the batch", (position,))
    if state.kind == SPLIT:
        same = state.position == at
        return Use() if same else Refused("the batch is in another dim", (position,))
    return Use("slice", at) if whole else Refused("it needs a finished value", (position,))


def _finish(
    view: View,
    states: Sequence[State],
    uses: Sequence[Use],
    reasons: Sequence[Sequence[Position | None]],
) -> Looped | Refused:
    scales = result_scales(view.rule, states, len(view.out_shapes))
    if isinstance(scales, Refused):
        return scales
    zeros = result_zeros(view.rule, states, len(view.out_shapes))
    outs = []
    for why, scale, zero in zip(reasons, scales, zeros, strict=True):
        at = why[0] if why else None
        kind = SAME if not why else SUM if at is None else SPLIT
        outs.append(State(kind, at, () if zero else scale, zero))
    return Looped(tuple(uses), tuple(outs))


def result_scales(
    rule: Rule, states: Sequence[State], results: int
) -> list[tuple[int, ...]] | Refused:
    """The scale of each result: the op must be linear in what is scaled.

    Members of one linear group are added up, so they must share their scale (zeros share any);
    the scales of separate groups multiply.
    """
    scales: list[tuple[int, ...]] = [()] * results
    left = {p for p, state in enumerate(states) if state.scale}
    for factor in rule.factors if left else ():
        group = [p for p in factor.partial_in if not states[p].zero]
        common = {states[p].scale for p in group}
        if factor.kind != "linear" or not left.intersection(group):
            continue
        if len(common) > 1:
            return Refused("only part of what it adds up is scaled by a whole-batch scalar")
        left -= set(group)
        for result in factor.partial_out:
            scales[result] = tuple(sorted((*scales[result], *states[group[0]].scale)))
    if left:
        return Refused("it is not linear in a whole-batch scalar", tuple(sorted(left)))
    return scales


def result_zeros(rule: Rule, states: Sequence[State], results: int) -> list[bool]:
    """Which results are all zeros, since the op is linear in operands that are."""
    zeros = [False] * results
    for factor in rule.factors:
        group = factor.partial_in
        if factor.kind == "linear" and group and all(states[p].zero for p in group):
            for result in factor.partial_out:
                zeros[result] = True
    return zeros


def batch_values(
    traced: TracedFunction,
    graph: OpGraph,
    batch_argnums: Sequence[int],
    *,
    batch_argnames: Sequence[str] = (),
    batch_dims: int | Mapping[int | str, int] = 0,
) -> tuple[tuple[int, int], ...]:
    """`(value, batch dim)` of every input leaf that belongs to the batch; scalars are left out.

    Args:
        traced: the function.
        graph: its graph.
        batch_argnums, batch_argnames: the arguments that are the batch.
        batch_dims: their batch dim; by argument where they differ.

    Raises:
        MicrobatchError: no argument is the batch, or a leaf has no such dim.
    """
    chosen: list[tuple[int, int]] = []
    for leaf, entry in zip(traced.inputs, graph.inputs[: len(traced.inputs)], strict=True):
        if leaf.argument not in batch_argnums and leaf.argument not in batch_argnames:
            continue
        dim = batch_dims if isinstance(batch_dims, int) else batch_dims.get(leaf.argument, 0)
        rank = len(leaf.aval.shape)
        if rank and not -rank <= dim < rank:
            raise MicrobatchError(
                f"the batch argument {leaf.name} has no dim {dim}",
                got=f"shape {tuple(leaf.aval.shape)}",
                remedy="batch_dims={argument: dim}",
            )
        if rank:
            chosen.append((entry.value, dim % rank))
    if not chosen:
        raise MicrobatchError(
            "no argument is the batch",
            got=f"batch_argnums={tuple(batch_argnums)}, batch_argnames={tuple(batch_argnames)}",
            remedy="name the arguments whose arrays hold one row per example in batch_argnums",
        )
    return tuple(chosen)
