"""A train step in four regions, and the proof that it can run in micro-batches.

    prologue   needs the whole batch but no parameter: loss weights, mask counts, lengths
    forward    what the loss and the auxiliary results are made from
    backward   the rest of what depends on the batch
    update     what needs finished gradients

The regions are names for people. *When* an op runs (before, in or after the loop over
micro-batches) is decided in `trace/placement.py`, and that is what makes the result exact: an op
runs in the loop by its factor rule, or on whole values. A whole value of the batch is free before
the loop if no parameter is needed to make it; after the loop it costs what micro-batching was to
save, so that is refused where heavy work would follow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import jaxprs_in_params

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
    Body,
    State,
    Step,
    Use,
)
from autopar.trace.placement import Facts, descendants, gather_facts, place_ops

PROLOGUE, FORWARD, BACKWARD, UPDATE = "prologue", "forward", "backward", "update"
REGIONS = (PROLOGUE, FORWARD, BACKWARD, UPDATE)
RUNS = (BEFORE, LOOP, AFTER)

_TRANSFORM = re.compile(r"\b(jvp|transpose)\(")
_REMEDY = (
    "compute it per example, or from the batch without parameters, or let it only multiply the "
    "loss as a scalar; or num_micro_batches=1"
)
_UNRULED_REMEDY = (
    "write it with operations that have a rule (jax.lax.scan over time or layers has one); or "
    "num_micro_batches=1"
)


@dataclass(frozen=True, slots=True)
class Placed:
    """Where one op stands.

    Attributes:
        region: one of REGIONS.
        runs: one of RUNS.
        uses: per operand, how it is taken; empty where all are taken whole.
        outs: the states of the results.
        body: for a scan in the loop, its body.
    """

    region: str
    runs: str
    uses: tuple[Use, ...]
    outs: tuple[State, ...]
    body: Body | None = None


@dataclass(frozen=True, slots=True)
class MicroSplit:
    """A graph divided over micro-batches.

    Attributes:
        graph, rules: what was divided.
        count: number of micro-batches.
        batch: `(value, dim)` of the batch inputs.
        placed: per op.
        states: per value.
        crossing: values made in the loop and needed after it, in value order.
    """

    graph: OpGraph
    rules: tuple[Rule, ...]
    count: int
    batch: tuple[tuple[int, int], ...]
    placed: tuple[Placed, ...]
    states: tuple[State, ...]
    crossing: tuple[int, ...]

    def ops(self, runs: str) -> list[Op]:
        """The ops of a phase: BEFORE, LOOP or AFTER."""
        pairs = zip(self.graph.ops, self.placed, strict=True)
        return [op for op, placed in pairs if placed.runs == runs]


def split_step(
    graph: OpGraph, rules: Sequence[Rule], batch: Sequence[tuple[int, int]], count: int
) -> MicroSplit:
    """Divide a train step over `count` micro-batches: the i-th is the i-th slice of the batch.

    Args:
        graph: the step.
        rules: of its ops.
        batch: `(value, dim)` of the inputs that hold one row per example.
        count: number of micro-batches; with 1 the whole batch is one, and nothing is refused.

    Raises:
        MicrobatchError: the batch does not divide, or the division would not be exact.
    """
    facts = gather_facts(graph, rules, batch, count)
    steps, states, whole = place_ops(facts)
    _refuse_heavy(facts, states, steps)
    steps = _move_after(facts, states, steps) if count > 1 else steps
    for op, step in zip(graph.ops, steps, strict=True):
        states.update(zip(op.outputs, step.outs, strict=True))
    regions = _regions(facts, steps, whole)
    steps = steps if count > 1 else _once_around(graph, regions)
    placed = tuple(
        Placed(region, step.runs, step.uses, step.outs, step.body)
        for region, step in zip(regions, steps, strict=True)
    )
    ordered = tuple(states[value.id] for value in graph.values)
    crossing = _crossing(graph, steps, ordered)
    return MicroSplit(graph, facts.rules, count, tuple(batch), placed, ordered, crossing)


def _crossing(graph: OpGraph, steps: Sequence[Step], states: Sequence[State]) -> tuple[int, ...]:
    made = {v for op in graph.ops if steps[op.index].runs == LOOP for v in op.outputs}
    needed = {v for op in graph.ops if steps[op.index].runs == AFTER for v in op.reads}
    needed.update(graph.returned)
    # A scale may be a sum that only scaled values need.
    needed |= {scalar for value in sorted(made) for scalar in states[value].scale}
    return tuple(sorted(made & needed))


# --- what is refused ---------------------------------------------------------------------------


def _refuse_heavy(facts: Facts, states: Mapping[int, State], steps: Sequence[Step]) -> None:
    """Raise if a contraction with a parameter would run on per-example values outside the loop."""
    origin: dict[int, Op] = {}
    for op in facts.graph.ops:
        if steps[op.index].runs == LOOP or all(facts.free(v) for v in op.outputs):
            continue
        operands = op.reads
        cause = next((origin[v] for v in operands if v in origin), None)
        if any(states[v].position is not None for v in operands):
            cause = cause or op
        if cause is None:
            continue
        if _is_heavy(op, facts.rules[op.index]):
            raise _refusal(facts, states, steps, cause, op)
        origin.update((v, cause) for v in op.outputs if facts.graph.values[v].shape != ())


def _is_heavy(op: Op, rule: Rule) -> bool:
    """Contractions, scatters of rows, and ops that call functions."""
    scatters = any(factor.kind == "sum" and factor.partial_in for factor in rule.factors)
    return rule.flops > 0 or scatters or any(True for _ in jaxprs_in_params(op.params))


def _refusal(
    facts: Facts, states: Mapping[int, State], steps: Sequence[Step], cause: Op, heavy: Op
) -> MicrobatchError:
    statistic = _statistic(facts, states, steps, cause)
    reason = steps[cause.index].why or "it needs the whole batch at once"
    got = f"{cause.name} of {cause.scope or 'the step'}: {reason}"
    if statistic is not None and statistic.source:
        got += f"; it uses the {statistic.name} over the batch from {statistic.source}"
    unruled = facts.rules[cause.index].reason
    return MicrobatchError(
        f"{facts.graph.name} cannot be split into {facts.count} micro-batches exactly",
        where=cause.source or heavy.source,
        got=got,
        why=f"{heavy.name} ({heavy.source}) needs the result for each example, and it is known "
        "only after the last micro-batch",
        remedy=_UNRULED_REMEDY if unruled else _REMEDY,
    )


def _statistic(
    facts: Facts, states: Mapping[int, State], steps: Sequence[Step], op: Op
) -> Op | None:
    """The op that first summed over the batch what `op` needs finished."""
    todo, seen = [v for v in op.reads if states[v].kind in (LATE, SUM)], set[int]()
    while todo:
        value = todo.pop(0)
        maker = facts.maker.get(value)
        if maker is None or value in seen:
            continue
        seen.add(value)
        operands = maker.reads
        if states[value].kind == SUM and any(states[v].position for v in operands):
            return maker
        todo += [v for v in operands if states[v].kind in (LATE, SUM)]
    return None


# --- what moves out of the loop ----------------------------------------------------------------


def _move_after(facts: Facts, states: Mapping[int, State], steps: Sequence[Step]) -> list[Step]:
    """Run once, after the loop, what only the update uses: less work, never more to carry over."""
    graph = facts.graph
    moved = list(steps)
    # Who still uses a value inside the loop, or before it.
    busy: set[int] = {s for state in states.values() for s in state.scale}
    crossing = set(graph.returned)
    for op in reversed(graph.ops):
        step = moved[op.index]
        if (
            step.runs != AFTER
            and not busy.intersection(op.outputs)
            and _movable(graph, op, step, states, crossing)
        ):
            step = moved[op.index] = Step(AFTER, tuple(State(LATE) for _ in op.outputs))
        if step.runs == AFTER:
            crossing.update(op.reads)
        else:
            busy.update(op.reads)
    return moved


def _movable(
    graph: OpGraph, op: Op, step: Step, states: Mapping[int, State], crossing: set[int]
) -> bool:
    operands = op.reads
    kinds = {states[v].kind for v in operands}
    if step.runs == BEFORE:
        used = crossing.intersection(op.outputs)
        return bool(used) and (bool(step.uses) or kinds <= {ONCE, LATE})
    if SPLIT in kinds or not kinds & {SUM, SAME} or any(s.kind == SPLIT for s in step.outs):
        return False
    fresh = {v for v in operands if states[v].kind in (SUM, SAME) and v not in crossing}
    grown = sum(graph.values[v].nbytes for v in sorted(fresh))
    return grown <= sum(graph.values[v].nbytes for v in op.outputs if v in crossing)


def _once_around(graph: OpGraph, regions: Sequence[str]) -> list[Step]:
    """One micro-batch: its forward and backward are the loop, whatever follows them comes after."""
    after: set[int] = set()
    steps = []
    for op, region in zip(graph.ops, regions, strict=True):
        looped = region in (FORWARD, BACKWARD) and after.isdisjoint(op.reads) and not op.effects
        outs, uses = tuple(State(ONCE) for _ in op.outputs), tuple(Use() for _ in op.inputs)
        steps.append(Step(LOOP if looped else AFTER, outs, uses if looped else ()))
        if not looped:
            after.update(op.outputs)
    return steps


# --- regions -----------------------------------------------------------------------------------


def outermost_transform(scope: str) -> str:
    """`jvp`, `transpose` or nothing: `jvp(transpose(jvp()))` is forward work of the outer grad."""
    found = _TRANSFORM.search(scope)
    return found.group(1) if found else ""


def _regions(facts: Facts, steps: Sequence[Step], whole: frozenset[int]) -> list[str]:
    graph = facts.graph
    transposed = {
        v for op in graph.ops if outermost_transform(op.scope) == "transpose" for v in op.outputs
    }
    after_backward = descendants(graph, sorted(transposed))
    state = {entry.tied_output for entry in graph.inputs}
    roots = {
        o
        for number, o in enumerate(graph.outputs)
        if number not in state and not isinstance(o, Literal) and o not in after_backward
    }
    ahead = _ancestors(graph, roots)
    regions = []
    for op in graph.ops:
        transform = outermost_transform(op.scope)
        outs = set(op.outputs)
        if outs & facts.on_batch and _before_all(facts, op, steps[op.index], whole):
            region = PROLOGUE
        elif outs & ahead or transform == "jvp":
            region = FORWARD
        elif transform == "transpose" or steps[op.index].runs == LOOP:
            region = BACKWARD
        else:
            region = UPDATE
        regions.append(region)
    return regions


def _before_all(facts: Facts, op: Op, step: Step, whole: frozenset[int]) -> bool:
    """Whether the op makes a whole-batch value without a parameter, for the loop to use."""
    if facts.count == 1 or not all(facts.free(v) for v in op.outputs):
        return False
    return step.runs == BEFORE or whole.issuperset(op.outputs)


def _ancestors(graph: OpGraph, roots: set[int]) -> set[int]:
    found = set(roots)
    for op in reversed(graph.ops):
        if found.intersection(op.outputs):
            found.update(op.reads)
    return found
