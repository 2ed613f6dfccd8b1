"""Contractions: dot_general and convolution."""

from __future__ import annotations

import math
from typing import Any

from autopar.ir.graph import is_number
from autopar.rules.rule import Eqn, Local, Rule, RuleMaker, keeps_sums, make_rule, summed


def dot_general(eqn: Eqn) -> Rule:
    """`b i k, b k j -> b i j`, with any number of each."""
    (left_contract, right_contract), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left = [""] * len(eqn.in_shapes[0])
    right = [""] * len(eqn.in_shapes[1])
    summable = is_number(eqn.out_dtypes[0])
    for kind, pairs in (("b", (left_batch, right_batch)), ("k", (left_contract, right_contract))):
        for number, (one, other) in enumerate(zip(*pairs, strict=True)):
            whole = kind == "k" and not summable
            left[one] = right[other] = "." if whole else f"{kind}{number}"
    for dims, kind in ((left, "i"), (right, "j")):
        free = [position for position, name in enumerate(dims) if not name]
        for number, position in enumerate(free):
            dims[position] = f"{kind}{number}"
    batch = [f"b{number}" for number in range(len(left_batch))]
    out = batch + [n for n in left if n[0] == "i"] + [n for n in right if n[0] == "j"]
    contracted = [n for n in left if n[0] == "k"]
    sizes = [eqn.in_shapes[0][position] for position in left_contract]
    return make_rule(
        eqn,
        [left, right],
        [out],
        factors={name: summed() for name in contracted},
        linear=[(p,) for p in (0, 1) if keeps_sums(eqn.in_dtypes[p], eqn.out_dtypes[0])],
        flops=2.0 * math.prod(eqn.out_shapes[0]) * math.prod(sizes),
    )


def _bind_conv(local: Local) -> tuple[Any, ...]:
    """The groups that this device has are read off the local shapes."""
    spec = local.params["dimension_numbers"]
    left, right = (operand.shape for operand in local.operands)
    groups = {}
    if local.params["feature_group_count"] > 1:
        groups["feature_group_count"] = left[spec.lhs_spec[1]] // right[spec.rhs_spec[1]]
    if local.params["batch_group_count"] > 1:
        groups["batch_group_count"] = left[spec.lhs_spec[0]] // local.out_shape()[spec.out_spec[0]]
    return local.run(*local.operands, **groups)


def _spatial_kind(eqn: Eqn, position: int) -> str:
    """What becomes of a spatial dim: `pass` (a window of one), `sum` (one window), or ``."""
    spec = eqn.params["dimension_numbers"]
    extent = eqn.in_shapes[0][spec.lhs_spec[2 + position]]
    window = eqn.in_shapes[1][spec.rhs_spec[2 + position]]
    padded = tuple(eqn.params["padding"][position]) != (0, 0)
    if padded or eqn.params["lhs_dilation"][position] != 1:
        return ""
    if window == eqn.params["window_strides"][position] == 1:
        return "pass"
    whole = window == extent and eqn.params["rhs_dilation"][position] == 1
    return "sum" if whole else ""


def conv_general_dilated(eqn: Eqn) -> Rule:
    """Batch, groups, input features (summed) and output features.

    With `g` feature groups the dims are `b (g k), (g j) k -> b (g j)`, with `q` batch groups
    `(q b) k, (q j) k -> b (q j)`. A spatial dim passes through where the window is one element,
    is summed where one window covers all of it, and stays whole otherwise. A kernel gradient is
    the same primitive with batch and features exchanged in its dimension numbers, so its summed
    factor is the batch.
    """
    spec = eqn.params["dimension_numbers"]
    features, batches = eqn.params["feature_group_count"], eqn.params["batch_group_count"]
    left, right, out = (["."] * len(spec.lhs_spec) for _ in range(3))
    out_features = "g j" if features > 1 else "q j" if batches > 1 else "j"
    left[spec.lhs_spec[0]] = "q b" if batches > 1 else "b"
    left[spec.lhs_spec[1]] = "g k" if features > 1 else "k"
    right[spec.rhs_spec[1]], out[spec.out_spec[0]] = "k", "b"
    right[spec.rhs_spec[0]] = out[spec.out_spec[1]] = out_features
    factors = {"k": summed()}
    for position in range(len(spec.lhs_spec) - 2):
        name, kind = f"s{position}", _spatial_kind(eqn, position)
        if kind:
            left[spec.lhs_spec[2 + position]] = name
        if kind == "pass":
            out[spec.out_spec[2 + position]] = name
        elif kind == "sum":
            right[spec.rhs_spec[2 + position]] = name
            factors[name] = summed()
    groups = {"g": features, "q": batches}
    sizes = {name: size for name, size in groups.items() if size > 1}
    if sizes:
        sizes["j"] = eqn.out_shapes[0][spec.out_spec[1]] // (features * batches)
    depth = eqn.in_shapes[1][spec.rhs_spec[1]]
    window = math.prod(eqn.in_shapes[1][dim] for dim in spec.rhs_spec[2:])
    return make_rule(
        eqn,
        [left, right],
        [out],
        sizes=sizes,
        factors=factors,
        linear=[(0,), (1,)],
        bind=_bind_conv,
        flops=2.0 * math.prod(eqn.out_shapes[0]) * depth * window,
    )


RULES: dict[str, RuleMaker] = {
    "dot_general": dot_general,
    "conv_general_dilated": conv_general_dilated,
}
