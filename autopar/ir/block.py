"""Where one device's block of a value sits in the value's global index space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding

AxisIndex = Callable[[str], Any]
"""Position of this device along a mesh axis: an int, or a traced int32 scalar."""


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangular block of a value.

    Attributes:
        starts: first global index per dim; ints, or traced int32 scalars where the block's
            place depends on the device or on the micro-batch.
        shape: local size per dim.
    """

    starts: tuple[Any, ...]
    shape: tuple[int, ...]

    def is_whole(self, dim: int) -> bool:
        """Whether the block is known to start at 0 along `dim`."""
        return isinstance(self.starts[dim], int) and self.starts[dim] == 0


def shard_index(axes: tuple[str, ...], mesh: Mesh, axis_index: AxisIndex) -> Any:
    """Row-major position of this device among the blocks made by `axes` (major to minor)."""
    index: Any = 0
    for axis in axes:
        index = index * mesh.axis_size(axis) + axis_index(axis)
    return index


def block_of(
    sharding: Sharding, shape: tuple[int, ...], mesh: Mesh, axis_index: AxisIndex
) -> Block:
    """The block of a value of global `shape` that the device at `axis_index` holds."""
    local = sharding.local_shape(shape, mesh)
    starts = tuple(
        shard_index(axes, mesh, axis_index) * size if axes else 0
        for axes, size in zip(sharding.dims, local, strict=True)
    )
    return Block(starts, local)


def device_block(sharding: Sharding, shape: tuple[int, ...], mesh: Mesh, device: int) -> Block:
    """The block that the device at a row-major position of the mesh holds; its starts are ints."""
    at = dict(zip(mesh.names, mesh.coordinates(device), strict=True))
    return block_of(sharding, shape, mesh, lambda axis: at[axis])
