"""A sharding says, per dim, which mesh axes split it, and which axes are still to be summed.

The text form is `[x,-,y.z]` for a rank-3 value whose dim 0 is split over axis x and whose dim 2
is split over y (major) and z (minor); `[x,-]+y` is also *partial* over y: the value is the sum of
the blocks held along y. The empty brackets `[]` are a scalar.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from autopar.errors import VerifyError
from autopar.ir.mesh import Mesh

_AXES = r"\w+(?:\.\w+)*"
_DIM = f"(?:-|{_AXES})"
_TEXT = re.compile(rf"\[(?P<dims>(?:{_DIM}(?:,{_DIM})*)?)\](?:\+(?P<partial>{_AXES}))?")


@dataclass(frozen=True, slots=True)
class Sharding:
    """Where the blocks of one value lie.

    Attributes:
        dims: per tensor dim, the mesh axes that split it, major to minor.
        partial: axes over which the blocks must still be summed, in mesh order.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()

    @property
    def split_axes(self) -> tuple[str, ...]:
        """Axes that split some dim, in dim order."""
        return tuple(axis for axes in self.dims for axis in axes)

    def shards(self, dim: int, mesh: Mesh) -> int:
        """Number of blocks along `dim`."""
        return math.prod(mesh.axis_size(axis) for axis in self.dims[dim])

    def local_shape(self, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
        """Shape of one device's block of a value of global `shape`."""
        return tuple(size // self.shards(dim, mesh) for dim, size in enumerate(shape))

    def local_size(self, shape: tuple[int, ...], mesh: Mesh) -> int:
        """Elements of one device's block."""
        return math.prod(self.local_shape(shape, mesh))

    def with_dim(self, dim: int, axes: tuple[str, ...]) -> Sharding:
        """The same sharding with `dim` split over `axes`."""
        return Sharding((*self.dims[:dim], axes, *self.dims[dim + 1 :]), self.partial)

    def __str__(self) -> str:
        body = ",".join(".".join(axes) if axes else "-" for axes in self.dims)
        return f"[{body}]" + (f"+{'.'.join(self.partial)}" if self.partial else "")


def replicated(rank: int) -> Sharding:
    """Every device holds the whole value."""
    return Sharding(((),) * rank)


def parse_sharding(text: str) -> Sharding:
    """Read the text form back.

    Raises:
        VerifyError: the text is not of that form.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise VerifyError("a sharding cannot be read", got=text, why="want [x,-,y.z] or [x]+y")
    cells = match["dims"].split(",") if match["dims"] else []
    dims = tuple(() if cell == "-" else tuple(cell.split(".")) for cell in cells)
    return Sharding(dims, tuple(match["partial"].split(".")) if match["partial"] else ())


def check_sharding(sharding: Sharding, shape: tuple[int, ...], mesh: Mesh) -> None:
    """Verify rank, axis names, single use of each axis, mesh order of `partial`, divisibility.

    Raises:
        VerifyError: naming the first broken invariant.
    """
    got = f"{sharding} on shape {shape}, mesh {mesh}"
    if len(sharding.dims) != len(shape):
        raise VerifyError("a sharding has another rank than its value", got=got)
    used = [*sharding.split_axes, *sharding.partial]
    if unknown := [axis for axis in used if axis not in mesh.names]:
        raise VerifyError(f"axis {unknown[0]!r} is not on the mesh", got=got)
    if len(used) != len(set(used)):
        raise VerifyError("a mesh axis is used twice in one sharding", got=got)
    if sharding.partial != tuple(n for n in mesh.names if n in sharding.partial):
        raise VerifyError("partial axes must stand in mesh order", got=got)
    for dim, size in enumerate(shape):
        if size % sharding.shards(dim, mesh):
            raise VerifyError(f"dim {dim} of size {size} does not divide", got=got)
