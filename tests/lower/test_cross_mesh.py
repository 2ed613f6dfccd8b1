"""Tile plans carried out in numpy: bytes equal, none twice, none that are not wanted."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import VerifyError
from autopar.ir.block import block_of
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding, parse_sharding, replicated
from autopar.lower.cross_mesh import (
    TilePlan,
    itemsize,
    link_bytes,
    plan_tiles,
    source_slice,
    target_slices,
    total_bytes,
    verify_tiles,
)
from autopar.lower.instruction_text import tile_plan_from_json, tile_plan_to_json

Array = np.ndarray[Any, Any]

MESHES = [(1,), (2,), (3,), (4,), (8,), (2, 2), (2, 4), (4, 2), (3, 2), (2, 2, 2)]
DTYPES = ["float32", "bfloat16", "int8", "bool", "complex64", "float16"]


def random_sharding(rng: random.Random, mesh: Mesh, sizes: list[int]) -> Sharding:
    """Axes given to random dims; sizes grow so that they divide."""
    dims: list[list[str]] = [[] for _ in sizes]
    names = list(mesh.names)
    rng.shuffle(names)
    for name in names:
        if dims and rng.random() < 0.7:
            dims[rng.randrange(len(dims))].append(name)
    return Sharding(tuple(map(tuple, dims)))


def blocks_of(array: Array, mesh: Mesh, sharding: Sharding) -> list[Array]:
    found = []
    for device in range(mesh.size):
        at = dict(zip(mesh.names, mesh.coordinates(device), strict=True))
        block = block_of(sharding, array.shape, mesh, at.__getitem__)
        cut = tuple(slice(s, s + n) for s, n in zip(block.starts, block.shape, strict=True))
        found.append(array[cut])
    return found


def random_plan(seed: int) -> tuple[TilePlan, Array]:
    rng = random.Random(seed)
    source_mesh, target_mesh = (Mesh.of(*rng.choice(MESHES)) for _ in range(2))
    rank = rng.randint(0, 3)
    sizes = [1] * rank
    source, target = (random_sharding(rng, m, sizes) for m in (source_mesh, target_mesh))
    for dim in range(rank):
        parts = (source.shards(dim, source_mesh), target.shards(dim, target_mesh))
        sizes[dim] = int(np.lcm(*parts)) * rng.choice([1, 1, 2, 3])
        if rng.random() < 0.05:
            sizes[dim] = 0
    dtype = rng.choice(DTYPES)
    values = np.random.default_rng(seed).integers(0, 100, sizes)
    array = np.asarray(values).astype(jnp.dtype(dtype))
    plan = plan_tiles(tuple(sizes), dtype, source_mesh, source, target_mesh, target)
    return plan, array


def carry_out(plan: TilePlan, array: Array) -> None:
    """Move the tiles; every target block is filled exactly once, with the right bytes."""
    held = blocks_of(array, plan.source_mesh, plan.source)
    wanted = blocks_of(array, plan.target_mesh, plan.target)
    made = [np.zeros(block.shape, array.dtype) for block in wanted]
    filled = [np.zeros(block.shape, int) for block in wanted]
    received = np.zeros(array.shape, int)
    for tile in plan.tiles:
        part = held[tile.source][source_slice(plan, tile)]
        assert part.shape == tile.shape
        received[tuple(slice(s, s + n) for s, n in zip(tile.starts, tile.shape, strict=True))] += 1
        for device, cut in target_slices(plan, tile):
            made[device][cut] = part
            filled[device][cut] += 1
    for want, got, times in zip(wanted, made, filled, strict=True):
        assert got.tobytes() == want.tobytes()
        assert (times == 1).all()
    # The receiving worker owns the whole mesh: each element comes once, and only if wanted.
    assert (received == 1).all()
    assert total_bytes(plan) == array.nbytes


@pytest.mark.parametrize("block", range(10))
def test_random_transfers(block: int, *, full: bool) -> None:
    count = 100 if full else 25
    for seed in range(block * count, (block + 1) * count):
        plan, array = random_plan(seed)
        verify_tiles(plan)
        carry_out(plan, array)
        assert tile_plan_from_json(tile_plan_to_json(plan)) == plan


def test_replicas_share_the_sending() -> None:
    plan = plan_tiles(
        (16,), "float32", Mesh.of(4), replicated(1), Mesh.of(4), parse_sharding("[x]")
    )
    assert sorted(tile.source for tile in plan.tiles) == [0, 1, 2, 3]
    assert set(link_bytes(plan).values()) == {16}


def test_a_replicated_target_gets_each_byte_once() -> None:
    plan = plan_tiles(
        (16,), "float32", Mesh.of(4), parse_sharding("[x]"), Mesh.of(8), replicated(1)
    )
    assert total_bytes(plan) == 64
    assert all(len(tile.targets) == 8 for tile in plan.tiles)


def test_a_target_on_two_workers_is_sent_to_both() -> None:
    owners = (0, 0, 1, 1)
    plan = plan_tiles(
        (8,),
        "float32",
        Mesh.of(2),
        parse_sharding("[x]"),
        Mesh.of(4),
        replicated(1),
        target_owner=owners,
    )
    for tile in plan.tiles:
        assert len({owners[device] for device in tile.targets}) == 1
    assert total_bytes(plan) == 64


def test_large_meshes_are_quick_to_plan() -> None:
    plan = plan_tiles(
        (640, 640),
        "bfloat16",
        Mesh.of(8, 8),
        parse_sharding("[x,y]"),
        Mesh.of(8, 8),
        parse_sharding("[y,x]"),
    )
    verify_tiles(plan)
    assert len(plan.tiles) == 64
    assert itemsize("bfloat16") == 2


@pytest.mark.parametrize("how", ["drop", "double", "shift", "source"])
def test_a_damaged_plan_is_found(how: str) -> None:
    plan = plan_tiles(
        (8, 4), "float32", Mesh.of(2), parse_sharding("[x,-]"), Mesh.of(4), parse_sharding("[-,x]")
    )
    tiles = list(plan.tiles)
    if how == "drop":
        tiles.pop()
    elif how == "double":
        tiles.append(tiles[0])
    elif how == "shift":
        tiles[0] = replace(tiles[0], starts=(1, 0))
    else:
        tiles[0] = replace(tiles[0], source=1 - tiles[0].source)
    with pytest.raises(VerifyError):
        verify_tiles(replace(plan, tiles=tuple(tiles)))


def test_pending_sums_cannot_travel() -> None:
    with pytest.raises(VerifyError, match="pending"):
        plan_tiles((4,), "float32", Mesh.of(2), parse_sharding("[-]+x"), Mesh.of(2), replicated(1))
