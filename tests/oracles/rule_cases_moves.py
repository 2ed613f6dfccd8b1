"""Cases of primitives that move elements: layout, gather, scatter, dynamic slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.oracles.rule_cases_elementwise import NUMBERS, Rng, pick
from tests.oracles.rule_harness import DIMS, Case, Made, Maker, arrays, shape_of_rank
from tests.oracles.simulated_mesh import Array, random_array

ANY = (*NUMBERS, jnp.bool_)


def _shape(rng: Rng, least: int = 1) -> tuple[int, ...]:
    return shape_of_rank(rng, int(rng.integers(least, 4)))


def _some(rng: Rng, count: int) -> list[bool]:
    return [bool(b) for b in rng.integers(0, 2, count)]


def broadcast(rng: Rng) -> Made:
    out = _shape(rng)
    kept = [d for d, keep in enumerate(_some(rng, len(out))) if keep]
    source = tuple(out[d] if rng.random() < 0.7 else 1 for d in kept)
    operands = arrays(rng, pick(rng, ANY), source)
    return lambda x: lax.broadcast_in_dim(x, out, tuple(kept)), operands


RESHAPES = (
    ((4, 6), (24,)),
    ((24,), (4, 6)),
    ((2, 6, 4), (12, 4)),
    ((12, 4), (2, 6, 4)),
    ((4, 6), (6, 4)),
    ((4, 6), (3, 8)),
    ((6, 4), (3, 8)),
    ((2, 4, 6), (2, 3, 8)),
    ((12, 2, 3), (12, 6)),
    ((1, 12), (12, 1)),
    ((12,), (1, 3, 1, 4, 1)),
    ((6, 1, 4), (2, 12)),
    ((2, 3, 4, 5), (6, 20)),
    ((4, 3, 2), (2, 2, 6)),
    ((1,), ()),
    ((), (1, 1)),
    ((4, 0), (0, 6)),
    ((36, 2), (2, 3, 12)),
)


def reshape(rng: Rng) -> Made:
    source, target = RESHAPES[int(rng.integers(len(RESHAPES)))]
    return lambda x: jnp.reshape(x, target), arrays(rng, pick(rng, ANY), source)


def random_reshape(rng: Rng) -> Made:
    """Any two groupings of the same prime factors, with ones strewn in."""
    primes = [int(p) for p in rng.choice((2, 2, 3), int(rng.integers(1, 5)))]

    def grouping() -> tuple[int, ...]:
        dims: list[int] = [1]
        for prime in rng.permutation(primes):
            if rng.random() < 0.5:
                dims.append(1)
            dims[-1] *= int(prime)
        return tuple(dims)

    source, target = grouping(), grouping()
    return lambda x: lax.reshape(x, target), arrays(rng, jnp.float32, source)


def transpose(rng: Rng) -> Made:
    shape = _shape(rng, 2)
    order = tuple(int(d) for d in rng.permutation(len(shape)))
    return lambda x: lax.transpose(x, order), arrays(rng, pick(rng, ANY), shape)


def squeeze(rng: Rng) -> Made:
    shape = tuple(s for size in _shape(rng) for s in (1, size))
    gone = tuple(d for d, size in enumerate(shape) if size == 1)[:2]
    return lambda x: lax.squeeze(x, gone), arrays(rng, pick(rng, ANY), shape)


def rev(rng: Rng) -> Made:
    shape = _shape(rng)
    gone = tuple(d for d, turned in enumerate(_some(rng, len(shape))) if turned)
    return lambda x: lax.rev(x, gone), arrays(rng, pick(rng, ANY), shape)


def slice_(rng: Rng) -> Made:
    shape = _shape(rng)
    starts = [int(rng.integers(size)) if rng.random() < 0.5 else 0 for size in shape]
    limits = [
        size if start == 0 and rng.random() < 0.6 else int(rng.integers(start, size)) + 1
        for start, size in zip(starts, shape, strict=True)
    ]
    strides = None if rng.random() < 0.5 else tuple(int(rng.integers(1, 3)) for _ in shape)
    return lambda x: lax.slice(x, starts, limits, strides), arrays(rng, pick(rng, ANY), shape)


def pad(rng: Rng) -> Made:
    shape = _shape(rng)
    config = tuple(
        (0, 0, 0) if rng.random() < 0.5 else (int(rng.integers(-1, 3)), int(rng.integers(3)), 1)
        for _ in shape
    )
    operands = arrays(rng, pick(rng, ANY), shape, ())
    return lambda x, v: lax.pad(x, v, config), operands


def concatenate(rng: Rng) -> Made:
    shape = _shape(rng)
    dim = int(rng.integers(len(shape)))
    shapes = [
        (*shape[:dim], int(rng.choice(DIMS[:4])), *shape[dim + 1 :])
        for _ in range(int(rng.integers(2, 4)))
    ]
    return lambda *xs: lax.concatenate(xs, dim), arrays(rng, pick(rng, ANY), *shapes)


def split(rng: Rng) -> Made:
    shape = _shape(rng)
    dim = int(rng.integers(len(shape)))
    first = int(rng.integers(1, shape[dim])) if shape[dim] > 1 else 1
    sizes = (first, shape[dim] - first) if shape[dim] > 1 else (1,)
    return lambda x: lax.split(x, sizes, dim), arrays(rng, pick(rng, ANY), shape)


def iota(rng: Rng) -> Made:
    shape = _shape(rng)
    dim = int(rng.integers(len(shape)))
    dtype = pick(rng, (jnp.int32, jnp.uint32, jnp.float32, jnp.bfloat16, jnp.complex64, jnp.int8))
    return lambda: lax.broadcasted_iota(dtype, shape, dim), ()


def long_iota(rng: Rng) -> Made:
    """Past 256 bfloat16 rounds: counting on from a rounded start would round twice."""
    size = int(rng.choice((720, 1008)))
    return lambda: lax.broadcasted_iota(jnp.bfloat16, (size, 2), 0), ()


def _indices(rng: Rng, shape: tuple[int, ...], size: int, *, wild: bool) -> Array:
    """Row numbers, out of range in both directions if `wild`."""
    low, high = (-size - 2, 2 * size + 2) if wild else (0, size)
    return np.asarray(rng.integers(low, high, shape), np.int32)


MODES = ("promise_in_bounds", "clip", "fill")


def take_rows(mode: str, dtypes: tuple[Any, ...]) -> Maker:
    """An embedding: whole rows, any number of index dims."""

    def make(rng: Rng) -> Made:
        table = (int(rng.choice((6, 12, 24))), int(rng.choice(DIMS[:5])))
        where = shape_of_rank(rng, int(rng.integers(0, 3)), most=24)
        rows = _indices(rng, where, table[0], wild=mode != "promise_in_bounds")
        operands = (random_array(rng, table, pick(rng, dtypes)), rows)
        return lambda t, i: _raw_take(t, i, mode), operands

    return make


def _raw_take(table: Any, rows: Any, mode: str) -> Any:
    """`table[rows]` without NumPy's wrapping of negative indices."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(rows.ndim,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    return lax.gather(
        table,
        rows[..., None],
        numbers,
        (1, table.shape[1]),
        mode=lax.GatherScatterMode.from_any(mode),
    )


