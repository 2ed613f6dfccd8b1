"""Cases of contractions, convolutions, windows and reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.oracles.rule_cases_elementwise import COARSE, FLOATS, ULPS, Rng, pick
from tests.oracles.rule_harness import DIMS, Case, Made, Maker, arrays, shape_of_rank

SUMMABLE = (jnp.float32, jnp.int32, jnp.complex64)


def dot(rng: Rng) -> Made:
    """Any number of batch, contracted and free dims, in any order."""
    batch, contract, left, right = (int(rng.integers(0, 3)) for _ in range(4))
    sizes = [int(rng.choice(DIMS[:5])) for _ in range(batch + contract + left + right)]
    shared = list(range(batch + contract))
    ones = [*shared, *range(len(shared), len(shared) + left)]
    others = [*shared, *range(len(shared) + left, len(sizes))]
    rng.shuffle(ones)
    rng.shuffle(others)

    def dims(start: int, stop: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        names = range(start, stop)
        return tuple(ones.index(n) for n in names), tuple(others.index(n) for n in names)

    numbers = (dims(batch, batch + contract), dims(0, batch))
    operands = arrays(
        rng, pick(rng, SUMMABLE), tuple(sizes[n] for n in ones), tuple(sizes[n] for n in others)
    )
    return lambda x, y: lax.dot_general(x, y, numbers), operands


def dot_preferred(rng: Rng) -> Made:
    """A float32 result of bfloat16 operands."""
    m, k, n = shape_of_rank(rng, 3)
    operands = arrays(rng, jnp.bfloat16, (m, k), (k, n))
    return lambda x, y: lax.dot(x, y, preferred_element_type=jnp.float32), operands


def dot_coarse(rng: Rng) -> Made:
    """A bfloat16 result: partial results are rounded to it."""
    m, k, n = shape_of_rank(rng, 3)
    return lax.dot, arrays(rng, jnp.bfloat16, (m, k), (k, n))


def _conv(rng: Rng, *, groups: int = 1, window: int = 3) -> tuple[Callable[..., Any], Made]:
    batch, features, outs = (int(rng.choice((1, 2, 4, 6))) for _ in range(3))
    layouts = (("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC"), ("NHWC", "HWIO", "NCHW"))
    layout = layouts[int(rng.integers(len(layouts)))]
    extents = {"N": batch, "C": groups * features, "H": 6, "W": 4}
    kernel = {"O": groups * outs, "I": features, "H": window, "W": window}
    strides = (int(rng.integers(1, 3)), int(rng.integers(1, 3)))
    dilation = (int(rng.integers(1, 3)), 1)
    padding = "SAME" if rng.random() < 0.5 else [(1, 2), (2, 1)]

    def conv(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(
            x,
            w,
            strides,
            padding,
            rhs_dilation=dilation,
            dimension_numbers=layout,
            feature_group_count=groups,
        )

    shapes = (tuple(extents[n] for n in layout[0]), tuple(kernel[n] for n in layout[1]))
    return conv, (conv, arrays(rng, jnp.float32, *shapes))


def conv_forward(rng: Rng) -> Made:
    return _conv(rng)[1]


def conv_one(rng: Rng) -> Made:
    """A 1x1 window."""
    return _conv(rng, window=1)[1]


def conv_grouped(rng: Rng) -> Made:
    return _conv(rng, groups=int(rng.choice((2, 4, 6))))[1]


def _pull_back(function: Callable[..., Any], operands: tuple[Any, ...], wrt: int) -> Made:
    """The gradient alone: a graph whose convolutions are those of the backward."""

    def gradient(*xs: Any) -> Any:
        def along(x: Any) -> Any:
            return function(*xs[:wrt], x, *xs[wrt + 1 :])

        out = jax.eval_shape(along, xs[wrt])
        cotangent = jnp.ones(out.shape, out.dtype)
        return jax.linear_transpose(along, xs[wrt])(cotangent)[0]

    return gradient, operands


def conv_gradient(wrt: int, *, grouped: bool = False) -> Maker:
    def make(rng: Rng) -> Made:
        function, made = _conv(rng, groups=int(rng.choice((2, 4))) if grouped else 1)
        return _pull_back(function, made[1], wrt)

    return make


def _window(rng: Rng) -> tuple[tuple[int, ...], dict[str, Any]]:
    shape = (int(rng.choice(DIMS[:5])), 6, 4, int(rng.choice(DIMS[:5])))
    window = (1, int(rng.integers(1, 4)), 2, 1)
    strides = (1, int(rng.integers(1, 3)), int(rng.integers(1, 3)), 1)
    return shape, {
        "window_dimensions": window,
        "window_strides": strides,
        "padding": "SAME" if rng.random() < 0.5 else "VALID",
    }


def pooled(init: Any, combine: Any, dtypes: tuple[Any, ...], *, dilated: bool = False) -> Maker:
    def make(rng: Rng) -> Made:
        shape, options = _window(rng)
        if dilated:
            options["base_dilation"] = (2, 1, 2, 1)
        operands = arrays(rng, pick(rng, dtypes), shape)
        return lambda x: lax.reduce_window(x, init(x.dtype), combine, **options), operands

    return make


def _zero(dtype: Any) -> Any:
    return np.zeros((), dtype)


def _least(dtype: Any) -> Any:
    return np.asarray(-np.inf, dtype)


def _most(dtype: Any) -> Any:
    return np.asarray(np.inf, dtype)


def _max_pool(options: dict[str, Any]) -> Callable[[Any], Any]:
    return lambda x: lax.reduce_window(x, -jnp.inf, lax.max, **options)


def pool_gradient(rng: Rng) -> Made:
    shape, options = _window(rng)
    pool = _max_pool(options)
    return jax.grad(lambda x: jnp.sum(pool(x) * 2.0)), arrays(rng, jnp.float32, shape)


def pool_tangent(rng: Rng) -> Made:
    shape, options = _window(rng)
    pool = _max_pool(options)
    return lambda x, t: jax.jvp(pool, (x,), (t,))[1], arrays(rng, jnp.float32, shape, shape)


def _axes(rng: Rng, rank: int) -> tuple[int, ...]:
    chosen = [d for d in range(rank) if rng.random() < 0.5]
    return tuple(chosen or [int(rng.integers(rank))])


def reduced(function: Callable[..., Any], dtypes: tuple[Any, ...]) -> Maker:
    def make(rng: Rng) -> Made:
        shape = shape_of_rank(rng, int(rng.integers(1, 4)))
        axes = _axes(rng, len(shape))
        return lambda x: function(x, axes), arrays(rng, pick(rng, dtypes), shape)

    return make


def along_one(function: Callable[..., Any], dtypes: tuple[Any, ...]) -> Maker:
    """A function of an array and one of its dims."""

    def make(rng: Rng) -> Made:
        shape = shape_of_rank(rng, int(rng.integers(1, 4)))
        axis = int(rng.integers(len(shape)))
        return lambda x: function(x, axis), arrays(rng, pick(rng, dtypes), shape)

    return make


def sorted_pairs(rng: Rng) -> Made:
    shape = shape_of_rank(rng, int(rng.integers(1, 4)))
    axis = int(rng.integers(len(shape)))
    keys, values = (*arrays(rng, jnp.float32, shape), *arrays(rng, jnp.int32, shape))
    return lambda k, v: lax.sort((k, v), dimension=axis, num_keys=1), (keys, values)


def best(rng: Rng) -> Made:
    shape = shape_of_rank(rng, int(rng.integers(1, 4)))
    count = int(rng.integers(1, shape[-1] + 1))
    return lambda x: lax.top_k(x, count), arrays(rng, jnp.float32, shape)


REAL = (jnp.float32, jnp.bfloat16, jnp.int32)
BITS = (jnp.bool_, jnp.int32)

CONTRACTION = (
    Case("dot_general", dot),
    Case("dot_general", dot_preferred, label="preferred"),
    Case("dot_general", dot_coarse, COARSE, label="coarse"),
    Case("conv_general_dilated", conv_forward),
    Case("conv_general_dilated", conv_one, label="one"),
    Case("conv_general_dilated", conv_grouped, label="grouped"),
    Case("conv_general_dilated", conv_gradient(0), label="input-gradient"),
    Case("conv_general_dilated", conv_gradient(1), label="kernel-gradient"),
    Case("conv_general_dilated", conv_gradient(0, grouped=True), label="grouped-input-gradient"),
    Case("conv_general_dilated", conv_gradient(1, grouped=True), label="grouped-kernel-gradient"),
)

WINDOWS = (
    Case("reduce_window_sum", pooled(_zero, lax.add, (jnp.float32, jnp.int32))),
    Case(
        "reduce_window_sum", pooled(_zero, lax.add, (jnp.float32,), dilated=True), label="dilated"
    ),
    Case("reduce_window_max", pooled(_least, lax.max, FLOATS)),
    Case("reduce_window_min", pooled(_most, lax.min, FLOATS)),
    Case("select_and_gather_add", pool_tangent),
    Case("select_and_scatter_add", pool_gradient),
)

REDUCTION = (
    Case("reduce_sum", reduced(lax.reduce_sum, SUMMABLE)),
    Case("reduce_sum", reduced(lax.reduce_sum, (jnp.bfloat16,)), COARSE, label="coarse"),
    Case("reduce_max", reduced(lax.reduce_max, REAL)),
    Case("reduce_min", reduced(lax.reduce_min, REAL)),
    Case("reduce_and", reduced(lax.reduce_and, BITS)),
    Case("reduce_or", reduced(lax.reduce_or, BITS)),
    Case("reduce_xor", reduced(lax.reduce_xor, BITS)),
    Case("reduce_prod", reduced(lax.reduce_prod, (jnp.float32, jnp.int32)), ULPS),
    Case("argmax", along_one(lambda x, a: lax.argmax(x, a, jnp.int32), REAL)),
    Case("argmin", along_one(lambda x, a: lax.argmin(x, a, jnp.int32), REAL)),
    Case("cumsum", along_one(lax.cumsum, SUMMABLE)),
    Case("cumsum", along_one(lambda x, a: lax.cumsum(x, a, reverse=True), SUMMABLE), label="back"),
    Case("cumprod", along_one(lax.cumprod, (jnp.float32, jnp.int32)), ULPS),
    Case("cummax", along_one(lax.cummax, REAL)),
    Case("cummin", along_one(lax.cummin, REAL)),
    Case("cumlogsumexp", along_one(lax.cumlogsumexp, (jnp.float32,)), ULPS),
    Case("sort", along_one(lambda x, a: lax.sort(x, dimension=a), REAL)),
    Case("sort", sorted_pairs, label="pairs"),
    Case("top_k", best),
)
