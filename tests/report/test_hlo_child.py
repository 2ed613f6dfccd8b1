"""Compiling in a child process: what comes back, and what is said when nothing does."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.errors import AuditError
from autopar.report.compile_child import compile_text
from autopar.report.hlo import HloCollective, read_hlo

AXES = (("d", 2), ("x", 4))
TYPES = (AxisType.Auto, AxisType.Auto)
FLAGS = ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")
State = dict[str, jax.Array]


def program(mesh: Mesh | AbstractMesh) -> jax.stages.Wrapped:
    """A train-like step: ZeRO-3 over x, data parallel over d, each collective in its scope."""

    def local(w: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        def layer(carry: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            with jax.named_scope("ap1"):
                whole = jax.lax.all_gather(w, "x", axis=0, tiled=True)
            out = jnp.tanh(carry @ whole)
            with jax.named_scope("ap2"):
                part = jax.lax.psum_scatter(carry.T @ out, "x", tiled=True)
            return out, part

        out, parts = jax.lax.scan(layer, batch, w)
        with jax.named_scope("ap12"):
            parts = jax.lax.psum(parts, "d")
        with jax.named_scope("ap13"):
            loss = jax.lax.psum((out**2).sum(), ("d", "x"))
        return w - parts, loss

    def step(state: State, batch: jax.Array) -> tuple[State, jax.Array]:
        w, loss = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(None, "x"), P(("d", "x"))),
            out_specs=(P(None, "x"), P()),
            check_vma=False,
        )(state["w"], batch)
        return {"w": w, "steps": state["steps"] + 1}, loss

    return jax.jit(step, donate_argnums=0)


def shapes(
    mesh: Mesh | AbstractMesh,
) -> tuple[dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    def shape(dims: tuple[int, ...], dtype: jnp.dtype, *spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P(*spec)))

    state = {
        "w": shape((3, 16, 16), jnp.dtype("float32"), None, "x"),
        "steps": shape((), jnp.dtype("int32")),
    }
    return state, shape((32, 16), jnp.dtype("float32"), ("d", "x"))


def exported() -> bytes:
    mesh = AbstractMesh((2, 4), ("d", "x"), axis_types=TYPES)
    export = jax.export.export(program(mesh), platforms=["cpu"])
    return bytes(export(*shapes(mesh)).serialize())


def tagged(collective: HloCollective) -> tuple[Any, ...]:
    tags = tuple(re.findall(r"\bap\d+\b", " ".join(m.op_name for m in collective.members)))
    sizes = tuple(member.elements for member in collective.members)
    return (collective.kind, sizes, collective.dtype, collective.times, collective.groups, tags)


def test_child_compiles_what_this_process_compiles_and_keeps_the_tags() -> None:
    compiled = compile_text(exported(), mesh=AXES, timeout=120, donate=(0, 1), xla_flags=FLAGS)
    here = jax.make_mesh((2, 4), ("d", "x"), axis_types=TYPES)
    text = program(here).lower(*shapes(here)).compile().as_text() or ""
    child, local = read_hlo(compiled.text), read_hlo(text)
    assert list(map(tagged, child.collectives)) == list(map(tagged, local.collectives))
    assert child.dot_flops == local.dot_flops == 3 * 2 * 2 * 4 * 16 * 16
    assert {tag for c in child.collectives for tag in tagged(c)[-1]} == {
        "ap1",
        "ap2",
        "ap12",
        "ap13",
    }
    # one device holds 3 * 4 * 16 floats and one integer of the state, all of it donated
    assert compiled.memory is not None
    state_bytes = 4 * (3 * 4 * 16) + 4
    assert compiled.memory.alias_bytes == state_bytes
    assert compiled.memory.argument_bytes == state_bytes + 4 * 4 * 16
    assert compiled.memory.temp_bytes > 0


def test_one_device_and_wide_dtypes() -> None:
    with jax.enable_x64(True):
        shape = jax.ShapeDtypeStruct((8, 8), jnp.dtype("float64"))
        export = jax.export.export(jax.jit(lambda a: {"y": a @ a}), platforms=["cpu"])(shape)
    compiled = compile_text(bytes(export.serialize()), mesh=(("x", 1),), timeout=120)
    assert "f64[8,8]" in compiled.text
    assert "f32[8,8]" not in compiled.text
    assert read_hlo(compiled.text).dot_flops == 2 * 8**3


def test_a_program_for_another_mesh_says_so() -> None:
    with pytest.raises(AuditError) as error:
        compile_text(exported(), mesh=(("d", 2), ("x", 2)), timeout=120)
    assert "did not compile for 4 devices" in str(error.value)
    assert "while reading the exported program" in error.value.where
    assert "the program is for 8 devices, not for 4" in error.value.why


def test_a_child_that_takes_too_long_is_killed() -> None:
    with pytest.raises(AuditError) as error:
        compile_text(exported(), mesh=AXES, timeout=0.05)
    assert error.value.what == "the compilation for 8 devices did not end in 0.05 s"
    assert "while starting Python and importing JAX" in error.value.where
