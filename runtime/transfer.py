"""Carries out a tile plan: arrays of one mesh leave as tiles and become arrays of another mesh.

A plan of `n` tiles is `n` messages. The message of tile `i` of a transfer with tag `t` has the tag
`t * TILES_PER_TAG + i`, so transfers never share a message tag; both sides post their messages in
the order of the tiles.

In host memory a source device's block is read without a copy where JAX allows it, and each target
block is filled in memory aligned as XLA wants it, which JAX then takes over without another copy.
In device memory tiles are sliced and joined by small programs that are compiled ahead of time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from autopar.errors import TransportError
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.lower.cross_mesh import Slices, TilePlan, source_slice, target_slices
from autopar.lower.spmd import jax_mesh, partition_spec
from autopar.runtime.transport.base import ArraySpec, Request, Transport
from autopar.runtime.transport.buffers import ALIGNMENT, aligned_empty, contiguous

TILES_PER_TAG = 4096
"""Message tags that belong to one transfer tag; no plan may have more tiles."""


def message_tag(tag: int, tile: int) -> int:
    """The tag of the message that carries a tile of a transfer."""
    return tag * TILES_PER_TAG + tile


def named_sharding(sharding: Sharding, mesh: Mesh, devices: Sequence[Any]) -> NamedSharding:
    """A boundary sharding over real devices."""
    return NamedSharding(jax_mesh(mesh, devices), partition_spec(sharding))


def _check_count(plan: TilePlan) -> None:
    if len(plan.tiles) > TILES_PER_TAG:
        raise TransportError(
            f"a transfer has more than {TILES_PER_TAG} tiles",
            got=f"{len(plan.tiles)} tiles for {plan.source} on {plan.source_mesh} to "
            f"{plan.target} on {plan.target_mesh}",
            remedy="meshes whose axes divide each other",
        )


@dataclass(frozen=True, slots=True)
class _Cut:
    """One tile as the sender sees it."""

    device: Any
    slices: Slices
    whole: bool
    on_device: Callable[[Any], Any] | None = None


class Sender:
    """The sending half of a plan, prepared for the devices of its source mesh."""

    def __init__(self, plan: TilePlan, devices: Sequence[Any], *, memory: str = "host") -> None:
        _check_count(plan)
        self._device_memory = memory == "device"
        self._cuts = tuple(self._cut(plan, tile, devices) for tile in range(len(plan.tiles)))

    def _cut(self, plan: TilePlan, index: int, devices: Sequence[Any]) -> _Cut:
        tile = plan.tiles[index]
        slices = source_slice(plan, tile)
        block = plan.source.local_shape(plan.shape, plan.source_mesh)
        whole, device = tile.shape == block, devices[tile.source]
        program = None
        if self._device_memory and not whole:
            given = _struct(block, plan.dtype, device)
            program = jax.jit(partial(_take, slices)).lower(given).compile()
        return _Cut(device, slices, whole, program)

    def post(self, transport: Transport, peer: int, tag: int, array: Any) -> tuple[Request, ...]:
        """Start sending all tiles of an array; its memory must not change until all are done."""
        blocks = {shard.device: shard.data for shard in array.addressable_shards}
        if not self._device_memory:
            blocks = {cut.device: np.asarray(blocks[cut.device]) for cut in self._cuts}
        return tuple(
            transport.isend(peer, message_tag(tag, index), _tile(cut, blocks[cut.device]))
            for index, cut in enumerate(self._cuts)
        )


def _tile(cut: _Cut, block: Any) -> Any:
    if cut.on_device is not None:
        return cut.on_device(block)
    if cut.whole:
        return block
    return contiguous(block[cut.slices])


def _take(slices: Slices, block: Any) -> Any:
    return jax.lax.slice(block, [s.start for s in slices], [s.stop for s in slices])


def _struct(shape: tuple[int, ...], dtype: Any, device: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=SingleDeviceSharding(device))


@dataclass(frozen=True, slots=True)
class _Fill:
    """One target block: which tiles lie where in it."""

    device: Any
    shape: tuple[int, ...]
    parts: tuple[tuple[int, Slices], ...]
    whole: bool
    on_device: Callable[..., Any] | None = None


class Receiver:
    """The receiving half of a plan, prepared for the devices of its target mesh.

    Raises:
        TransportError: the tiles do not fill the target blocks.
    """

    def __init__(self, plan: TilePlan, devices: Sequence[Any], *, memory: str = "host") -> None:
        _check_count(plan)
        self._plan = plan
        self._dtype = jnp.dtype(plan.dtype)
        self._device_memory = memory == "device"
        self._sharding = named_sharding(plan.target, plan.target_mesh, devices)
        self._specs = tuple(ArraySpec(tile.shape, plan.dtype) for tile in plan.tiles)
        parts: list[list[tuple[int, Slices]]] = [[] for _ in devices]
        for index, tile in enumerate(plan.tiles):
            for position, slices in target_slices(plan, tile):
                parts[position].append((index, slices))
        self._fills = tuple(
            self._fill(position, device, tuple(parts[position]))
            for position, device in enumerate(devices)
        )

    def _fill(self, position: int, device: Any, parts: tuple[tuple[int, Slices], ...]) -> _Fill:
        plan = self._plan
        block = plan.target.local_shape(plan.shape, plan.target_mesh)
        filled = sum(math.prod(plan.tiles[index].shape) for index, _ in parts)
        if filled != math.prod(block):
            raise TransportError(
                "the tiles of a transfer do not fill a target block",
                got=f"{filled} of {math.prod(block)} elements on device {position} of "
                f"{plan.target_mesh}",
            )
        whole = len(parts) == 1 and plan.tiles[parts[0][0]].shape == block
        program = None
        if self._device_memory and not whole:
            given = [_struct(plan.tiles[index].shape, plan.dtype, device) for index, _ in parts]
            join = partial(_join, block, self._dtype, [slices for _, slices in parts])
            place = SingleDeviceSharding(device)
            program = jax.jit(join, out_shardings=place).lower(*given).compile()
        return _Fill(device, block, parts, whole, program)

    @property
    def specs(self) -> tuple[ArraySpec, ...]:
        """What arrives, tile by tile."""
        return self._specs

    def post(self, transport: Transport, peer: int, tag: int) -> tuple[Request, ...]:
        """Expect all tiles."""
        return tuple(
            transport.irecv(peer, message_tag(tag, index), spec)
            for index, spec in enumerate(self._specs)
        )

    def join(self, requests: Sequence[Request]) -> Any:
        """The received array on its mesh; all requests must be done."""
        tiles = [request.result() for request in requests]
        build = self._on_device if self._device_memory else self._on_host
        blocks = [build(fill, tiles) for fill in self._fills]
        return jax.make_array_from_single_device_arrays(self._plan.shape, self._sharding, blocks)

    def _on_device(self, fill: _Fill, tiles: Sequence[Any]) -> Any:
        parts = [jax.device_put(tiles[index], fill.device) for index, _ in fill.parts]
        return parts[0] if fill.on_device is None else fill.on_device(*parts)

    def _on_host(self, fill: _Fill, tiles: Sequence[Any]) -> Any:
        if fill.whole:
            tile = tiles[fill.parts[0][0]]
            if tile.ctypes.data % ALIGNMENT == 0:
                return jax.device_put(tile, fill.device)
        block = aligned_empty(fill.shape, self._dtype)
        for index, slices in fill.parts:
            block[slices] = tiles[index]
        return jax.device_put(block, fill.device)


def _join(shape: tuple[int, ...], dtype: Any, places: Sequence[Slices], *tiles: Any) -> Any:
    block = jnp.zeros(shape, dtype)
    for slices, tile in zip(places, tiles, strict=True):
        block = jax.lax.dynamic_update_slice(block, tile, [s.start for s in slices])
    return block
