"""Cases of elementwise primitives: every name of the table, at least once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives

from tests.oracles.rule_harness import Case, Made, Maker, arrays, shape_of_rank
from tests.oracles.simulated_mesh import Array

FLOATS = (jnp.float32, jnp.bfloat16)
INTS = (jnp.int32, jnp.int8, jnp.uint32)
NUMBERS = (jnp.float32, jnp.bfloat16, jnp.int32, jnp.complex64)
ULPS = 2.0**-21
"""Four units in the last place of float32: loops over blocks vectorise differently."""
LOOPED = 1e-5
"""For series that stop when the whole block has converged: other blocks, other numbers of terms."""
COARSE = 2.0**-7
"""Two units in the last place of bfloat16, where partial results are rounded to it."""

Rng = np.random.Generator

UNARY_FLOAT = (
    "abs asin asinh atan atanh acos cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 expm1 "
    "floor is_finite lgamma log log1p logistic round rsqrt sign sin sinh sqrt square tan tanh "
    "bessel_i0e bessel_i1e"
).split()
BINARY_FLOAT = "atan2 igamma igammac max min nextafter pow rem zeta igamma_grad_a".split()
COSTLY = frozenset("igamma igammac igamma_grad_a polygamma regularized_incomplete_beta".split())
"""Names whose programs are loops that take a second to compile."""
COMPARISONS = "eq ne lt le gt ge".split()
BINARY_INT = "shift_left shift_right_arithmetic shift_right_logical".split()
BITWISE = "and or xor".split()


def some_shape(rng: Rng) -> tuple[int, ...]:
    return shape_of_rank(rng, int(rng.integers(0, 4)), most=100)


def pick(rng: Rng, dtypes: tuple[Any, ...]) -> Any:
    return dtypes[int(rng.integers(len(dtypes)))]


def broadcastable(rng: Rng, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with some dims of size 1, which lax broadcasts."""
    return tuple(1 if rng.random() < 0.25 else size for size in shape)


def fractions(rng: Rng, shape: tuple[int, ...], dtype: Any, shift: float = 0.0) -> Array:
    """Numbers inside the domain of every function: between `shift` and `shift` + 1."""
    return np.asarray(rng.uniform(0.1, 0.9, shape) + shift).astype(np.dtype(dtype))


def unary(function: Callable[..., Any], shift: float = 0.0) -> Maker:
    def make(rng: Rng) -> Made:
        shape = some_shape(rng)
        return function, (fractions(rng, shape, pick(rng, (jnp.float32,)), shift),)

    return make


def binary_float(function: Callable[..., Any]) -> Maker:
    def make(rng: Rng) -> Made:
        shape = some_shape(rng)
        other = broadcastable(rng, shape)
        one = fractions(rng, shape, jnp.float32, 1.0)
        return function, (one, fractions(rng, other, jnp.float32, 1.0))

    return make


def of_arrays(
    function: Callable[..., Any], dtypes: tuple[Any, ...], count: int, *, broadcasts: bool = False
) -> Maker:
    """`count` equally shaped arrays of one dtype; the last broadcasts if asked to."""

    def make(rng: Rng) -> Made:
        shape = some_shape(rng)
        shapes = [shape] * count
        if broadcasts:
            shapes[-1] = broadcastable(rng, shape)
        return function, arrays(rng, pick(rng, dtypes), *shapes)

    return make


def shifts(function: Callable[..., Any]) -> Maker:
    def make(rng: Rng) -> Made:
        shape = some_shape(rng)
        (one,) = arrays(rng, jnp.int32, shape)
        return function, (one, np.asarray(rng.integers(0, 31, shape), np.int32))

    return make


def division(rng: Rng) -> Made:
    shape = some_shape(rng)
    dtype = pick(rng, NUMBERS)
    one, other = arrays(rng, dtype, shape, broadcastable(rng, shape))
    return lax.div, (one, np.where(other == 0, np.ones_like(other), other))


def clamp(rng: Rng) -> Made:
    shape = some_shape(rng)
    low, high = ((), ()) if rng.random() < 0.5 else (shape, shape)
    operands = arrays(rng, pick(rng, (*FLOATS, jnp.int32)), low, shape, high)
    return lax.clamp, operands


def with_literal(function: Callable[..., Any], dtypes: tuple[Any, ...]) -> Maker:
    """A literal operand: a scalar beside an array, which partial sums must count once."""

    def make(rng: Rng) -> Made:
        return function, arrays(rng, pick(rng, dtypes), some_shape(rng))

    return make


def select(rng: Rng) -> Made:
    shape = some_shape(rng)
    cases = int(rng.integers(2, 4))
    which_shape = () if rng.random() < 0.3 else shape
    which = np.asarray(rng.integers(0, cases, which_shape), np.int32)
    predicate = which.astype(np.bool_) if cases == 2 else which
    dtype = pick(rng, (*NUMBERS, jnp.bool_))
    return lax.select_n, (predicate, *arrays(rng, dtype, *([shape] * cases)))


