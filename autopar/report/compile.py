"""Compiling a planned program, and the one-device function it stands for, without the devices.

Both are exported for the CPU as flat functions of arrays and compiled by a child process that has
as many virtual devices as the mesh has: this process may have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.export
from jax.extend.core import jaxpr_as_fun

from autopar.lower.boundary import program_forms
from autopar.lower.program import Program
from autopar.lower.spmd import abstract_mesh, form_avals, jit_program
from autopar.report.compile_child import CompiledText, compile_text
from autopar.rules.rule import Rule


def compile_program(
    program: Program, rules: Sequence[Rule], *, timeout: float, xla_flags: Sequence[str] = ()
) -> CompiledText:
    """Compile the planned program for as many virtual CPU devices as its mesh has.

    Args:
        program: what runs.
        rules: the rules of its ops.
        timeout: seconds until the child is killed.
        xla_flags: more XLA flags for the child.

    Raises:
        AuditError: the child failed, or did not end in time.
    """
    mesh = abstract_mesh(program.mesh)
    exported = export_flat(jit_program(program, rules, mesh), boundary_avals(program))
    donated = tuple(i for i, entry in enumerate(program.graph.inputs) if entry.donated)
    return compile_text(
        exported, mesh=program.mesh.axes, timeout=timeout, donate=donated, xla_flags=xla_flags
    )


def compile_single(jaxpr: Any, *, timeout: float, xla_flags: Sequence[str] = ()) -> CompiledText:
    """Compile a traced function, as a user would run it, for one device.

    Args:
        jaxpr: the ClosedJaxpr of `trace.jaxpr.TracedFunction.jaxpr`.
        timeout: seconds until the child is killed.
        xla_flags: more XLA flags for the child.

    Raises:
        AuditError: the child failed, or did not end in time.
    """
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jaxpr.in_avals]
    exported = export_flat(jax.jit(jaxpr_as_fun(jaxpr)), avals)
    return compile_text(exported, mesh=(("x", 1),), timeout=timeout, xla_flags=xla_flags)


def export_flat(jitted: Any, avals: Sequence[jax.ShapeDtypeStruct]) -> bytes:
    """The portable program of a jitted flat function, for the CPU."""
    return bytes(jax.export.export(jitted, platforms=["cpu"])(*avals).serialize())


def boundary_avals(program: Program) -> list[jax.ShapeDtypeStruct]:
    """Global shapes of the flat inputs with their shardings on the abstract mesh."""
    forms, _ = program_forms(program)
    return form_avals(forms, abstract_mesh(program.mesh))
