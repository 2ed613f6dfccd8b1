"""Reductions, cumulative ops and sorts."""

from __future__ import annotations

import jax.numpy as jnp

from autopar.rules.rule import Eqn, Factor, Rule, RuleMaker, make_rule, summed


def _reduced_dims(eqn: Eqn) -> tuple[list[str], list[str], list[str]]:
    axes = eqn.params["axes"]
    names = [f"d{dim}" for dim in range(len(eqn.in_shapes[0]))]
    return names, [n for d, n in enumerate(names) if d not in axes], [f"d{d}" for d in axes]


def reduce_sum(eqn: Eqn) -> Rule:
    """`a k -> a`: partial over k; linear."""
    names, kept, gone = _reduced_dims(eqn)
    factors = {name: summed() for name in gone}
    return make_rule(eqn, [names], [kept], factors=factors, linear=[(0,)])


def finished(kind: str) -> RuleMaker:
    """A maker for reductions that are finished by the op (pmax and the like).

    No collective takes the bitwise and of integers, or the extreme of complex numbers: there
    the reduced dims stay whole.
    """

    def maker(eqn: Eqn) -> Rule:
        dtype = eqn.in_dtypes[0]
        is_bool = jnp.issubdtype(dtype, jnp.bool_)
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        if is_complex or (kind in ("and", "or") and not is_bool):
            return whole_dims(eqn)
        names, kept, gone = _reduced_dims(eqn)
        factors = {name: Factor("", None, kind) for name in gone}
        return make_rule(eqn, [names], [kept], factors=factors)

    return maker


def whole_dims(eqn: Eqn) -> Rule:
    """Reductions whose reduced dims stay whole (product, exclusive or, argmax, argmin)."""
    names, kept, gone = _reduced_dims(eqn)
    return make_rule(eqn, [[n if n not in gone else "." for n in names]], [kept])


def along(eqn: Eqn, dim: int, *, linear: bool) -> Rule:
    """An op that needs `dim` whole in all its equally shaped operands and results."""
    names = ["." if d == dim else f"d{d}" for d in range(len(eqn.in_shapes[0]))]
    ins, outs = [names] * len(eqn.in_shapes), [names] * len(eqn.out_shapes)
    return make_rule(eqn, ins, outs, linear=[(0,)] if linear else ())


def cumsum(eqn: Eqn) -> Rule:
    """A running sum along a whole dim."""
    return along(eqn, eqn.params["axis"], linear=True)


def cumulative(eqn: Eqn) -> Rule:
    """A running maximum and the like along a whole dim."""
    return along(eqn, eqn.params["axis"], linear=False)


def sort(eqn: Eqn) -> Rule:
    """Sorts along a whole dim."""
    return along(eqn, eqn.params["dimension"], linear=False)


def top_k(eqn: Eqn) -> Rule:
    """The last (operand) dim stays whole."""
    axis = eqn.params.get("axis", len(eqn.in_shapes[0]) - 1) % len(eqn.in_shapes[0])
    names = ["." if d == axis else f"d{d}" for d in range(len(eqn.in_shapes[0]))]
    return make_rule(eqn, [names], [names] * len(eqn.out_shapes))


RULES: dict[str, RuleMaker] = {
    "reduce_sum": reduce_sum,
    "reduce_max": finished("max"),
    "reduce_min": finished("min"),
    "reduce_and": finished("and"),
    "reduce_or": finished("or"),
    "reduce_prod": whole_dims,
    "reduce_xor": whole_dims,
    "argmax": whole_dims,
    "argmin": whole_dims,
    "cumsum": cumsum,
    "cumprod": cumulative,
    "cummax": cumulative,
    "cummin": cumulative,
    "cumlogsumexp": cumulative,
    "sort": sort,
    "top_k": top_k,
}
