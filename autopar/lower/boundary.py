"""How values look between programs: ordinary arrays with ordinary shardings.

Two things a program holds have no form outside it. A value that is held as *pending sums* over mesh
axes gets these axes as leading dims of size one a device: `f32[4, 8]` in `[-,-]+x` on a mesh `x=2`
is an array `f32[2, 4, 8]` in `[x,-,-]`, whose sum over dim 0 is the value. And keys travel as the
integers they are made of, with one more dim at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.lower.program import Program


@dataclass(frozen=True, slots=True)
class Outside:
    """The form of a value between programs.

    Attributes:
        shape, dtype: of the array.
        sharding: nothing pending.
        inside: dtype the program has it in.
        sums: how many leading dims are pending sums.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding
    inside: Any
    sums: int

    def enter(self, block: Any) -> Any:
        """A local block as the program takes it."""
        block = block.reshape(block.shape[self.sums :]) if self.sums else block
        if self.dtype == self.inside:
            return block
        if jnp.issubdtype(self.inside, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(block, impl=key_impl(self.inside))
        return block.astype(self.inside)

    def leave(self, block: Any) -> Any:
        """A local block as it goes out."""
        if self.dtype != self.inside:
            keys = jnp.issubdtype(self.inside, jax.dtypes.prng_key)
            block = jax.random.key_data(block) if keys else block.astype(self.dtype)
        return block.reshape((*(1,) * self.sums, *block.shape)) if self.sums else block


def key_impl(dtype: Any) -> Any:
    """The generator of a key type, as `jax.random.wrap_key_data` takes it: `threefry2x32`, say.

    JAX tells it of keys only, not of their dtype, so a key that is never made is asked.
    """
    found: list[Any] = []

    def ask(key: Any) -> None:
        found.append(jax.random.key_impl(key))

    jax.eval_shape(ask, jax.ShapeDtypeStruct((), dtype))
    return found[0]


def outside(
    shape: tuple[int, ...], dtype: Any, sharding: Sharding, mesh: Mesh, *, wide: bool = False
) -> Outside:
    """The form of a value between the tasks of a worker, which know neither sums nor keys.

    Args:
        shape, dtype: of the value.
        sharding: as the program holds it.
        mesh: the program's.
        wide: 16-bit floats as 32-bit ones: what is added up over many micro-batches.
    """
    form = summed_form(shape, dtype, sharding, mesh)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        dims = (*form.sharding.dims, *((),) * len(data.shape))
        shape = (*form.shape, *data.shape)
        return replace(form, shape=shape, dtype=data.dtype, sharding=Sharding(dims))
    if wide and dtype in (jnp.bfloat16, jnp.float16):
        return replace(form, dtype=jnp.dtype(jnp.float32))
    return replace(form, dtype=jnp.dtype(dtype))


def summed_form(shape: tuple[int, ...], dtype: Any, sharding: Sharding, mesh: Mesh) -> Outside:
    """The form of a value at the boundary of a program: the axes of its sum are leading dims."""
    sums = tuple(mesh.axis_size(axis) for axis in sharding.partial)
    dims = (*((axis,) for axis in sharding.partial), *sharding.dims)
    return Outside((*sums, *shape), dtype, Sharding(dims), dtype, len(sums))


def program_forms(program: Program) -> tuple[tuple[Outside, ...], tuple[Outside, ...]]:
    """Forms of a program's inputs and of its outputs."""
    graph, mesh = program.graph, program.mesh
    values = [graph.values[entry.value] for entry in graph.inputs]
    ins = (
        summed_form(value.shape, value.dtype, sharding, mesh)
        for value, sharding in zip(values, program.inputs, strict=True)
    )
    outs = (
        summed_form(graph.shape_of(o), graph.dtype_of(o), sharding, mesh)
        for o, sharding in zip(graph.outputs, program.outputs, strict=True)
    )
    return tuple(ins), tuple(outs)
