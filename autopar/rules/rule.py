"""A factor rule: all that is known about a primitive.

`dot_general` is `b i k, b k j -> b i j`: every letter is a *factor*, an index of the computation. A
strategy gives each mesh axis to one factor (or to none: replicated there), and everything else
follows: which dims of which operand are split, which results are partial sums, how much of the
work one device does.

Kinds of factor:

- `pass`: splits dims of operands and results alike.
- `sum`: splits operand dims; the results named in `partial_out` become partial sums.
- `max`, `min`, `and`, `or`: splits operand dims; the op finishes the result itself (pmax, ...).
- `linear`: splits nothing; the operands in `partial_in` come as partial sums and the results in
  `partial_out` stay so, since the op is jointly linear in those operands.

The idea of one index notation per op is that of einsum and of Shardy's sharding rules
(https://openxla.org/shardy/sharding_representation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from autopar.errors import RuleError
from autopar.ir.block import AxisIndex, Block, block_of
from autopar.ir.graph import is_number
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding

FINISHES = ("max", "min", "and", "or")
KINDS = ("pass", "sum", "linear", *FINISHES)


@dataclass(frozen=True, slots=True)
class Factor:
    """One index of a computation.

    Attributes:
        name: a letter or word, for people.
        size: extent; None for `linear`, which any axis may take.
        kind: one of KINDS.
        partial_in: operands that must be partial over an axis given to this factor.
        partial_out: results that are partial over such an axis.
    """

    name: str
    size: int | None
    kind: str = "pass"
    partial_in: tuple[int, ...] = ()
    partial_out: tuple[int, ...] = ()


DimMap = tuple[tuple[int, ...], ...]
"""Per dim, the factors it is made of, major to minor; an empty tuple must stay whole."""


@dataclass(frozen=True, slots=True)
class Local:
    """What `Rule.bind` gets: one device's view of the op.

    Attributes:
        primitive: the JAX primitive.
        params: the op's global parameters.
        operands: local blocks (arrays or tracers; literals are scalars).
        in_shapes, out_shapes: global shapes.
        in_shardings, out_shardings: of the blocks.
        mesh: the logical mesh.
        axis_index: this device's position along an axis.
    """

    primitive: Any
    params: Mapping[str, Any]
    operands: tuple[Any, ...]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shapes: tuple[tuple[int, ...], ...]
    in_shardings: tuple[Sharding, ...]
    out_shardings: tuple[Sharding, ...]
    mesh: Mesh
    axis_index: AxisIndex

    def in_block(self, position: int) -> Block:
        """Where operand `position`'s block sits."""
        sharding, shape = self.in_shardings[position], self.in_shapes[position]
        return block_of(sharding, shape, self.mesh, self.axis_index)

    def out_block(self, position: int) -> Block:
        """Where result `position`'s block sits."""
        sharding, shape = self.out_shardings[position], self.out_shapes[position]
        return block_of(sharding, shape, self.mesh, self.axis_index)

    def out_shape(self, position: int = 0) -> tuple[int, ...]:
        """Local shape of result `position`."""
        return self.out_shardings[position].local_shape(self.out_shapes[position], self.mesh)

    def run(self, *operands: Any, **params: Any) -> tuple[Any, ...]:
        """Bind the primitive on `operands` with `params` laid over the global ones."""
        merged = self.primitive.get_bind_params({**self.params, **params})
        result = self.primitive.bind(*operands, **merged)
        return tuple(result) if self.primitive.multiple_results else (result,)


Bind = Callable[[Local], tuple[Any, ...]]


def bind_as_is(local: Local) -> tuple[Any, ...]:
    """The primitive on local blocks with unchanged parameters."""
    return local.run(*local.operands)


@dataclass(frozen=True, slots=True)
class Rule:
    """A factor mapping and the primitive bound on local shapes.

    Attributes:
        factors: the op's factors.
        ins, outs: per operand and result, its DimMap.
        bind: local blocks to local results.
        flops: multiply-adds of the whole op times 2; 0 for what memory bandwidth bounds.
        reason: why the op can only run replicated, else empty.
    """

    factors: tuple[Factor, ...]
    ins: tuple[DimMap, ...]
    outs: tuple[DimMap, ...]
    bind: Bind = field(default=bind_as_is, compare=False)
    flops: float = 0.0
    reason: str = ""

    @property
    def spec(self) -> str:
        """The einsum-like text, `b i k, k j -> b i j`."""
        sides = (self.ins, self.outs)
        return " -> ".join(", ".join(self._dims_text(dims) for dims in side) for side in sides)

    def _dims_text(self, dims: DimMap) -> str:
        cells = []
        for factors in dims:
            names = " ".join(self.factors[f].name for f in factors)
            cells.append(names if len(factors) == 1 else f"({names})" if factors else ".")
        return " ".join(cells)


@dataclass(frozen=True, slots=True)
class Eqn:
    """What a rule is made from: an op without its place in a graph."""

    name: str
    params: Mapping[str, Any]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shapes: tuple[tuple[int, ...], ...]
    in_dtypes: tuple[Any, ...]
    out_dtypes: tuple[Any, ...]


RuleMaker = Callable[[Eqn], Rule]


