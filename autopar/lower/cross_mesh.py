"""From any sharding on one mesh to any sharding on another: a pure plan of tiles."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding


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
