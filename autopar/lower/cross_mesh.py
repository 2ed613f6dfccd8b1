"""From any sharding on one mesh to any sharding on another: a pure plan of tiles.

A tile is a part of the array that one block of the source and one block of the target have in
common. Each travels once to a worker, however many of its devices want it (the receiver copies),
and from one of the devices that hold it: the one with the fewest bytes to send so far, largest
tiles first. The greedy rule leaves no sender with more than 4/3 of the least possible where all of
them hold everything (Graham, 1969).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from autopar.errors import VerifyError
from autopar.ir.block import Block, device_block
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding, check_sharding


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangular part of the array that one source device holds and target devices want.

    Attributes:
        source: position of the sending device in its mesh, row-major.
        targets: positions of the devices that take it in theirs; it travels once, to the first.
        starts, shape: where it is in the global array.
    """

    source: int
    targets: tuple[int, ...]
    starts: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TilePlan:
    """How one array gets from mesh to mesh.

    Attributes:
        shape, dtype: of the global array.
        source_mesh, source: how it lies now; nothing pending.
        target_mesh, target: how it shall lie.
        tiles: in the order in which both sides post them.
    """

    shape: tuple[int, ...]
    dtype: str
    source_mesh: Mesh
    source: Sharding
    target_mesh: Mesh
    target: Sharding
    tiles: tuple[Tile, ...]


Slices = tuple[slice, ...]


def plan_tiles(  # noqa: PLR0913 - both ends in full
    shape: tuple[int, ...],
    dtype: str,
    source_mesh: Mesh,
    source: Sharding,
    target_mesh: Mesh,
    target: Sharding,
    *,
    target_owner: Sequence[int] = (),
) -> TilePlan:
    """Plan a transfer.

    Args:
        shape, dtype: of the global array.
        source_mesh, source: how it lies.
        target_mesh, target: how it shall lie.
        target_owner: per target device the worker that owns it, where there are several.

    Raises:
        VerifyError: a sharding does not fit, or has pending sums.
    """
    for sharding, mesh in ((source, source_mesh), (target, target_mesh)):
        check_sharding(sharding, shape, mesh)
        if sharding.partial:
            raise VerifyError("pending sums cannot travel", got=str(sharding))
    owners = tuple(target_owner) or (0,) * target_mesh.size
    holders = _holders(shape, source_mesh, source)
    wanted = _holders(shape, target_mesh, target)
    parts = []
    for block, devices in wanted.items():
        by_worker: dict[int, list[int]] = {}
        for device in devices:
            by_worker.setdefault(owners[device], []).append(device)
        for held, senders in holders.items():
            low = tuple(map(max, block.starts, held.starts))
            high = tuple(
                min(a + n, b + k)
                for a, n, b, k in zip(
                    block.starts, block.shape, held.starts, held.shape, strict=True
                )
            )
            part = tuple(h - w for h, w in zip(high, low, strict=True))
            if any(size <= 0 for size in part):
                continue
            parts += [(low, part, tuple(group), senders) for group in by_worker.values()]
    return TilePlan(
        shape, dtype, source_mesh, source, target_mesh, target, _with_senders(parts, source_mesh)
    )


Part = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _with_senders(parts: Sequence[Part], mesh: Mesh) -> tuple[Tile, ...]:
    """Give each part a sender: largest first, to the least loaded device that holds it."""
    load = [0] * mesh.size
    chosen: dict[int, int] = {}
    order = sorted(range(len(parts)), key=lambda n: (-math.prod(parts[n][1]), n))
    for number in order:
        _, part, _, senders = parts[number]
        device = min(senders, key=lambda d: (load[d], d))
        load[device] += math.prod(part)
        chosen[number] = device
    return tuple(
        Tile(chosen[number], targets, starts, part)
        for number, (starts, part, targets, _) in enumerate(parts)
    )


def _holders(
    shape: tuple[int, ...], mesh: Mesh, sharding: Sharding
) -> Mapping[Block, tuple[int, ...]]:
    """Distinct blocks with the devices that hold each, in device order."""
    found: dict[Block, list[int]] = {}
    for device in range(mesh.size):
        found.setdefault(device_block(sharding, shape, mesh, device), []).append(device)
    return {block: tuple(devices) for block, devices in found.items()}


def _source_block(plan: TilePlan, device: int) -> Block:
    return device_block(plan.source, plan.shape, plan.source_mesh, device)


def _target_block(plan: TilePlan, device: int) -> Block:
    return device_block(plan.target, plan.shape, plan.target_mesh, device)


def _inside(tile: Tile, block: Block) -> Slices:
    places = zip(tile.starts, block.starts, tile.shape, strict=True)
    return tuple(slice(a - b, a - b + n) for a, b, n in places)


def source_slice(plan: TilePlan, tile: Tile) -> Slices:
    """Where a tile is in its sender's block."""
    return _inside(tile, _source_block(plan, tile.source))


def target_slices(plan: TilePlan, tile: Tile) -> tuple[tuple[int, Slices], ...]:
    """Per device that takes a tile, where it goes in that device's block."""
    return tuple((device, _inside(tile, _target_block(plan, device))) for device in tile.targets)


def itemsize(dtype: str) -> int:
    """Bytes of one element of a numpy or JAX dtype name."""
    return int(jnp.dtype(dtype).itemsize)


def link_bytes(plan: TilePlan) -> Mapping[tuple[int, int], int]:
    """Bytes from each sending device to the first device that takes them."""
    found: dict[tuple[int, int], int] = {}
    for tile in plan.tiles:
        pair = (tile.source, tile.targets[0])
        found[pair] = found.get(pair, 0) + math.prod(tile.shape) * itemsize(plan.dtype)
    return found


def total_bytes(plan: TilePlan) -> int:
    """Bytes of all tiles: what crosses between workers."""
    return sum(link_bytes(plan).values())


def verify_tiles(plan: TilePlan) -> None:
    """Prove that every target block is covered exactly once, from blocks that hold the bytes.

    Raises:
        VerifyError: naming the device and the tile.
    """
    covered = [0] * plan.target_mesh.size
    boxes: list[list[Tile]] = [[] for _ in range(plan.target_mesh.size)]
    for tile in plan.tiles:
        _check_inside(tile, _source_block(plan, tile.source), f"source device {tile.source}")
        for device in tile.targets:
            _check_inside(tile, _target_block(plan, device), f"target device {device}")
            covered[device] += math.prod(tile.shape)
            boxes[device].append(tile)
    size = plan.target.local_size(plan.shape, plan.target_mesh)
    for device, tiles in enumerate(boxes):
        for one, other in itertools.combinations(tiles, 2):
            if _overlap(one, other):
                raise VerifyError(f"target device {device} gets bytes twice", got=f"{one}, {other}")
        if covered[device] != size:
            raise VerifyError(
                f"target device {device} gets {covered[device]} of {size} elements", got=str(plan)
            )


def _check_inside(tile: Tile, block: Block, who: str) -> None:
    inside = all(
        b <= a and a + n <= b + k
        for a, n, b, k in zip(tile.starts, tile.shape, block.starts, block.shape, strict=True)
    )
    if not inside:
        raise VerifyError(f"a tile is outside the block of {who}", got=str(tile))


def _overlap(one: Tile, other: Tile) -> bool:
    return all(
        a < b + k and b < a + n
        for a, n, b, k in zip(one.starts, one.shape, other.starts, other.shape, strict=True)
    )
