"""Submesh shapes and their placement, against trying every corner."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest

from autopar.errors import ClusterError
from autopar.solver.inter.submesh import (
    Shape,
    divisor_submeshes,
    nested,
    place,
    placeable,
    within_host,
)
from tests.oracles.brute_stages import tiles


def test_divisor_shapes() -> None:
    assert divisor_submeshes((1, 1)) == ((1, 1),)
    assert divisor_submeshes((2, 4)) == ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (2, 4))
    assert divisor_submeshes((2, 6), allowed=within_host) == ((1, 1), (1, 2), (1, 3), (1, 6))
    assert divisor_submeshes((4, 4), allowed=nested((4, 4))) == (
        *((1, 1), (1, 2), (1, 4)),
        *((2, 4), (4, 4)),
    )
    with pytest.raises(ClusterError, match="at least one host"):
        divisor_submeshes((0, 4))


def multisets(mesh: Shape) -> Iterator[tuple[Shape, ...]]:
    """Every multiset of divisor shapes whose sizes add up to the mesh."""
    shapes = divisor_submeshes(mesh)

    def extend(index: int, left: int) -> Iterator[tuple[Shape, ...]]:
        if left == 0:
            yield ()
        elif index < len(shapes):
            size = math.prod(shapes[index])
            for count in range(left // size + 1):
                for rest in extend(index + 1, left - count * size):
                    yield (shapes[index],) * count + rest

    return extend(0, math.prod(mesh))


@pytest.mark.parametrize("mesh", [(1, 1), (1, 6), (2, 2), (2, 3), (2, 4), (3, 3), (2, 6), (4, 2)])
def test_placed_exactly_where_a_tiling_exists(mesh: Shape) -> None:
    for shapes in multisets(mesh):
        blocks = place(mesh, shapes)
        assert (blocks is not None) == tiles(mesh, tuple(sorted(shapes, reverse=True))), shapes
        if blocks is not None:
            check_blocks(mesh, shapes, blocks)


def check_blocks(
    mesh: Shape, shapes: tuple[Shape, ...], blocks: tuple[tuple[int, ...], ...]
) -> None:
    assert sorted(itertools.chain.from_iterable(blocks)) == list(range(math.prod(mesh)))
    for (tall, wide), block in zip(shapes, blocks, strict=True):
        row, column = divmod(block[0], mesh[1])
        assert block == tuple(
            (row + i) * mesh[1] + column + j for i in range(tall) for j in range(wide)
        )


@pytest.mark.parametrize("mesh", [(2, 4), (4, 4)])
def test_nested_shapes_always_fit(mesh: Shape) -> None:
    allowed = nested(mesh)
    seen = 0
    for shapes in multisets(mesh):
        if all(map(allowed, shapes)):
            seen += 1
            assert placeable(mesh, shapes)
    assert seen > 5


def test_a_large_nested_mesh_is_laid_at_once() -> None:
    shapes = ((1, 1),) * 64 + ((1, 2),) * 32 + ((1, 8),) * 8 + ((16, 8),)
    blocks = place((40, 8), shapes)
    assert blocks is not None
    check_blocks((40, 8), shapes, blocks)


def test_equal_shapes_go_in_stage_order() -> None:
    assert place((1, 4), ((1, 1), (1, 2), (1, 1))) == ((2,), (0, 1), (3,))
    assert place((2, 2), ((2, 1), (2, 1))) == ((0, 2), (1, 3))


def test_what_does_not_fit() -> None:
    assert place((1, 4), ((1, 2),)) is None
    assert place((2, 6), ((2, 3), (1, 6))) is None
    assert place((1, 4), ((2, 2),)) is None
