"""The explicit lowering: the program as one function of local blocks inside `jax.shard_map`.

Every collective is the plan's own; XLA only compiles. `check_vma` is off because partial sums
have no type there: our verifier and the audit take its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autopar.ir.graph import Literal
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.lower.boundary import Outside, program_forms
from autopar.lower.collectives import run_finish, run_step
from autopar.lower.program import Program, Reshard, RunOp, literal_steps
from autopar.rules.rule import Local, Rule

LocalFunction = Callable[..., tuple[Any, ...]]
"""Local blocks of the inputs to local blocks of the outputs."""

AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


def partition_spec(sharding: Sharding) -> PartitionSpec:
    """The boundary form of a sharding without pending sums."""
    assert not sharding.partial, sharding
    entries = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in sharding.dims]
    return PartitionSpec(*entries)


def jax_mesh(mesh: Mesh, devices: Sequence[Any]) -> jax.sharding.Mesh:
    """The logical mesh over real devices, row-major, with Auto axes."""
    grid = np.array(devices, dtype=object).reshape(mesh.sizes)
    return jax.sharding.Mesh(grid, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.names))


def abstract_mesh(mesh: Mesh) -> jax.sharding.AbstractMesh:
    """The logical mesh without devices."""
    auto = (AxisType.Auto,) * len(mesh.names)
    return jax.sharding.AbstractMesh(mesh.sizes, mesh.names, axis_types=auto)


def local_function(program: Program, rules: Sequence[Rule]) -> LocalFunction:
    """The function that every device runs on its own blocks."""

    def run(*blocks: Any) -> tuple[Any, ...]:
        graph = program.graph
        held: dict[tuple[int, Sharding], Any] = {}
        for entry, sharding, block in zip(graph.inputs, program.inputs, blocks, strict=True):
            held[entry.value, sharding] = block
        for step in program.steps:
            if isinstance(step, Reshard):
                value = held[step.value, step.source]
                held[step.value, step.target] = _reshard(value, step, program.mesh)
            else:
                _run_op(program, step, rules[step.op], held)
        return tuple(
            jnp.asarray(operand.value, operand.dtype)
            if isinstance(operand, Literal)
            else held[operand, sharding]
            for operand, sharding in zip(graph.outputs, program.outputs, strict=True)
        )

    return run


def _reshard(value: Any, reshard: Reshard, mesh: Mesh) -> Any:
    number = reshard.first
    for step in reshard.steps:
        value = run_step(value, step, mesh, f"ap{number}")
        number += step.kind not in ("slice", "mask")
    return value


def _run_op(
    program: Program, step: RunOp, rule: Rule, held: dict[tuple[int, Sharding], Any]
) -> None:
    graph, op = program.graph, program.graph.ops[step.op]
    operands = []
    for operand, sharding in zip(op.inputs, step.strategy.ins, strict=True):
        if isinstance(operand, Literal):
            value: Any = jnp.asarray(operand.value, operand.dtype)
            for cut in literal_steps(len(operand.shape), sharding):
                value = run_step(value, cut, program.mesh, "")
        else:
            value = held[operand, sharding]
        operands.append(value)
    local = Local(
        op.primitive,
        op.params,
        tuple(operands),
        tuple(graph.shape_of(operand) for operand in op.inputs),
        tuple(graph.values[value].shape for value in op.outputs),
        step.strategy.ins,
        step.strategy.outs,
        program.mesh,
        jax.lax.axis_index,
    )
    results = list(rule.bind(local))
    for offset, finish in enumerate(step.strategy.finishes):
        tag = f"ap{step.first + offset}"
        results[finish.output] = run_finish(results[finish.output], finish, tag)
    for value, sharding, result in zip(op.outputs, step.strategy.outs, results, strict=True):
        held[value, sharding] = result


def spmd_function(
    program: Program, rules: Sequence[Rule], mesh: AnyMesh
) -> Callable[..., tuple[Any, ...]]:
    """The program on global arrays: flat inputs (hidden ones last) to flat outputs."""
    local = local_function(program, rules)
    ins, outs = program_forms(program)

    def run(*blocks: Any) -> tuple[Any, ...]:
        results = local(*(form.enter(block) for form, block in zip(ins, blocks, strict=True)))
        return tuple(form.leave(result) for form, result in zip(outs, results, strict=True))

    return map_blocks(run, mesh, ins, outs)


def map_blocks(
    run: LocalFunction, mesh: AnyMesh, ins: Sequence[Outside], outs: Sequence[Outside]
) -> Callable[..., tuple[Any, ...]]:
    """A function of blocks, as one of global arrays in their outside forms."""
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=tuple(partition_spec(form.sharding) for form in ins),
        out_specs=tuple(partition_spec(form.sharding) for form in outs),
        check_vma=False,
    )


def named_shardings(shardings: Sequence[Sharding], mesh: AnyMesh) -> tuple[NamedSharding, ...]:
    """Boundary shardings as JAX wants them."""
    return tuple(NamedSharding(mesh, partition_spec(s)) for s in shardings)


def form_avals(forms: Sequence[Outside], mesh: AnyMesh) -> list[jax.ShapeDtypeStruct]:
    """Global shapes and shardings of arrays in their outside forms."""
    shardings = named_shardings([form.sharding for form in forms], mesh)
    return [
        jax.ShapeDtypeStruct(form.shape, form.dtype, sharding=sharding)
        for form, sharding in zip(forms, shardings, strict=True)
    ]


def jit_forms(
    function: Callable[..., Any],
    mesh: AnyMesh,
    ins: Sequence[Outside],
    outs: Sequence[Outside],
    donated: Sequence[int] = (),
) -> Any:
    """`jax.jit` of a function of global arrays in their outside forms."""
    return jax.jit(
        function,
        in_shardings=named_shardings([form.sharding for form in ins], mesh),
        out_shardings=named_shardings([form.sharding for form in outs], mesh),
        donate_argnums=tuple(donated),
    )


def jit_program(program: Program, rules: Sequence[Rule], mesh: AnyMesh) -> Any:
    """`jax.jit` of the program with its boundary shardings and the user's donation."""
    donated = tuple(i for i, entry in enumerate(program.graph.inputs) if entry.donated)
    return jit_forms(spmd_function(program, rules, mesh), mesh, *program_forms(program), donated)