def take_columns(rng: Rng) -> Made:
    """Look-up along the last dim, as `jnp.take` traces it."""
    table = (int(rng.choice(DIMS[:5])), 12)
    rows = _indices(rng, (4,), 12, wild=True)
    mode = MODES[1 + int(rng.integers(2))]
    return lambda t, i: jnp.take(t, i, axis=1, mode=mode), (
        random_array(rng, table, jnp.float32),
        rows,
    )


def take_pairs(rng: Rng) -> Made:
    """Two looked-up dims at once."""
    table = (6, 4, int(rng.choice(DIMS[:4])))
    rows, columns = (_indices(rng, (6,), n, wild=True) for n in table[:2])
    mode = MODES[1 + int(rng.integers(2))]
    return lambda t, i, j: t.at[i, j].get(mode=mode), (
        random_array(rng, table, pick(rng, (jnp.float32, jnp.int32, jnp.uint32))),
        rows,
        columns,
    )


def take_along(rng: Rng) -> Made:
    """`take_along_axis`: batching dims, one looked-up dim."""
    shape = (int(rng.choice(DIMS[:5])), int(rng.choice(DIMS[:5])), 12)
    rows = _indices(rng, (*shape[:2], int(rng.choice((1, 3)))), 12, wild=True)
    mode = MODES[1 + int(rng.integers(2))]
    return lambda x, i: jnp.take_along_axis(x, i, axis=-1, mode=mode), (
        random_array(rng, shape, pick(rng, (jnp.float32, jnp.int32))),
        rows,
    )


def windows_at(rng: Rng) -> Made:
    """Windows of three rows: the looked-up dim stays whole."""
    table = (12, int(rng.choice(DIMS[:5])))
    starts = _indices(rng, (6, 1), 12, wild=True)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,)
    )
    mode = lax.GatherScatterMode.from_any(MODES[1 + int(rng.integers(2))])
    return lambda t, i: lax.gather(t, i, numbers, (3, table[1]), mode=mode), (
        random_array(rng, table, jnp.float32),
        starts,
    )


