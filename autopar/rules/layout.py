"""Ops that move elements without computing: broadcast, reshape, transpose, slice, pad, iota."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.rules.rule import Eqn, Local, Rule, RuleMaker, make_rule


def _bind_broadcast(local: Local) -> tuple[Any, ...]:
    dims = local.params["broadcast_dimensions"]
    return (jax.lax.broadcast_in_dim(local.operands[0], local.out_shape(), dims),)


def broadcast_in_dim(eqn: Eqn) -> Rule:
    """New dims, and size-1 dims that grow, are factors of the result alone."""
    shape, out = eqn.in_shapes[0], eqn.out_shapes[0]
    names = [f"d{dim}" for dim in range(len(out))]
    source = [
        names[target] if size == out[target] else "."
        for size, target in zip(shape, eqn.params["broadcast_dimensions"], strict=True)
    ]
    return make_rule(eqn, [source], [names], linear=[(0,)], bind=_bind_broadcast)


def _common_parts(
    one: tuple[int, ...], other: tuple[int, ...]
) -> tuple[list[str], list[str], dict[str, int]] | None:
    """Factor names per dim of two shapes of equal size, by their least common refinement.

    None if the shapes do not refine each other (`[4, 6] -> [3, 8]`).
    """
    left: list[list[str]] = [[] for _ in one]
    right: list[list[str]] = [[] for _ in other]
    sizes: dict[str, int] = {}
    i = j = 0
    rest_i = one[0] if one else 1
    rest_j = other[0] if other else 1
    while i < len(one) and j < len(other):
        if 1 in (rest_i, one[i]):
            i, rest_i = _advance(i, one)
            continue
        if 1 in (rest_j, other[j]):
            j, rest_j = _advance(j, other)
            continue
        small = min(rest_i, rest_j)
        if max(rest_i, rest_j) % small:
            return None
        name = f"d{len(sizes)}"
        sizes[name] = small
        left[i].append(name)
        right[j].append(name)
        rest_i, rest_j = rest_i // small, rest_j // small
    return [" ".join(n) or "." for n in left], [" ".join(n) or "." for n in right], sizes


def _advance(position: int, shape: tuple[int, ...]) -> tuple[int, int]:
    position += 1
    return position, shape[position] if position < len(shape) else 1


def _bind_reshape(local: Local) -> tuple[Any, ...]:
    order = local.params["dimensions"]
    operand = local.operands[0] if order is None else jnp.transpose(local.operands[0], order)
    return (jnp.reshape(operand, local.out_shape()),)


def reshape(eqn: Eqn) -> Rule:
    """Compound factors, `a (b c) -> (a b) c`; what does not refine stays whole.

    The walk is from the major end, so a group of dims that does not refine (`[4, 6] -> [3, 8]`)
    keeps only the dims that stand outside it.
    """
    shape, out = eqn.in_shapes[0], eqn.out_shapes[0]
    if 0 in shape:
        ins, outs = [["."] * len(shape)], [["."] * len(out)]
        return make_rule(eqn, ins, outs, linear=[(0,)], bind=_bind_reshape)
    order = eqn.params["dimensions"] or tuple(range(len(shape)))
    permuted, names_out, sizes = _refine_groups(tuple(shape[dim] for dim in order), out)
    names_in = [permuted[order.index(dim)] for dim in range(len(shape))]
    return make_rule(eqn, [names_in], [names_out], sizes=sizes, linear=[(0,)], bind=_bind_reshape)


def _refine_groups(
    shape: tuple[int, ...], out: tuple[int, ...]
) -> tuple[list[str], list[str], dict[str, int]]:
    names_in: list[str] = []
    names_out: list[str] = []
    sizes: dict[str, int] = {}
    for one, other in _equal_products(shape, out):
        parts = _common_parts(one, other)
        if parts is None:
            names_in += ["."] * len(one)
            names_out += ["."] * len(other)
            continue
        offset = len(sizes)
        rename = {name: f"d{offset + k}" for k, name in enumerate(parts[2])}
        for names, target in ((parts[0], names_in), (parts[1], names_out)):
            target += [" ".join(rename.get(p, p) for p in cell.split()) for cell in names]
        sizes |= {rename[name]: size for name, size in parts[2].items()}
    return names_in, names_out, sizes


def _equal_products(
    one: tuple[int, ...], other: tuple[int, ...]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut two shapes into the shortest runs of dims whose products agree."""
    groups = []
    i = j = start_i = start_j = 0
    left = right = 1
    while i < len(one) or j < len(other):
        if left <= right and i < len(one) and (left < right or i == start_i):
            left *= one[i]
            i += 1
        elif j < len(other):
            right *= other[j]
            j += 1
        else:
            left *= one[i]
            i += 1
        if left == right and (i > start_i and j > start_j):
            groups.append((one[start_i:i], other[start_j:j]))
            start_i, start_j, left, right = i, j, 1, 1
    if start_i < i or start_j < j:
        groups.append((one[start_i:], other[start_j:]))
    return groups


