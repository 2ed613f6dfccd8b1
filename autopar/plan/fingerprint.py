"""Whether a plan is for this very function: equations, wiring, shapes and JAX version."""

from __future__ import annotations

import hashlib
from typing import Protocol

import jax

from autopar.errors import PlanError
from autopar.ir.graph import Op, OpGraph
from autopar.ir.text import params_text, short_type, wires_text
from autopar.plan.plan import Boundary


class Identified(Protocol):
    """A plan that knows for which function it was made; see plan.plan.FrozenPlan."""

    @property
    def function(self) -> str:
        """Its name."""

    @property
    def jax_version(self) -> str:
        """That traced it."""

    @property
    def fingerprint(self) -> str:
        """Of its equations."""

    @property
    def signatures(self) -> tuple[str, ...]:
        """Per op, what it is."""

    @property
    def inputs(self) -> tuple[Boundary, ...]:
        """Its argument leaves and closed-over arrays."""


def op_signature(graph: OpGraph, op: Op) -> str:
    """`mul f32[4] f32[4] -> f32[4] #1f3a`, the mark being a digest of the parameters."""
    ins = " ".join(short_type(graph.shape_of(o), graph.dtype_of(o)) for o in op.inputs)
    outs = " ".join(short_type(graph.values[v].shape, graph.values[v].dtype) for v in op.outputs)
    params = params_text(op.params)
    mark = f" #{hashlib.sha256(params.encode()).hexdigest()[:4]}" if params else ""
    return f"{op.name} {ins} -> {outs}{mark}"


def signatures(graph: OpGraph) -> tuple[str, ...]:
    """Per op, its signature."""
    return tuple(op_signature(graph, op) for op in graph.ops)


def fingerprint(graph: OpGraph) -> str:
    """A digest of everything that decides what the function computes on given inputs."""
    digest = hashlib.sha256(f"jax {jax.__version__}\n".encode())
    for entry in graph.inputs:
        value = graph.values[entry.value]
        digest.update(f"in {short_type(value.shape, value.dtype)} {entry.name}\n".encode())
    for op in graph.ops:
        wires = wires_text(op.inputs)
        digest.update(f"{op.name} {wires} {params_text(op.params)} {op.outputs}\n".encode())
    digest.update(f"out {wires_text(graph.outputs)}\n".encode())
    return digest.hexdigest()


def check_fingerprint(plan: Identified, graph: OpGraph) -> None:
    """Refuse a plan of another function, naming the first difference.

    Raises:
        PlanError: with the equation, what the plan has and what the function has.
    """
    if plan.fingerprint == fingerprint(graph):
        return
    raise PlanError(
        f"the plan of {plan.function!r} is not for this function",
        where=_place(plan, graph),
        got=_difference(plan, graph),
        why="a plan holds decisions about every equation of one traced function",
        remedy="make a new plan: the code, the shapes or the JAX version changed",
    )


def _first(plan: Identified, graph: OpGraph) -> int:
    now = signatures(graph)
    for index, (old, new) in enumerate(zip(plan.signatures, now, strict=False)):
        if old != new:
            return index
    return min(len(plan.signatures), len(now))


def _place(plan: Identified, graph: OpGraph) -> str:
    index = _first(plan, graph)
    return graph.ops[index].source if index < len(graph.ops) else ""


def _difference(plan: Identified, graph: OpGraph) -> str:
    if plan.jax_version != jax.__version__:
        return f"planned with JAX {plan.jax_version}, running {jax.__version__}"
    then = [(b.name, b.shape, b.dtype) for b in plan.inputs]
    values = [graph.values[entry.value] for entry in graph.inputs]
    names = [entry.name for entry in graph.inputs]
    now = [(n, v.shape, str(v.dtype)) for n, v in zip(names, values, strict=True)]
    for old, new in zip(then, now, strict=False):
        if old != new:
            return f"argument {new[0]} {new[2]}{list(new[1])}, planned {old[2]}{list(old[1])}"
    if len(then) != len(now):
        return f"{len(now)} argument leaves, planned {len(then)}"
    index, current = _first(plan, graph), signatures(graph)
    if index == len(current) == len(plan.signatures):
        return "the same equations wired differently, or other constants"
    old_op = plan.signatures[index] if index < len(plan.signatures) else "the end"
    new_op = current[index] if index < len(current) else "the end"
    return f"equation {index} is {new_op!r}, planned {old_op!r}"
