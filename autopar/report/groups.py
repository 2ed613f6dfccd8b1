"""Equal entries of a plan as one line: repeated layers and siblings with the same layout.

`params/layers/0/query`, `params/layers/1/query` and the keys beside them become the one name
`params/layers/0-1/{key,query}`. A folded name stands for exactly the product of its alternatives,
so nothing is claimed of an entry that is not in the plan.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from autopar.ir.mesh import Mesh
from autopar.ir.text import short_type
from autopar.plan.plan import Boundary, PricedCollective

_Pattern = tuple[tuple[str, ...], ...]
"""Per path component, its alternatives in order of appearance."""

KEY_BYTES = 8
"""Bytes of a random key, whose dtype numpy does not know: two 32-bit words of threefry."""


@dataclass(frozen=True, slots=True)
class LeafGroup:
    """Argument or result leaves of one shape and one layout.

    Attributes:
        name: folded path.
        first: one of them.
        count: how many there are.
        bytes: of all of them, the whole arrays.
        local_bytes: of all of them, on one device.
    """

    name: str
    first: Boundary
    count: int
    bytes: int
    local_bytes: int

    @property
    def type(self) -> str:
        """`f32[96,24,4]`."""
        return short_type(self.first.shape, self.first.dtype)

    @property
    def layout(self) -> str:
        """`[-,x,-]`."""
        return str(self.first.sharding)


@dataclass(frozen=True, slots=True)
class CollectiveGroup:
    """Equal collectives of a step.

    Attributes:
        name: folded name.
        first: one of them.
        times: how often a step runs them, together.
        seconds: of all of them.
        bytes: of all of them.
    """

    name: str
    first: PricedCollective
    times: int
    seconds: float
    bytes: int

    @property
    def kind(self) -> str:
        """`all-reduce`; one that takes another reduction than the sum says which."""
        reduction = self.first.reduction
        return self.first.kind + (f" {reduction}" if reduction not in ("", "sum") else "")


def leaf_groups(leaves: Sequence[Boundary], mesh: Mesh) -> tuple[LeafGroup, ...]:
    """The leaves, folded, in the order of the first of each group."""
    keys = [(leaf.shape, leaf.dtype, str(leaf.sharding), leaf.donated) for leaf in leaves]
    groups = []
    for name, members in _fold([leaf.name for leaf in leaves], keys):
        first = leaves[members[0]]
        size = _itemsize(first.dtype)
        whole = size * _product(first.shape) * len(members)
        local = size * first.sharding.local_size(first.shape, mesh) * len(members)
        groups.append(LeafGroup(name, first, len(members), whole, local))
    return tuple(groups)


def collective_groups(lines: Sequence[PricedCollective]) -> tuple[CollectiveGroup, ...]:
    """The price list, folded; what takes longest in a step comes first."""
    keys = [(c.kind, c.axes, c.reduction, c.elements, c.bytes, c.times, c.source) for c in lines]
    groups = [
        CollectiveGroup(
            name,
            lines[members[0]],
            sum(lines[m].times for m in members),
            sum(lines[m].times * lines[m].seconds for m in members),
            sum(lines[m].times * lines[m].bytes for m in members),
        )
        for name, members in _fold([line.name for line in lines], keys)
    ]
    return tuple(sorted(groups, key=lambda group: -group.seconds))


def _fold(names: Sequence[str], keys: Sequence[Hashable]) -> list[tuple[str, list[int]]]:
    """Folded names with the positions they stand for; only names of equal keys are folded."""
    patterns: list[tuple[Hashable, _Pattern, list[int]]] = [
        (key, tuple((part,) for part in name.split("/")), [position])
        for position, (name, key) in enumerate(zip(names, keys, strict=True))
    ]
    for numbers in (True, False):
        depth = max((len(pattern) for _, pattern, _ in patterns), default=0)
        for place in range(depth):
            patterns = _merge(patterns, place, numbers=numbers)
    return [("/".join(map(_alternatives, pattern)), members) for _, pattern, members in patterns]


def _merge(
    patterns: Iterable[tuple[Hashable, _Pattern, list[int]]], place: int, *, numbers: bool
) -> list[tuple[Hashable, _Pattern, list[int]]]:
    """Join patterns that differ only in component `place`: in layer numbers, or in names."""
    made: dict[Hashable, tuple[Hashable, _Pattern, list[int]]] = {}
    for key, pattern, members in patterns:
        foldable = place < len(pattern) and pattern[place][0].isdigit() == numbers
        rest = (*pattern[:place], (), *pattern[place + 1 :]) if foldable else pattern
        where = (key, rest, foldable)
        if where not in made:
            made[where] = (key, pattern, list(members))
            continue
        _, known, before = made[where]
        joined = known
        if foldable:
            union = tuple(dict.fromkeys((*known[place], *pattern[place])))
            joined = (*known[:place], union, *known[place + 1 :])
        made[where] = (key, joined, [*before, *members])
    return list(made.values())


def _alternatives(parts: tuple[str, ...]) -> str:
    if len(parts) == 1:
        return parts[0]
    if all(part.isdigit() for part in parts):
        return _ranges(sorted(map(int, parts)))
    return "{" + ",".join(parts) + "}"


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3,5` for 0 1 2 3 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return texts[0] if len(texts) == 1 else "{" + ",".join(texts) + "}"


def _itemsize(dtype: str) -> int:
    try:
        return int(jnp.dtype(dtype).itemsize)
    except TypeError:
        return KEY_BYTES


def _product(shape: Sequence[int]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
