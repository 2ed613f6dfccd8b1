"""Reshard steps and finishes as JAX collectives, each alone in a named scope with its tag."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.ir.block import shard_index
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import Step
from autopar.rules.strategy import Finish


def run_step(value: Any, step: Step, mesh: Mesh, tag: str) -> Any:
    """Apply one reshard step to a local block, inside `shard_map`."""
    if step.kind == "slice":
        return _slice(value, step, mesh)
    if step.kind == "mask":
        index = shard_index(step.axes, mesh, jax.lax.axis_index)
        return jnp.where(index == 0, value, jnp.zeros_like(value))
    with jax.named_scope(tag):
        return _collective(value, step)


def _collective(value: Any, step: Step) -> Any:
    if step.kind == "all-reduce":
        return jax.lax.psum(value, step.axes)
    if step.kind == "reduce-scatter":
        return jax.lax.psum_scatter(value, step.axes, scatter_dimension=step.dim, tiled=True)
    if step.kind == "all-gather":
        return jax.lax.all_gather(value, step.axes, axis=step.dim, tiled=True)
    return jax.lax.all_to_all(
        value, step.axes, split_axis=step.to_dim, concat_axis=step.dim, tiled=True
    )


def _slice(value: Any, step: Step, mesh: Mesh) -> Any:
    parts = 1
    for axis in step.axes:
        parts *= mesh.axis_size(axis)
    size = value.shape[step.dim] // parts
    start = shard_index(step.axes, mesh, jax.lax.axis_index) * size
    return jax.lax.dynamic_slice_in_dim(value, start, size, axis=step.dim)


def _flip(bits: Any) -> Any:
    """Signed bits of floats to integers in the floats' order, and back: its own inverse."""
    top = np.iinfo(bits.dtype).max
    return jnp.where(bits < 0, bits ^ top, bits)


def _ordered(value: Any, *, nan_last: bool) -> Any:
    """Integers in the order of the floats; NaN wins, which no collective promises for floats."""
    kind = jnp.dtype(f"int{8 * value.dtype.itemsize}")
    keys = _flip(jax.lax.bitcast_convert_type(value, kind))
    limits = np.iinfo(kind)
    return jnp.where(jnp.isnan(value), limits.max if nan_last else limits.min, keys)


def _unordered(keys: Any, dtype: Any) -> Any:
    """The floats of `_ordered` integers."""
    return jax.lax.bitcast_convert_type(_flip(keys), dtype)


def _extreme(value: Any, finish: Finish) -> Any:
    if finish.kind == "max":
        return jax.lax.pmax(value, finish.axes)
    return jax.lax.pmin(value, finish.axes)


def run_finish(value: Any, finish: Finish, tag: str) -> Any:
    """Finish a maximum, minimum, conjunction or disjunction over mesh axes."""
    with jax.named_scope(tag):
        if finish.kind in ("max", "min"):
            if not jnp.issubdtype(value.dtype, jnp.inexact):
                return _extreme(value, finish)
            keys = _ordered(value, nan_last=finish.kind == "max")
            return _unordered(_extreme(keys, finish), value.dtype)
        # Booleans have no collective of their own: 0 and 1 do.
        number = value.astype(jnp.int32)
        if finish.kind == "and":
            return jax.lax.pmin(number, finish.axes).astype(value.dtype)
        return jax.lax.pmax(number, finish.axes).astype(value.dtype)
