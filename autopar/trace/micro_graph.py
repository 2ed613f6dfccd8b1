"""A divided step as one graph: the ops of a single micro-batch between those that run once.

The loop over micro-batches is the same equations on smaller shapes, with the micro-batch's number
as a scalar input. So the step is traced again with one micro-batch in place of the loop::

    before   whole values that no micro-batch changes            once a step
    loop     one micro-batch; `index` says which                  `count` times
    after    results and updates from what the loop gathered      once a step

What crosses from the loop into `after` is gathered over the micro-batches: `sum`med up, `stack`ed
(the loop makes it with a leading dim of `count`, of which one micro-batch fills one entry), or the
`last` one is as good as any. For one micro-batch the graph is an ordinary one: rules, solver and
lowering need to know no more of time than how often each op runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from autopar.ir.graph import Literal, OpGraph
from autopar.rules.registry import rules_of
from autopar.rules.rule import Eqn, Local, Rule, make_rule
from autopar.trace.backward import UPDATE, MicroSplit
from autopar.trace.batch import AFTER, BEFORE, LOOP, SPLIT, SUM, Position
from autopar.trace.build import build_graph
from autopar.trace.jaxpr import Leaf, TracedFunction
from autopar.trace.microbatch import Env, bind_op, finish, micro_join, run_local, run_whole
from autopar.trace.placement import descendants

SUMMED, STACKED, LAST = "sum", "stack", "last"

_SCOPE = re.compile(r"ap_(before|loop|after)_(\d+)\b")


@dataclass(frozen=True, slots=True)
class Role:
    """What an input of a micro graph is.

    Attributes:
        kind: `index` (int32 scalar), `whole` (a leaf of the step, or a closed-over array), `micro`
            (one micro-batch of a leaf), or `constant` (an array that tracing again closed over).
        leaf: for `whole` and `micro` the input of the step's graph; for `constant` its position.
        position: for `micro`, how the slice is cut.
    """

    kind: str
    leaf: int = -1
    position: Position | None = None


@dataclass(frozen=True, slots=True)
class MicroGraph:
    """A step with its loop over micro-batches told by phases.

    Attributes:
        graph: one micro-batch of the loop, and what runs once around it.
        count: number of micro-batches.
        roles: per graph input.
        phases: per op, BEFORE, LOOP or AFTER.
        regions: per op, prologue, forward, backward or update.
        gathered: `(value, SUMMED | STACKED | LAST)` of values made in the loop and needed after it.
        constants: arrays of the `constant` inputs.
        free: values made in the loop from the batch alone, without a parameter.
    """

    graph: OpGraph
    count: int
    roles: tuple[Role, ...]
    phases: tuple[str, ...]
    regions: tuple[str, ...]
    gathered: tuple[tuple[int, str], ...]
    constants: tuple[Any, ...]
    free: frozenset[int]


def micro_graph(split: MicroSplit) -> MicroGraph:
    """Trace a divided step again, with one micro-batch in place of its loop."""
    leaves, roles = _inputs(split)
    entries = {entry.value for entry in split.graph.inputs}
    crossing = [value for value in split.crossing if value not in entries]
    shapes = [jax.ShapeDtypeStruct(leaf.aval.shape, leaf.aval.dtype) for leaf in leaves]

    def step(index: Any, *arrays: Any) -> list[Any]:
        return _run(split, roles, crossing, index, arrays)

    jaxpr = jax.make_jaxpr(step)(jax.ShapeDtypeStruct((), jnp.int32), *shapes[1:])
    names = [*split.graph.output_names, *(f"v{value}" for value in crossing)]
    outputs = [
        Leaf("", name, name, aval) for name, aval in zip(names, jaxpr.out_avals, strict=True)
    ]
    traced = TracedFunction(
        split.graph.name, jaxpr, tuple(leaves), tuple(outputs), None, None, frozenset()
    )
    ties = [
        split.graph.inputs[role.leaf].tied_output if role.kind == "whole" else -1 for role in roles
    ]
    built = build_graph(traced, ties=ties)
    graph, origins, phases = _originals(split, built.graph)
    count = len(split.graph.outputs)
    ends = zip(crossing, graph.outputs[count:], strict=True)
    kinds = {end: _gathering(split, value) for value, end in ends if not isinstance(end, Literal)}
    made = {
        v for op, phase in zip(graph.ops, phases, strict=True) if phase == LOOP for v in op.outputs
    }
    graph = replace(graph, outputs=graph.outputs[:count], output_names=graph.output_names[:count])
    return MicroGraph(
        graph=graph,
        count=split.count,
        roles=(*roles, *(Role("constant", n) for n in range(len(built.hidden)))),
        phases=phases,
        regions=tuple(split.placed[o].region if o >= 0 else UPDATE for o in origins),
        gathered=tuple((v, kind) for v, kind in kinds.items() if v in made),
        constants=built.hidden,
        free=_free(split, graph, roles, made),
    )


def micro_rules(micro: MicroGraph) -> tuple[Rule, ...]:
    """The rules of its ops; what is stacked is never split over the micro-batches."""
    rules = list(rules_of(micro.graph))
    stacked = {value for value, kind in micro.gathered if kind == STACKED}
    for op in micro.graph.ops:
        if stacked.intersection(op.outputs):
            shape = micro.graph.values[op.outputs[0]].shape
            names = [f"d{dim}" for dim in range(len(shape) - 1)]
            eqn = Eqn(
                op.name,
                op.params,
                (shape[1:],),
                (shape,),
                (micro.graph.dtype_of(op.inputs[0]),),
                (micro.graph.values[op.outputs[0]].dtype,),
            )
            rules[op.index] = make_rule(eqn, [names], [[".", *names]], bind=_bind_stack)
    return tuple(rules)


def _bind_stack(local: Local) -> tuple[Any, ...]:
    (block,) = local.operands
    return (jnp.broadcast_to(block, local.out_shape()),)


def _inputs(split: MicroSplit) -> tuple[list[Leaf], tuple[Role, ...]]:
    """Leaves and roles of the micro graph's inputs: the index, the step's own, the slices."""
    graph = split.graph
    index = jax.ShapeDtypeStruct((), jnp.int32)
    leaves, roles = [Leaf("", "", "index", index)], [Role("index")]
    rows = {value for value, _ in split.batch}
    for number, entry in enumerate(graph.inputs):
        value = graph.values[entry.value]
        aval = jax.ShapeDtypeStruct(value.shape, value.dtype)
        donated = entry.donated and entry.value not in rows
        leaves.append(Leaf("", entry.name, entry.name, aval, donated))
        roles.append(Role("whole", number))
    for number, entry in enumerate(graph.inputs):
        state = split.states[entry.value]
        if entry.value not in rows or state.kind != SPLIT or state.position is None:
            continue
        value, at = graph.values[entry.value], state.position
        shape = list(value.shape)
        shape[at.dim] //= split.count
        aval = jax.ShapeDtypeStruct(tuple(shape), value.dtype)
        leaves.append(Leaf("", entry.name, f"{entry.name}@micro", aval))
        roles.append(Role("micro", number, at))
    return leaves, tuple(roles)


def _gathering(split: MicroSplit, value: int) -> str:
    kind = split.states[value].kind
    return STACKED if kind == SPLIT else SUMMED if kind == SUM else LAST


def _run(
    split: MicroSplit,
    roles: Sequence[Role],
    crossing: Sequence[int],
    index: Any,
    arrays: Sequence[Any],
) -> list[Any]:
    """Results of the step, then what is gathered, with one micro-batch for the loop."""
    graph = split.graph
    entries = [entry.value for entry in graph.inputs]
    whole: Env = {}
    env: Env = {}
    for role, array in zip(roles[1:], arrays, strict=True):
        (env if role.kind == "micro" else whole)[entries[role.leaf]] = array
    for op in split.ops(BEFORE):
        with jax.named_scope(f"ap_{BEFORE}_{op.index}"):
            whole.update(zip(op.outputs, run_whole(split, op, whole, index), strict=True))
    env = {**whole, **env}
    for op in split.ops(LOOP):
        with jax.named_scope(f"ap_{LOOP}_{op.index}"):
            env.update(zip(op.outputs, run_local(split, op, env, index), strict=True))
    maker = {value: op.index for op in graph.ops for value in op.outputs}
    ends = []
    for value in crossing:
        whole[value] = env[value]
        state = split.states[value]
        if state.kind == SPLIT:
            assert state.position is not None
            with jax.named_scope(f"ap_{LOOP}_{maker[value]}"):
                stacked = jnp.broadcast_to(env[value], (split.count, *env[value].shape))
            with jax.named_scope(f"ap_{AFTER}_{maker[value]}"):
                whole[value] = micro_join(stacked, state.position)
            ends.append(stacked)
        else:
            ends.append(env[value])
    finished = dict.fromkeys(entries, True)
    for op in split.ops(AFTER):
        with jax.named_scope(f"ap_{AFTER}_{op.index}"):
            operands = [finish(split, whole, finished, operand) for operand in op.inputs]
            whole.update(zip(op.outputs, bind_op(op, operands), strict=True))
    results = []
    for operand in graph.outputs:
        place = maker.get(operand, -1) if not isinstance(operand, Literal) else -1
        with jax.named_scope(f"ap_{AFTER}_{place}" if place >= 0 else "ap_result"):
            results.append(finish(split, whole, finished, operand))
    return [*results, *ends]


def _originals(split: MicroSplit, graph: OpGraph) -> tuple[OpGraph, list[int], tuple[str, ...]]:
    """Give each op the source and scope of the op it was traced from; its index and phase too."""
    ops, origins, phases = [], [], []
    for op in graph.ops:
        match = _SCOPE.search(op.scope)
        origin = int(match[2]) if match else -1
        first = split.graph.ops[origin] if match else op
        ops.append(replace(op, source=first.source, scope=first.scope if match else ""))
        origins.append(origin)
        phases.append(match[1] if match else AFTER)
    return replace(graph, ops=tuple(ops)), origins, tuple(phases)


def _free(
    split: MicroSplit, graph: OpGraph, roles: Sequence[Role], made: set[int]
) -> frozenset[int]:
    """Values of the loop that depend on no parameter: a floating input that is not the batch."""
    rows = {value for value, _ in split.batch}
    entries = split.graph.inputs
    params = [
        entry.value
        for entry, role in zip(graph.inputs, roles, strict=False)
        if role.kind == "whole"
        and entries[role.leaf].value not in rows
        and getattr(graph.values[entry.value].dtype, "kind", "?") in "fcV"
    ]
    return frozenset(made) - descendants(graph, params)
