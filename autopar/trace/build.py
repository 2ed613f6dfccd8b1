"""From a jaxpr to an OpGraph: calls are inlined, dead ops dropped, closed-over arrays surface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.extend.core import Literal as JaxLiteral

from autopar._compat.calls import INLINED, REFUSED, REMAT, called_jaxpr
from autopar._compat.source import scope_of, user_source
from autopar.errors import TraceError
from autopar.ir.graph import Input, Literal, Op, Operand, OpGraph, Value
from autopar.ir.verify import verify_graph
from autopar.trace.jaxpr import Leaf, TracedFunction
from autopar.trace.ties import tie_state


@dataclass(frozen=True, slots=True)
class BuiltGraph:
    """A graph and the values of its hidden inputs (closed-over arrays), in order."""

    graph: OpGraph
    hidden: tuple[Any, ...]


@dataclass(slots=True)
class _Builder:
    """Collects values and ops; alive only inside `build_graph`."""

    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    hidden: list[Any] = field(default_factory=list)
    hidden_ids: dict[int, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    barrier: Any = None

    def new_value(self, aval: Any, name: str = "") -> int:
        self.values.append(Value(len(self.values), tuple(aval.shape), aval.dtype, name))
        return len(self.values) - 1

    def constant(self, array: Any) -> Operand:
        """A closed-over array: a literal if it is a scalar number, else a hidden input."""
        if np.ndim(array) == 0 and isinstance(array, np.ndarray | np.generic | float | int):
            return Literal(array, (), np.asarray(array).dtype)
        if id(array) not in self.hidden_ids:
            aval = jax.typeof(array)
            self.hidden_ids[id(array)] = self.new_value(aval, f"const/{len(self.hidden)}")
            self.hidden.append(array)
        return self.hidden_ids[id(array)]

    def literal(self, atom: Any) -> Operand:
        if np.ndim(atom.val) > 0:
            return self.constant(atom.val)
        return Literal(atom.val, (), atom.aval.dtype)


Env = dict[Any, Operand]


def _read(builder: _Builder, env: Env, atom: Any) -> Operand:
    return builder.literal(atom) if isinstance(atom, JaxLiteral) else env[atom]


def _walk(
    builder: _Builder, closed: ClosedJaxpr, args: Sequence[Operand], scope: str, source: str
) -> list[Operand]:
    """Append the equations of `closed` applied to `args`; return its results."""
    env: Env = dict(zip(closed.jaxpr.constvars, map(builder.constant, closed.consts), strict=True))
    env.update(zip(closed.jaxpr.invars, args, strict=True))
    for eqn in closed.jaxpr.eqns:
        inputs = [_read(builder, env, atom) for atom in eqn.invars]
        own = scope_of(eqn.source_info)
        here = f"{scope}/{own}" if scope and own else scope or own
        line = user_source(eqn.source_info) or source
        results = _equation(builder, eqn, inputs, here, line)
        env.update(zip(eqn.outvars, results, strict=True))
    return [_read(builder, env, atom) for atom in closed.jaxpr.outvars]


def _equation(
    builder: _Builder, eqn: Any, inputs: Sequence[Operand], scope: str, source: str
) -> Sequence[Operand]:
    name = eqn.primitive.name
    inner = called_jaxpr(eqn.params) if name in INLINED | REMAT else None
    if inner is None:
        outputs = tuple(builder.new_value(var.aval) for var in eqn.outvars)
        if name in REFUSED:
            raise TraceError(
                f"{REFUSED[name]} inside the function cannot be planned",
                where=source,
                why="it has decided already how it runs on a mesh",
                remedy="parallelise the whole function, with plain JAX inside",
            )
        _append(builder, eqn.primitive, eqn.params, inputs, outputs, (source, scope))
        if eqn.effects:
            builder.ops[-1] = replace(builder.ops[-1], effects=True)
            builder.notes.append(f"{name} runs once on every device (at {source})")
        return outputs
    if name in REMAT:
        if eqn.params.get("prevent_cse", True) and eqn.params.get("differentiated", False):
            inputs = _barrier(builder, inputs, scope, source)
        return _walk(builder, inner, inputs, scope, source)
    label = eqn.params.get("name")
    scope = f"{scope}/{label}" if isinstance(label, str) and label and scope else scope or ""
    return _walk(builder, inner, inputs, scope, source)


def _barrier(
    builder: _Builder, inputs: Sequence[Operand], scope: str, source: str
) -> list[Operand]:
    """Keep a recomputed body apart from the forward it repeats, or XLA would merge them."""
    # One barrier an operand: each may then have a layout of its own, which a joint one forbids.
    fresh: list[Operand] = []
    for operand in inputs:
        if isinstance(operand, Literal):
            fresh.append(operand)
            continue
        output = builder.new_value(builder.values[operand])
        _append(builder, builder.barrier, {}, (operand,), (output,), (source, scope))
        fresh.append(output)
    return fresh


def _append(
    builder: _Builder,
    primitive: Any,
    params: Mapping[str, Any],
    inputs: Sequence[Operand],
    outputs: tuple[int, ...],
    place: tuple[str, str],
) -> None:
    index = len(builder.ops)
    builder.ops.append(Op(index, primitive, dict(params), tuple(inputs), outputs, *place))


def _barrier_primitive() -> Any:
    """The primitive behind `jax.lax.optimization_barrier`, which has no public name."""
    jaxpr = jax.make_jaxpr(jax.lax.optimization_barrier)(1.0)
    return jaxpr.jaxpr.eqns[0].primitive


def build_graph(
    traced: TracedFunction,
    *,
    state_argnums: Sequence[int] | None = None,
    ties: Sequence[int] | None = None,
) -> BuiltGraph:
    """Build and verify the graph of a traced function.

    Args:
        traced: the function.
        state_argnums: which arguments' leaves may be tied to results; all if None.
        ties: per argument leaf the result it is tied to, or -1, where that is known already.
    """
    builder = _Builder(barrier=_barrier_primitive())
    args = [builder.new_value(leaf.aval, leaf.name) for leaf in traced.inputs]
    outputs = _walk(builder, traced.jaxpr, args, "", "")
    if ties is None or len(ties) != len(traced.inputs):
        ties = tie_state(traced.inputs, traced.outputs, state_argnums)
    graph = OpGraph(
        name=traced.name,
        values=tuple(builder.values),
        inputs=_inputs(args, traced.inputs, ties, builder),
        num_hidden=len(builder.hidden),
        ops=tuple(builder.ops),
        outputs=tuple(outputs),
        output_names=tuple(leaf.name for leaf in traced.outputs),
        notes=tuple(builder.notes),
    )
    graph = drop_dead(graph)
    verify_graph(graph)
    return BuiltGraph(graph, tuple(builder.hidden))


def _inputs(
    args: Sequence[int], leaves: Sequence[Leaf], ties: Sequence[int], builder: _Builder
) -> tuple[Input, ...]:
    given = [
        Input(value, leaf.name, leaf.donated, tie)
        for value, leaf, tie in zip(args, leaves, ties, strict=True)
    ]
    hidden = [Input(value, builder.values[value].name) for value in builder.hidden_ids.values()]
    return (*given, *hidden)


def drop_dead(graph: OpGraph) -> OpGraph:
    """Remove ops whose results nobody uses; renumber ops and values."""
    live = set(graph.returned)
    kept: list[Op] = []
    for op in reversed(graph.ops):
        if op.effects or live.intersection(op.outputs):
            kept.append(op)
            live.update(op.reads)
    kept.reverse()
    order = [entry.value for entry in graph.inputs] + [v for op in kept for v in op.outputs]
    number = {old: new for new, old in enumerate(order)}

    def rename(operand: Operand) -> Operand:
        return operand if isinstance(operand, Literal) else number[operand]

    ops = tuple(
        replace(
            op,
            index=index,
            inputs=tuple(rename(o) for o in op.inputs),
            outputs=tuple(number[v] for v in op.outputs),
        )
        for index, op in enumerate(kept)
    )
    return replace(
        graph,
        values=tuple(replace(graph.values[old], id=new) for new, old in enumerate(order)),
        inputs=tuple(replace(entry, value=number[entry.value]) for entry in graph.inputs),
        ops=ops,
        outputs=tuple(rename(o) for o in graph.outputs),
    )