def make_rule(  # noqa: PLR0913 - each is one part of a rule
    eqn: Eqn,
    ins: Sequence[Sequence[str]],
    outs: Sequence[Sequence[str]],
    *,
    sizes: Mapping[str, int] | None = None,
    factors: Mapping[str, Factor] | None = None,
    linear: Sequence[tuple[Sequence[int], Sequence[int]] | Sequence[int]] = (),
    bind: Bind = bind_as_is,
    flops: float = 0.0,
) -> Rule:
    """Build a rule from dim names.

    Args:
        eqn: the equation.
        ins, outs: per operand and result, per dim, the space-separated factor names, major to
            minor; `.` (or an empty string) keeps the dim whole.
        sizes: sizes of factors that are not a whole dim anywhere (parts of compound dims).
        factors: factors that are not plain `pass` ones; their `size` is filled in.
        linear: groups of operands the op is jointly linear in, each with the results that then
            are partial (all of them if a group is given alone); a group that holds anything but
            numbers is left out.
        bind: the local implementation.
        flops: see Rule.

    Raises:
        RuleError: a name has no size, or two.
    """
    known: dict[str, int] = dict(sizes or {})
    for dims, shapes in ((ins, eqn.in_shapes), (outs, eqn.out_shapes)):
        for names, shape in zip(dims, shapes, strict=True):
            _learn_sizes(eqn, names, shape, known)
    for dims, shapes in ((ins, eqn.in_shapes), (outs, eqn.out_shapes)):
        for names, shape in zip(dims, shapes, strict=True):
            _check_compounds(eqn, names, shape, known)
    special = factors or {}
    index = {name: position for position, name in enumerate(known)}
    made = [_factor(name, size, special.get(name)) for name, size in known.items()]
    for number, group in enumerate(linear):
        given, made_partial = _linear_group(group, len(outs))
        if not _all_numbers(eqn, given, made_partial):
            continue
        made.append(Factor(f"+{number}", None, "linear", given, made_partial))
    return Rule(
        tuple(made),
        tuple(_dim_map(names, index) for names in ins),
        tuple(_dim_map(names, index) for names in outs),
        bind,
        flops,
    )


def _all_numbers(eqn: Eqn, ins: Sequence[int], outs: Sequence[int]) -> bool:
    used = [eqn.in_dtypes[i] for i in ins] + [eqn.out_dtypes[o] for o in outs]
    return all(is_number(dtype) for dtype in used)


def _factor(name: str, size: int, special: Factor | None) -> Factor:
    if special is None:
        return Factor(name, size)
    return Factor(name, size, special.kind, special.partial_in, special.partial_out)


def _linear_group(
    group: tuple[Sequence[int], Sequence[int]] | Sequence[int], num_outs: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    first = group[0]
    if isinstance(first, int):
        return tuple(i for i in group if isinstance(i, int)), tuple(range(num_outs))
    second = group[1]
    assert not isinstance(second, int)
    return tuple(first), tuple(second)


def _learn_sizes(
    eqn: Eqn, names: Sequence[str], shape: tuple[int, ...], known: dict[str, int]
) -> None:
    if len(names) != len(shape):
        raise RuleError(f"{eqn.name}: {len(names)} dim names for shape {shape}")
    for name, size in zip(names, shape, strict=True):
        parts = [part for part in name.split() if part != "."]
        if len(parts) == 1 and known.setdefault(parts[0], size) != size:
            raise RuleError(
                f"{eqn.name}: factor {parts[0]!r} has two sizes", got=f"{known[parts[0]]}, {size}"
            )


def _check_compounds(
    eqn: Eqn, names: Sequence[str], shape: tuple[int, ...], known: Mapping[str, int]
) -> None:
    for name, size in zip(names, shape, strict=True):
        parts = [part for part in name.split() if part != "."]
        if unknown := [part for part in parts if part not in known]:
            raise RuleError(f"{eqn.name}: factor {unknown[0]!r} has no size")
        if len(parts) > 1 and math.prod(known[part] for part in parts) != size:
            raise RuleError(f"{eqn.name}: factors {parts} do not make {size}")


def _dim_map(names: Sequence[str], index: Mapping[str, int]) -> DimMap:
    return tuple(tuple(index[part] for part in name.split() if part != ".") for name in names)


def summed(*outs: int, partial_in: tuple[int, ...] = ()) -> Factor:
    """A contraction factor; `outs` defaults to result 0."""
    return Factor("", None, "sum", partial_in, outs or (0,))


def replicate(eqn: Eqn, reason: str) -> Rule:
    """The rule of an op that runs whole on every device."""
    ins = tuple(((),) * len(shape) for shape in eqn.in_shapes)
    outs = tuple(((),) * len(shape) for shape in eqn.out_shapes)
    return Rule((), ins, outs, reason=reason)


def keeps_sums(source: Any, target: Any) -> bool:
    """Whether summands converted to `target` add up to the converted sum, to rounding.

    Integer sums wrap, so an integer may not be widened: of two int8 summands 100 the sum is -56.
    """
    if not all(jnp.issubdtype(dtype, jnp.number) for dtype in (source, target)):
        return False
    if jnp.issubdtype(source, jnp.inexact):
        return bool(jnp.promote_types(source, target) == target)
    return bool(jnp.issubdtype(target, jnp.integer)) and target.itemsize <= source.itemsize
