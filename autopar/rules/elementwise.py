"""Elementwise primitives: every dim passes through; size-1 dims that lax broadcasts stay whole."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from autopar.rules.rule import Eqn, Rule, RuleMaker, keeps_sums, make_rule

NONLINEAR = (
    "abs acos acosh and asin asinh atan atan2 atanh cbrt ceil clamp cos cosh digamma eq erf "
    "erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac integer_pow is_finite le lgamma log "
    "log1p logistic lt max min ne nextafter not one_minus_square or polygamma population_count "
    "pow reduce_precision regularized_incomplete_beta rem round rsqrt shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan tanh xor "
    "bessel_i0e bessel_i1e clz zeta igamma_grad_a"
).split()

LINEAR: dict[str, tuple[tuple[int, ...], ...]] = {
    "add": ((0, 1),),
    "add_any": ((0, 1),),
    "sub": ((0, 1),),
    "mul": ((0,), (1,)),
    "neg": ((0,),),
    "copy": ((0,),),
    "name": ((0,),),
    "complex": ((0, 1),),
    "real": ((0,),),
    "imag": ((0,),),
    "conj": ((0,),),
    "stop_gradient": ((0,),),
}
"""Groups of operands each primitive is jointly linear in, the others fixed."""


def aligned_dims(shape: tuple[int, ...], out: tuple[int, ...]) -> tuple[str, ...]:
    """Dim names of an operand that lax broadcasts against `out` (rank 0, or size-1 dims)."""
    if len(shape) != len(out):
        return (".",) * len(shape)
    return tuple(
        f"d{dim}" if size == full else "."
        for dim, (size, full) in enumerate(zip(shape, out, strict=True))
    )


def elementwise(eqn: Eqn, linear: Sequence[tuple[int, ...]] = ()) -> Rule:
    """The rule of any elementwise op."""
    out = eqn.out_shapes[0]
    ins = [aligned_dims(shape, out) for shape in eqn.in_shapes]
    return make_rule(eqn, ins, [aligned_dims(out, out)], linear=linear)


def linear_rule(groups: tuple[tuple[int, ...], ...]) -> RuleMaker:
    """A maker for an elementwise op that is linear in `groups`."""
    return lambda eqn: elementwise(eqn, groups)


def select_n(eqn: Eqn) -> Rule:
    """`where`: linear in all the cases together."""
    return elementwise(eqn, [tuple(range(1, len(eqn.in_shapes)))])


def div(eqn: Eqn) -> Rule:
    """A quotient: linear in the dividend, unless it is an integer one, which is rounded."""
    exact = jnp.issubdtype(eqn.out_dtypes[0], jnp.inexact)
    return elementwise(eqn, [(0,)] if exact else ())


def convert_element_type(eqn: Eqn) -> Rule:
    """A cast: linear only where no precision is lost before the sum."""
    keeps = keeps_sums(eqn.in_dtypes[0], eqn.out_dtypes[0])
    return elementwise(eqn, [(0,)] if keeps else ())


def optimization_barrier(eqn: Eqn) -> Rule:
    """Every operand passes through untouched, each with dims of its own."""
    names = [
        tuple(f"o{position}_{dim}" for dim in range(len(shape)))
        for position, shape in enumerate(eqn.in_shapes)
    ]
    groups = [((position,), (position,)) for position in range(len(names))]
    return make_rule(eqn, names, names, linear=groups)


def bitcast_convert_type(eqn: Eqn) -> Rule:
    """A bit cast; where widths differ, the extra minor dim stays whole."""
    common = min(len(eqn.in_shapes[0]), len(eqn.out_shapes[0]))

    def names(shape: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(f"d{dim}" if dim < common else "." for dim in range(len(shape)))

    return make_rule(eqn, [names(eqn.in_shapes[0])], [names(eqn.out_shapes[0])])


RULES: dict[str, RuleMaker] = {
    **dict.fromkeys(NONLINEAR, elementwise),
    **{name: linear_rule(groups) for name, groups in LINEAR.items()},
    "div": div,
    "select_n": select_n,
    "convert_element_type": convert_element_type,
    "optimization_barrier": optimization_barrier,
    "bitcast_convert_type": bitcast_convert_type,
}
