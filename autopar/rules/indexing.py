"""Gather, scatter-add and dynamic slices.

A dim that is looked up by index (the vocabulary of an embedding) may be split: each device answers
for the rows it holds and contributes zeros for the rest, so a gather's result is a partial sum and
a scatter-add drops what is not its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.ir.graph import is_number
from autopar.rules.rule import Eqn, Local, Rule, RuleMaker, make_rule, replicate, summed


def _index_names(rank: int, taken: dict[int, str]) -> list[str]:
    """Dim names of the index operand: batching dims as given, the vector dim whole."""
    return [taken.get(dim, f"i{dim}") for dim in range(rank - 1)] + ["."]


def gather(eqn: Eqn) -> Rule:
    """Whole windows pass through; index dims come first; looked-up dims are summed over."""
    numbers = eqn.params["dimension_numbers"]
    operand, indices = eqn.in_shapes
    sizes = eqn.params["slice_sizes"]
    names = ["."] * len(operand)
    batching: dict[int, str] = {}
    for one, other in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        names[one] = batching[other] = f"b{one}"
    index_names = _index_names(len(indices), batching)
    looked_up = [
        dim
        for dim in numbers.start_index_map
        if sizes[dim] == 1 and operand[dim] > 1 and is_number(eqn.in_dtypes[0])
    ]
    for dim in looked_up:
        names[dim] = f"v{dim}"
    kept = [
        dim
        for dim in range(len(operand))
        if dim not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]
    out: list[str] = [""] * len(eqn.out_shapes[0])
    for position, dim in zip(numbers.offset_dims, kept, strict=True):
        if sizes[dim] == operand[dim] and dim not in numbers.start_index_map:
            names[dim] = out[position] = f"w{dim}"
        else:
            out[position] = "."
    rest = iter(index_names)
    out = [name or next(rest) for name in out]
    return make_rule(
        eqn,
        [names, index_names],
        [out],
        factors={f"v{dim}": summed() for dim in looked_up},
        linear=[(0,)],
        bind=_bind_gather,
    )


def _clip(indices: Any, limits: tuple[int, ...]) -> Any:
    top = jnp.asarray(limits, indices.dtype)
    return jnp.clip(indices, jnp.zeros_like(top), top)


def _fill_value(local: Local, dtype: Any) -> Any:
    """What JAX puts for rows out of range: NaN, the least signed or the largest unsigned."""
    fill = local.params["fill_value"]
    if fill is not None:
        return fill
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    limits = jnp.iinfo(dtype)  # type: ignore[no-untyped-call]
    return limits.min if jnp.issubdtype(dtype, jnp.signedinteger) else limits.max


def _wide(indices: Any) -> Any:
    """Indices that can hold any position of a block, and go below zero."""
    return indices if indices.dtype.itemsize > 4 else indices.astype(jnp.int32)


def _own_rows(local: Local, indices: Any, dims: tuple[int, ...]) -> tuple[Any, Any]:
    """Which index vectors point into this device's block, and the vectors moved into it.

    Args:
        local: the op.
        indices: `[..., len(dims)]`, in range where they count.
        dims: the operand dim of each component.
    """
    block = local.in_block(0)
    own: Any = True
    for position, dim in enumerate(dims):
        if local.in_shardings[0].dims[dim]:
            start = jnp.asarray(block.starts[dim], indices.dtype)
            shifted = indices[..., position] - start
            own = own & (shifted >= 0) & (shifted < block.shape[dim])
            indices = indices.at[..., position].set(jnp.clip(shifted, 0, block.shape[dim] - 1))
    return own, indices


def _bind_gather(local: Local) -> tuple[Any, ...]:
    operand, indices = local.operands
    numbers = local.params["dimension_numbers"]
    shape, block = local.in_shapes[0], local.in_block(0)
    dims = numbers.start_index_map
    sizes = tuple(
        block.shape[dim] if size == shape[dim] and dim not in dims else size
        for dim, size in enumerate(local.params["slice_sizes"])
    )
    mode = str(local.params["mode"]).upper()
    partial = local.out_shardings[0].partial
    split = any(local.in_shardings[0].dims[dim] for dim in dims)
    if not split and not (partial and "FILL" in mode):
        return local.run(operand, indices, slice_sizes=sizes)
    indices = _wide(indices)
    limits = tuple(shape[dim] - sizes[dim] for dim in dims)
    if "FILL" not in mode:
        indices = _clip(indices, limits)
    top = jnp.asarray(limits, indices.dtype)
    valid = jnp.all((indices >= 0) & (indices <= top), axis=-1)
    own, moved = _own_rows(local, indices, dims)
    (rows,) = local.run(operand, moved, slice_sizes=sizes)
    valid, own = (_over_offsets(mask, rows.ndim, numbers) for mask in (valid, own & valid))
    zero = jnp.zeros((), rows.dtype)
    rows = jnp.where(own, rows, zero)
    if "FILL" in mode:
        # Only one device of the group may contribute the fill value, or it would be summed.
        leads = jnp.all(jnp.asarray([local.axis_index(axis) == 0 for axis in partial]))
        fill = jnp.asarray(_fill_value(local, rows.dtype), rows.dtype)
        rows = jnp.where(valid, rows, jnp.where(leads, fill, zero))
    return (rows,)


def _over_offsets(mask: Any, rank: int, numbers: Any) -> Any:
    """`mask` over the index dims of a gather's result, with size 1 along its offset dims."""
    sizes = iter(mask.shape)
    shape = tuple(1 if dim in numbers.offset_dims else next(sizes) for dim in range(rank))
    return jnp.reshape(mask, shape)


