from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.ir.block import Block, block_of, shard_index
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import parse_sharding
from tests.oracles.simulated_mesh import cut, places

MESH = Mesh(("x", "y", "z"), (2, 3, 2))


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("[]", ()),
        ("[x,-,y]", (4, 5, 3)),
        ("[x.y,z]", (12, 2)),
        ("[y.x,z]", (12, 2)),
        ("[z.y.x]+w", (24,)),
        ("[-,z]+x", (3, 8)),
    ],
)
def test_blocks_are_those_of_the_simulated_mesh(text: str, shape: tuple[int, ...]) -> None:
    sharding = parse_sharding(text)
    for place in places(MESH):
        block = block_of(sharding, shape, MESH, place.__getitem__)
        wanted = cut(sharding, shape, MESH, place)
        made = tuple(slice(s, s + n) for s, n in zip(block.starts, block.shape, strict=True))
        assert made == wanted


def test_shard_index_counts_the_last_axis_fastest() -> None:
    place = {"x": 1, "y": 2, "z": 0}.__getitem__
    assert shard_index((), MESH, place) == 0
    assert shard_index(("x", "y"), MESH, place) == 5
    assert shard_index(("y", "x"), MESH, place) == 5
    assert shard_index(("z", "y"), MESH, place) == 2
    assert shard_index(("y", "z"), MESH, place) == 4


def test_is_whole_is_known_only_for_unsplit_dims() -> None:
    block = block_of(parse_sharding("[-,x]"), (4, 4), MESH, {"x": 1}.__getitem__)
    assert block == Block((0, 2), (4, 2))
    assert block.is_whole(0)
    assert not block.is_whole(1)

    def start(index: jax.Array) -> jax.Array:
        traced = block_of(parse_sharding("[-,x]"), (4, 4), MESH, {"x": index}.__getitem__)
        assert traced.is_whole(0)
        assert not traced.is_whole(1)
        assert traced.shape == (4, 2)
        return jnp.asarray(traced.starts[1])

    assert int(jax.jit(start)(np.int32(1))) == 2