def transpose(eqn: Eqn) -> Rule:
    """A permutation of dims."""
    names = [f"d{dim}" for dim in range(len(eqn.in_shapes[0]))]
    out = [names[dim] for dim in eqn.params["permutation"]]
    return make_rule(eqn, [names], [out], linear=[(0,)])


def squeeze(eqn: Eqn) -> Rule:
    """Size-1 dims go."""
    gone = eqn.params["dimensions"]
    names = ["." if d in gone else f"d{d}" for d in range(len(eqn.in_shapes[0]))]
    out = [name for d, name in enumerate(names) if d not in gone]
    return make_rule(eqn, [names], [out], linear=[(0,)])


def rev(eqn: Eqn) -> Rule:
    """Reversed dims stay whole."""
    gone = eqn.params["dimensions"]
    names = ["." if d in gone else f"d{d}" for d in range(len(eqn.in_shapes[0]))]
    return make_rule(eqn, [names], [names], linear=[(0,)])


def untouched(shape: Sequence[int], other: Sequence[int], keep: Sequence[bool]) -> list[str]:
    """Names of dims that pass whole and of equal size; `.` for the rest."""
    triples = zip(shape, other, keep, strict=True)
    return [f"d{dim}" if a == b and k else "." for dim, (a, b, k) in enumerate(triples)]


def _bind_slice(local: Local) -> tuple[Any, ...]:
    split = [bool(axes) for axes in local.in_shardings[0].dims]
    starts = local.params["start_indices"]
    limits = [
        size if is_split else limit
        for is_split, limit, size in zip(
            split, local.params["limit_indices"], local.operands[0].shape, strict=True
        )
    ]
    return (jax.lax.slice(local.operands[0], starts, limits, local.params["strides"]),)


def slice_(eqn: Eqn) -> Rule:
    """Dims taken whole pass through; cut dims stay whole."""
    strides = eqn.params["strides"] or (1,) * len(eqn.in_shapes[0])
    names = untouched(eqn.in_shapes[0], eqn.out_shapes[0], [s == 1 for s in strides])
    return make_rule(eqn, [names], [names], linear=[(0,)], bind=_bind_slice)


def pad(eqn: Eqn) -> Rule:
    """Unpadded dims pass through; jointly linear in the operand and the padding value."""
    keep = [tuple(config) == (0, 0, 0) for config in eqn.params["padding_config"]]
    names = untouched(eqn.in_shapes[0], eqn.out_shapes[0], keep)
    return make_rule(eqn, [names, []], [names], linear=[(0, 1)])


def concatenate(eqn: Eqn) -> Rule:
    """The joined dim stays whole; jointly linear."""
    dim = eqn.params["dimension"]
    names = ["." if d == dim else f"d{d}" for d in range(len(eqn.out_shapes[0]))]
    count = len(eqn.in_shapes)
    return make_rule(eqn, [names] * count, [names], linear=[tuple(range(count))])


def split(eqn: Eqn) -> Rule:
    """The cut dim stays whole."""
    dim = eqn.params["axis"]
    names = ["." if d == dim else f"d{d}" for d in range(len(eqn.in_shapes[0]))]
    return make_rule(eqn, [names], [names] * len(eqn.out_shapes), linear=[(0,)])


def _bind_iota(local: Local) -> tuple[Any, ...]:
    dim, dtype = local.params["dimension"], local.params["dtype"]
    block = local.out_block(0)
    if block.is_whole(dim):
        return (jax.lax.broadcasted_iota(dtype, block.shape, dim),)
    # Counted as integers: a start rounded to bfloat16 would round the sum a second time.
    counted = dtype if jnp.issubdtype(dtype, jnp.integer) else jnp.int32
    values = jax.lax.broadcasted_iota(counted, block.shape, dim)
    return ((values + jnp.asarray(block.starts[dim], counted)).astype(dtype),)


def iota(eqn: Eqn) -> Rule:
    """Counts from where the block starts."""
    names = [f"d{dim}" for dim in range(len(eqn.out_shapes[0]))]
    return make_rule(eqn, [[]] * len(eqn.in_shapes), [names], bind=_bind_iota)


RULES: dict[str, RuleMaker] = {
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    "transpose": transpose,
    "squeeze": squeeze,
    "rev": rev,
    "slice": slice_,
    "pad": pad,
    "concatenate": concatenate,
    "split": split,
    "iota": iota,
}
