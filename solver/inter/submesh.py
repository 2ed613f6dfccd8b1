"""Submesh shapes of a mesh of devices, and the blocks that lay a sequence of them on it.

A mesh `(hosts, devices per host)` numbers its devices row-major: device `h * devices_per_host + d`
is device `d` of host `h`. A submesh `(h, d)` is a block of `h` neighbouring hosts by `d`
neighbouring devices of each.

Which sequences fit: if every shape is `(1, 2^k)`, with as many devices per host a power of two, or
a block of whole hosts, and the sizes add up to the mesh, they always fit (Alpa, arXiv 2201.12023,
appendix A): `nested` allows only those. Divisor shapes in general need not: on `(2, 6)` the shapes
`(2, 3)` and `(1, 6)` have 12 devices together, yet no row is left whole beside `(2, 3)`. So `place`
searches for a tiling, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autopar.errors import ClusterError

Shape = tuple[int, int]
"""Hosts, and devices of each of them."""

PLACEMENT_STATES = 20_000
"""Partial tilings `place` looks at before it gives a sequence up as not placeable (work limit).

Of 400 random sequences of divisor shapes a mesh, none needs more on meshes up to 4 x 8; one in
twenty does on 8 x 8, and nearly half on 32 x 8: allow only `nested` shapes there.
"""


def any_shape(shape: Shape) -> bool:
    """Allow every divisor shape."""
    return math.prod(shape) > 0


def within_host(shape: Shape) -> bool:
    """Allow only shapes inside one host: a worker process that owns its devices alone."""
    return shape[0] == 1


def nested(mesh: Shape) -> Callable[[Shape], bool]:
    """Allow only `(1, 2^k)` and whole hosts: shapes that fit together in every combination."""

    def allowed(shape: Shape) -> bool:
        hosts, per_host = shape
        return per_host == mesh[1] or (hosts == 1 and per_host.bit_count() == 1)

    return allowed


def divisor_submeshes(
    mesh: Shape, *, allowed: Callable[[Shape], bool] = any_shape
) -> tuple[Shape, ...]:
    """The shapes `(h, d)` with `h` a divisor of the hosts and `d` of the devices per host.

    Args:
        mesh: hosts and devices per host, at least 1 each.
        allowed: policy that keeps a shape or leaves it out.

    Returns:
        Ordered by size, then by hosts.

    Raises:
        ClusterError: a size of the mesh is below 1.
    """
    hosts, per_host = mesh
    if hosts < 1 or per_host < 1:
        raise ClusterError("a mesh needs at least one host and one device", got=str(mesh))
    shapes = ((h, d) for h in _divisors(hosts) for d in _divisors(per_host))
    return tuple(sorted(filter(allowed, shapes), key=lambda shape: (math.prod(shape), shape)))


def place(mesh: Shape, shapes: Iterable[Shape]) -> tuple[tuple[int, ...], ...] | None:
    """Lay a sequence of submeshes on a mesh so that they tile it exactly.

    The free cell that is first row-major must be the corner of some block, so the search branches
    over shapes only (larger first), and a partial tiling is described by how far each column is
    filled and which shapes are left. Equal shapes take their blocks in the order of the sequence.

    Args:
        mesh: hosts and devices per host.
        shapes: one shape a stage, in stage order.

    Returns:
        Device ids of each stage, row-major in its block; None if the shapes do not tile the mesh
        (or the work limit `PLACEMENT_STATES` ends the search).
    """
    sequence = tuple(shapes)
    if sum(map(math.prod, sequence)) != math.prod(mesh):
        return None
    blocks = _tile(mesh, sequence)
    if blocks is None:
        return None
    corners: dict[Shape, list[int]] = {}
    for block in sorted(blocks, key=lambda block: block.corner, reverse=True):
        corners.setdefault(block.shape, []).append(block.corner)
    per_host = mesh[1]
    return tuple(_devices(corners[shape].pop(), shape, per_host) for shape in sequence)


def placeable(mesh: Shape, shapes: Iterable[Shape]) -> bool:
    """Whether `place` finds a tiling; the order of the shapes does not matter."""
    return place(mesh, shapes) is not None


@dataclass(frozen=True, slots=True)
class _Block:
    """A shape and the device id of its first cell."""

    shape: Shape
    corner: int


@dataclass(frozen=True, slots=True)
class _Partial:
    """Hosts filled in each column, how many of each shape are left, and the blocks laid so far."""

    filled: tuple[int, ...]
    left: tuple[int, ...]
    laid: tuple[_Block, _Laid] | None


_Laid = tuple[_Block, "_Laid"] | None


def _tile(mesh: Shape, sequence: tuple[Shape, ...]) -> tuple[_Block, ...] | None:
    hosts, per_host = mesh
    kinds = tuple(sorted(set(sequence), key=lambda shape: (math.prod(shape), shape), reverse=True))
    start = _Partial((0,) * per_host, tuple(map(sequence.count, kinds)), None)
    stack = [start]
    seen = {(start.filled, start.left)}
    while stack and len(seen) <= PLACEMENT_STATES:
        partial = stack.pop()
        if not any(partial.left):
            return _unroll(partial.laid)
        for child in reversed(_children(partial, kinds, hosts)):
            key = (child.filled, child.left)
            if key not in seen:
                seen.add(key)
                stack.append(child)
    return None


def _children(partial: _Partial, kinds: tuple[Shape, ...], hosts: int) -> list[_Partial]:
    """The partial tilings with one more block, on the first free cell."""
    filled = partial.filled
    row = min(filled)
    column = filled.index(row)
    width = next((i for i, f in enumerate(filled[column:]) if f != row), len(filled) - column)
    children = []
    for index, (tall, wide) in enumerate(kinds):
        if not partial.left[index] or wide > width or row + tall > hosts:
            continue
        after = filled[:column] + (row + tall,) * wide + filled[column + wide :]
        left = (*partial.left[:index], partial.left[index] - 1, *partial.left[index + 1 :])
        block = _Block((tall, wide), row * len(filled) + column)
        children.append(_Partial(after, left, (block, partial.laid)))
    return children


def _unroll(laid: _Laid) -> tuple[_Block, ...]:
    blocks = []
    while laid is not None:
        block, laid = laid
        blocks.append(block)
    return tuple(blocks)


def _devices(corner: int, shape: Shape, per_host: int) -> tuple[int, ...]:
    tall, wide = shape
    return tuple(corner + row * per_host + column for row in range(tall) for column in range(wide))


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, number + 1) if number % d == 0)