def conversion(rng: Rng) -> Made:
    source = pick(rng, (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.int8, jnp.bool_))
    targets = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.int8, jnp.complex64)
    target = pick(rng, tuple(t for t in targets if t != source))
    return lambda x: lax.convert_element_type(x, target), arrays(rng, source, some_shape(rng))


def barrier(rng: Rng) -> Made:
    one, other = some_shape(rng), some_shape(rng)
    operands = (*arrays(rng, jnp.float32, one), *arrays(rng, jnp.int32, other))
    return lambda *xs: lax.optimization_barrier(xs), operands


def bitcast(rng: Rng) -> Made:
    shape = some_shape(rng)
    source, target = (
        (jnp.float32, jnp.int32),
        (jnp.float32, jnp.bfloat16),
        (jnp.bfloat16, jnp.int32),
    )[int(rng.integers(3))]
    if source == jnp.bfloat16:
        shape = (*shape, 2)
    return lambda x: lax.bitcast_convert_type(x, target), arrays(rng, source, shape)


def shared_gradient(x: Any) -> Any:
    """Two uses of one value: their cotangents meet in `add_any`."""
    return jax.grad(lambda y: jnp.sum(jnp.sin(y) * jnp.cos(y)))(x)


ELEMENTWISE = (
    *(Case(name, unary(getattr(lax, name)), ULPS) for name in UNARY_FLOAT),
    *(
        Case(name, unary(getattr(primitives, f"{name}_p").bind), ULPS)
        for name in ("one_minus_square",)
        if hasattr(primitives, f"{name}_p")  # of JAX releases after 0.10
    ),
    Case("acosh", unary(lax.acosh, 1.0), ULPS),
    Case("integer_pow", with_literal(lambda x: lax.integer_pow(x, 3), NUMBERS)),
    Case("reduce_precision", with_literal(lambda x: lax.reduce_precision(x, 5, 1), FLOATS)),
    *(
        Case(name, binary_float(getattr(lax, name)), LOOPED if name in COSTLY else ULPS)
        for name in BINARY_FLOAT
    ),
    *(
        Case(name, of_arrays(getattr(lax, name), (jnp.float32, jnp.int32), 2, broadcasts=True))
        for name in COMPARISONS
    ),
    *(
        Case(
            name,
            of_arrays(getattr(lax, f"bitwise_{name}"), (jnp.int32, jnp.bool_), 2, broadcasts=True),
        )
        for name in BITWISE
    ),
    *(Case(name, shifts(getattr(lax, name))) for name in BINARY_INT),
    Case("not", of_arrays(lax.bitwise_not, (jnp.int32, jnp.bool_), 1)),
    Case("population_count", of_arrays(lax.population_count, (jnp.int32,), 1)),
    Case("clz", of_arrays(lax.clz, (jnp.int32,), 1)),
    Case("polygamma", binary_float(lax.polygamma), LOOPED),
    Case(
        "regularized_incomplete_beta",
        lambda rng: (
            lax.betainc,
            tuple(fractions(rng, (4, 6), jnp.float32) for _ in range(3)),
        ),
        LOOPED,
    ),
    Case("clamp", clamp),
    Case("add", of_arrays(lax.add, NUMBERS, 2, broadcasts=True)),
    Case("add", with_literal(lambda x: x + jnp.asarray(1.5, x.dtype), FLOATS), label="array"),
    Case("add", with_literal(lambda x: x + 2, NUMBERS), label="literal"),
    Case("add_any", with_literal(shared_gradient, (jnp.float32,)), ULPS),
    Case("sub", of_arrays(lax.sub, NUMBERS, 2, broadcasts=True)),
    Case("mul", of_arrays(lax.mul, NUMBERS, 2, broadcasts=True)),
    Case("mul", with_literal(lambda x: x * 3, NUMBERS), label="literal"),
    Case("div", division, COARSE),
    Case("neg", of_arrays(lax.neg, NUMBERS, 1)),
    Case("copy", of_arrays(jnp.copy, NUMBERS, 1)),
    Case("name", of_arrays(lambda x: checkpoint_name(x, "kept"), NUMBERS, 1)),
    Case("real", of_arrays(lax.real, (jnp.complex64,), 1)),
    Case("imag", of_arrays(lax.imag, (jnp.complex64,), 1)),
    Case("conj", of_arrays(lax.conj, (jnp.complex64,), 1)),
    Case("complex", of_arrays(lax.complex, (jnp.float32,), 2)),
    Case("stop_gradient", of_arrays(primitives.stop_gradient_p.bind, NUMBERS, 1)),
    Case("select_n", select),
    Case("convert_element_type", conversion),
    Case("optimization_barrier", barrier),
    Case("bitcast_convert_type", bitcast),
)
