"""Run a divided step: the same equations, over time in place of space.

A micro-batch is a position on the one axis of a pseudo mesh. Every op of the loop is bound by its
factor rule on local shapes, exactly as a device would bind it; the sums that devices would reduce
are added up from one micro-batch to the next. So a mean keeps its traced `1/B`, and iota, positions
and random bits take the micro-batch's offset from their block.

This is the plain interpreter: one device, a Python loop, each equation bound as it comes. It is the
oracle of the compiled loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.ir.graph import Literal, Op, Operand
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding, replicated
from autopar.rules.rule import Local
from autopar.trace.backward import MicroSplit
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
    Position,
    State,
    Use,
)

MICRO = "micro"
"""The pseudo axis: its size is the number of micro-batches, its index the micro-batch."""

Env = dict[int, Any]
Divided = MicroSplit | Body


def micro_slice(array: Any, position: Position, count: int, index: Any) -> Any:
    """The slice of a whole array that belongs to micro-batch `index`."""
    shape = array.shape
    outer = position.outer(shape, count)
    before, after = shape[: position.dim], shape[position.dim + 1 :]
    cut = jnp.reshape(array, (*before, outer, count, position.inner, *after))
    part = jax.lax.dynamic_index_in_dim(cut, index, len(before) + 1, keepdims=False)
    return jnp.reshape(part, (*before, outer * position.inner, *after))


def micro_join(stacked: Any, position: Position) -> Any:
    """The whole array from its micro-batches' slices `[count, ...]`: undoes `micro_slice`."""
    count, *shape = stacked.shape
    dim, inner = position.dim, position.inner
    cut = jnp.reshape(stacked, (count, *shape[:dim], shape[dim] // inner, inner, *shape[dim + 1 :]))
    moved = jnp.moveaxis(cut, 0, dim + 1)
    return jnp.reshape(moved, (*shape[:dim], count * shape[dim], *shape[dim + 1 :]))


def run_microbatched(split: MicroSplit, args: Sequence[Any]) -> list[Any]:
    """Run the step on whole arrays, micro-batch by micro-batch.

    Args:
        split: the divided step.
        args: the graph's inputs in order: argument leaves, then closed-over arrays.

    Returns:
        The results in flat order, whole.
    """
    whole: Env = dict(zip((e.value for e in split.graph.inputs), args, strict=True))
    for op in split.ops(BEFORE):
        _store(op, whole, run_whole(split, op, whole, 0))
    if any(placed.runs == LOOP for placed in split.placed):
        whole.update(_run_loop(split, whole))
    finished = dict.fromkeys((e.value for e in split.graph.inputs), True)
    for op in split.ops(AFTER):
        operands = [finish(split, whole, finished, operand) for operand in op.inputs]
        _store(op, whole, bind_op(op, operands))
    return [finish(split, whole, finished, operand) for operand in split.graph.outputs]


def _store(op: Op, env: Env, results: Sequence[Any]) -> None:
    env.update(zip(op.outputs, results, strict=True))


def bind_op(op: Op, operands: Sequence[Any]) -> Sequence[Any]:
    """The op on whole arrays; always a sequence of results."""
    results = op.primitive.bind(*operands, **op.primitive.get_bind_params(dict(op.params)))
    return results if op.primitive.multiple_results else (results,)


def _literal(literal: Literal) -> Any:
    # Of numpy: it stays a literal where the ops are traced again.
    return np.asarray(literal.value, literal.dtype)


def run_whole(split: Divided, op: Op, env: Env, index: Any) -> Sequence[Any]:
    """Run an op before the loop: operands as they are, or 1 for a scalar that is still to come."""
    uses = split.placed[op.index].uses or (Use(),) * len(op.inputs)
    pairs = zip(op.inputs, uses, strict=True)
    return bind_op(op, [take_operand(split, env, operand, use, index) for operand, use in pairs])


def take_operand(split: Divided, env: Env, operand: Operand, use: Use, index: Any) -> Any:
    """An operand as an op of the loop takes it."""
    if isinstance(operand, Literal):
        return _literal(operand)
    if use.kind == "one":
        return jnp.ones((), split.graph.values[operand].dtype)
    array = env[operand]
    if use.kind == "slice":
        assert use.position is not None
        return micro_slice(array, use.position, split.count, index)
    if use.kind == "mask":
        return jnp.where(index == 0, array, jnp.zeros_like(array))
    return array


def _run_loop(split: MicroSplit, whole: Env) -> Env:
    """All micro-batches; what crosses: sums added up, slices joined, constants of the last one."""
    kept: dict[int, list[Any]] = {value: [] for value in split.crossing}
    ops = split.ops(LOOP)
    for index in range(split.count):
        env = dict(whole)
        for value, _ in split.batch:
            state = split.states[value]
            if state.kind == SPLIT and state.position is not None:
                env[value] = micro_slice(whole[value], state.position, split.count, index)
        for op in ops:
            _store(op, env, run_local(split, op, env, index))
        for value, parts in kept.items():
            _keep(split.states[value], parts, env[value])
    return {value: _joined(split, value, parts) for value, parts in kept.items()}


def _keep(state: State, parts: list[Any], array: Any) -> None:
    if state.kind == SPLIT or not parts:
        wide = state.kind == SUM and array.dtype in (jnp.bfloat16, jnp.float16)
        parts.append(array.astype(jnp.float32) if wide else array)
    elif state.kind == SUM:
        parts[0] = parts[0] + array


def _joined(split: MicroSplit, value: int, parts: Sequence[Any]) -> Any:
    state = split.states[value]
    if state.position is not None:
        return micro_join(jnp.stack(parts), state.position)
    return parts[0].astype(split.graph.values[value].dtype) if state.kind == SUM else parts[0]


def finish(split: MicroSplit, whole: Env, finished: dict[int, bool], operand: Operand) -> Any:
    """A value after the loop: with the scalars that were left out multiplied in."""
    if isinstance(operand, Literal):
        return _literal(operand)
    array = whole[operand]
    if operand not in finished:
        for scalar in split.states[operand].scale:
            factor = finish(split, whole, finished, scalar)
            array = array * jnp.asarray(factor, array.dtype)
        whole[operand] = array
        finished[operand] = True
    return array


def _run_scan(op: Op, body: Body, operands: Sequence[Any], index: Any) -> Sequence[Any]:
    """A scan in one micro-batch: its body is a graph whose ops run by their rules."""
    consts, carry = body.num_consts, body.num_consts + body.num_carry
    entries = [entry.value for entry in body.graph.inputs]

    def once(state: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        given = (*operands[:consts], *state, *slices, *body.hidden)
        env: Env = dict(zip(entries, given, strict=True))
        for inner, step in zip(body.graph.ops, body.placed, strict=True):
            run = run_whole if step.runs == BEFORE else run_local
            _store(inner, env, run(body, inner, env, index))
        pairs = zip(body.graph.outputs, body.ends, strict=True)
        results = [take_operand(body, env, operand, use, index) for operand, use in pairs]
        return results[: body.num_carry], results[body.num_carry :]

    last, stacked = jax.lax.scan(
        once,
        list(operands[consts:carry]),
        list(operands[carry:]),
        length=op.params["length"],
        reverse=op.params["reverse"],
        unroll=op.params["unroll"],
    )
    return [*last, *stacked]


def run_local(split: Divided, op: Op, env: Env, index: Any) -> Sequence[Any]:
    """One op in one micro-batch, by its rule."""
    graph, placed, rule = split.graph, split.placed[op.index], split.rules[op.index]
    operands = [
        take_operand(split, env, operand, use, index)
        for operand, use in zip(op.inputs, placed.uses, strict=True)
    ]
    if placed.body is not None:
        return _run_scan(op, placed.body, operands, index)
    in_shapes = tuple(graph.shape_of(operand) for operand in op.inputs)
    out_shapes = tuple(graph.values[value].shape for value in op.outputs)
    local = Local(
        op.primitive,
        op.params,
        tuple(operands),
        in_shapes,
        out_shapes,
        tuple(
            _used_as(split, operand, use, shape)
            for operand, use, shape in zip(op.inputs, placed.uses, in_shapes, strict=True)
        ),
        tuple(
            _sharding(state, shape) for state, shape in zip(placed.outs, out_shapes, strict=True)
        ),
        Mesh((MICRO,), (split.count,)),
        lambda axis: index,
    )
    return rule.bind(local)


def _used_as(split: Divided, operand: Operand, use: Use, shape: tuple[int, ...]) -> Sharding:
    if use.kind == "mask":
        return Sharding(((),) * len(shape), (MICRO,))
    if use.position is not None:
        return _sharding(State(SPLIT, use.position), shape)
    if isinstance(operand, Literal) or use.kind == "one":
        return replicated(len(shape))
    return _sharding(split.states[operand], shape)


def _sharding(state: State, shape: tuple[int, ...]) -> Sharding:
    """The state as a sharding over the pseudo axis."""
    if state.kind == SPLIT and state.position is not None:
        return replicated(len(shape)).with_dim(state.position.dim, (MICRO,))
    if state.kind == SUM:
        return Sharding(((),) * len(shape), (MICRO,))
    assert state.kind in (ONCE, SAME, LATE)
    return replicated(len(shape))