@dataclass(frozen=True, slots=True)
class _ScatterNames:
    """Dim names of a scatter's operand, indices and updates, and those of the update rows."""

    operand: list[str]
    indices: list[str]
    updates: list[str]
    rows: list[str]


def _scatter_names(eqn: Eqn) -> _ScatterNames:
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = eqn.in_shapes
    names = ["."] * len(operand)
    batching: dict[int, str] = {}
    for one, other in zip(
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
    ):
        names[one] = batching[other] = f"b{one}"
    index_names = _index_names(len(indices), batching)
    for dim in numbers.scatter_dims_to_operand_dims:
        if dim in numbers.inserted_window_dims:
            names[dim] = f"v{dim}"
    update_names: list[str] = [""] * len(updates)
    for position, dim in zip(numbers.update_window_dims, _kept(numbers, operand), strict=True):
        whole = updates[position] == operand[dim]
        if whole and dim not in numbers.scatter_dims_to_operand_dims:
            names[dim] = update_names[position] = f"w{dim}"
        else:
            update_names[position] = "."
    rest = iter(index_names)
    update_names = [name or next(rest) for name in update_names]
    rows = [name for name in index_names if name.startswith("i")]
    return _ScatterNames(names, index_names, update_names, rows)


def _kept(numbers: Any, operand: Sequence[int]) -> list[int]:
    """Operand dims that the update windows have too."""
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    return [dim for dim in range(len(operand)) if dim not in gone]


def scatter_add(eqn: Eqn) -> Rule:
    """Windows and looked-up dims pass through; update rows are summed into the operand.

    Splitting the rows of the updates makes every device add its own rows, so the operand must be
    partial there (for a constant zero that costs nothing) and so is the result.
    """
    names = _scatter_names(eqn)
    return make_rule(
        eqn,
        [names.operand, names.indices, names.updates],
        [names.operand],
        factors={name: summed(partial_in=(0,)) for name in names.rows},
        linear=[(0, 2)],
        bind=_bind_scatter,
    )


def scatter_whole_rows(eqn: Eqn) -> Rule:
    """Any other scatter: as scatter_add, but every device sees all rows of the updates.

    A scatter that overwrites is jointly linear in operand and updates, one that multiplies is
    linear in the operand. Which of two writes to one place wins is undefined, so linearity of
    overwriting needs unique indices.
    """
    names = _scatter_names(eqn)

    def without_rows(dims: list[str]) -> list[str]:
        return ["." if name in names.rows else name for name in dims]

    linear: list[tuple[int, ...]] = []
    if eqn.name == "scatter" and eqn.params["unique_indices"]:
        linear = [(0, 2)]
    elif eqn.name == "scatter-mul":
        linear = [(0,)]
    return make_rule(
        eqn,
        [names.operand, without_rows(names.indices), without_rows(names.updates)],
        [names.operand],
        linear=linear,
        bind=_bind_scatter,
    )


def _bind_scatter(local: Local) -> tuple[Any, ...]:
    operand, indices, updates = local.operands
    numbers = local.params["dimension_numbers"]
    dims = numbers.scatter_dims_to_operand_dims
    if not any(local.in_shardings[0].dims[dim] for dim in dims):
        return local.run(operand, indices, updates)
    shape, block = local.in_shapes[0], local.in_block(0)
    indices = _wide(indices)
    if "CLIP" in str(local.params["mode"]).upper():
        windows = _window_sizes(numbers, local.in_shapes[2], shape)
        indices = _clip(indices, tuple(shape[dim] - windows[dim] for dim in dims))
    # What another device holds falls outside this block, on either side, and is dropped.
    starts = [jnp.asarray(block.starts[dim], indices.dtype) for dim in dims]
    drop = jax.lax.GatherScatterMode.FILL_OR_DROP
    return local.run(operand, indices - jnp.stack(starts), updates, mode=drop)


def _window_sizes(numbers: Any, updates: Sequence[int], operand: Sequence[int]) -> tuple[int, ...]:
    sizes = [1] * len(operand)
    for position, dim in zip(numbers.update_window_dims, _kept(numbers, operand), strict=True):
        sizes[dim] = updates[position]
    return tuple(sizes)


def _bind_dynamic_slice(local: Local) -> tuple[Any, ...]:
    sizes = local.out_shape()
    return local.run(*local.operands, slice_sizes=sizes)


def dynamic_slice(eqn: Eqn) -> Rule:
    """Dims taken whole pass through (their start is clamped to 0); others stay whole."""
    names = [
        f"d{dim}" if size == full else "."
        for dim, (size, full) in enumerate(zip(eqn.out_shapes[0], eqn.in_shapes[0], strict=True))
    ]
    starts: list[list[str]] = [[] for _ in eqn.in_shapes[1:]]
    if any(len(shape) for shape in eqn.in_shapes[1:]):
        return replicate(eqn, "dynamic_slice with array sizes has no rule yet")
    return make_rule(eqn, [names, *starts], [names], linear=[(0,)], bind=_bind_dynamic_slice)


def dynamic_update_slice(eqn: Eqn) -> Rule:
    """Dims updated whole pass through; jointly linear in operand and update."""
    operand, update = eqn.in_shapes[:2]
    names = [
        f"d{dim}" if size == full else "."
        for dim, (size, full) in enumerate(zip(update, operand, strict=True))
    ]
    starts: list[list[str]] = [[] for _ in eqn.in_shapes[2:]]
    return make_rule(eqn, [names, names, *starts], [names], linear=[(0, 1)])


RULES: dict[str, RuleMaker] = {
    "gather": gather,
    "scatter-add": scatter_add,
    "scatter": scatter_whole_rows,
    "scatter-mul": scatter_whole_rows,
    "scatter-max": scatter_whole_rows,
    "scatter-min": scatter_whole_rows,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
}