def narrow_indices(rng: Rng) -> Made:
    """Row numbers too narrow to hold the table's size."""
    rows = np.asarray(rng.integers(0, 128, (6,)), np.int8)
    table = random_array(rng, (240, 2), jnp.float32)
    return lambda t, i: _raw_take(t, i, MODES[int(rng.integers(3))]), (table, rows)


def transposed(take: Maker) -> Maker:
    """The gradient of a look-up in its table: a scatter-add into zeros."""

    def make(rng: Rng) -> Made:
        function, (table, *rest) = take(rng)

        def gradient(cotangent: Any, *indices: Any) -> Any:
            shape = jax.ShapeDtypeStruct(table.shape, table.dtype)
            return jax.linear_transpose(lambda t: function(t, *indices), shape)(cotangent)[0]

        out = jax.eval_shape(function, table, *rest)
        return gradient, (random_array(rng, out.shape, out.dtype), *rest)

    return make


def scatter_into(method: str, dtypes: tuple[Any, ...], mode: str) -> Maker:
    """`x.at[rows].add(updates)`: the operand is not zero."""

    def make(rng: Rng) -> Made:
        table = (int(rng.choice((6, 12))), int(rng.choice(DIMS[:5])))
        count = int(rng.choice((2, 6)))
        rows = _indices(rng, (count,), table[0], wild=mode != "promise_in_bounds")
        if method == "set":  # which of two writes to a row wins is not defined
            rows = np.asarray(rng.choice(table[0] + 6, count, replace=False) - 3, np.int32)
        dtype = pick(rng, dtypes)
        operands = (
            random_array(rng, table, dtype),
            rows,
            random_array(rng, (count, table[1]), dtype),
        )
        return lambda x, i, u: getattr(x.at[i], method)(u, mode=mode), operands

    return make


def dynamic(rng: Rng) -> Made:
    shape = _shape(rng)
    sizes = tuple(s if rng.random() < 0.5 else int(rng.integers(1, s + 1)) for s in shape)
    starts = tuple(np.asarray(rng.integers(-2, s + 2), np.int32) for s in shape)
    operands = (random_array(rng, shape, pick(rng, ANY)), *starts)
    return lambda x, *at: lax.dynamic_slice(x, at, sizes), operands


def dynamic_update(rng: Rng) -> Made:
    shape = _shape(rng)
    sizes = tuple(s if rng.random() < 0.5 else int(rng.integers(1, s + 1)) for s in shape)
    starts = tuple(np.asarray(rng.integers(-2, s + 2), np.int32) for s in shape)
    operands = (*arrays(rng, pick(rng, ANY), shape, sizes), *starts)
    return lambda x, u, *at: lax.dynamic_update_slice(x, u, at), operands


Function = Callable[..., Any]
LOOKED_UP = (jnp.float32, jnp.int32, jnp.uint32, jnp.bfloat16)

LAYOUT = (
    Case("broadcast_in_dim", broadcast),
    Case("reshape", reshape),
    Case("reshape", random_reshape, label="random"),
    Case("transpose", transpose),
    Case("squeeze", squeeze),
    Case("rev", rev),
    Case("slice", slice_),
    Case("pad", pad),
    Case("concatenate", concatenate),
    Case("split", split),
    Case("iota", iota),
    Case("iota", long_iota, label="long"),
)

INDEXING = (
    *(Case("gather", take_rows(mode, LOOKED_UP), label=mode) for mode in MODES),
    Case("gather", take_rows("fill", (jnp.bool_,)), label="bool"),
    Case("gather", take_columns, label="columns"),
    Case("gather", take_pairs, label="pairs"),
    Case("gather", take_along, label="along"),
    Case("gather", windows_at, label="windows"),
    Case("gather", narrow_indices, label="narrow"),
    *(
        Case("scatter-add", transposed(take_rows(mode, (jnp.float32,))), label=f"of-{mode}")
        for mode in MODES
    ),
    Case("scatter-add", transposed(take_columns), label="of-columns"),
    Case("scatter-add", transposed(take_along), label="of-along"),
    Case("scatter-add", transposed(windows_at), label="of-windows"),
    *(
        Case("scatter-add", scatter_into("add", (jnp.float32, jnp.int32), mode), label=mode)
        for mode in MODES
    ),
    Case("scatter", scatter_into("set", ANY, "fill")),
    Case("scatter-mul", scatter_into("multiply", (jnp.float32, jnp.int32), "clip")),
    Case("scatter-max", scatter_into("max", (jnp.float32, jnp.int32), "fill")),
    Case("scatter-min", scatter_into("min", (jnp.float32, jnp.int32), "fill")),
    Case("dynamic_slice", dynamic),
    Case("dynamic_update_slice", dynamic_update),
)
