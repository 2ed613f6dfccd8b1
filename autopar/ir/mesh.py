"""A logical mesh: named axes laid row-major over a line of devices.

Device `d` of a mesh `x=2,y=4` has the coordinates `(d // 4, d % 4)`: the last axis is the
innermost, its devices are neighbours. How the axes fall on the levels of real hardware is plain
integer arithmetic on strides, and is worked out here by `split_over_levels`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from autopar.errors import ArgumentError

DEFAULT_AXIS_NAMES = ("x", "y", "z", "w")
"""Names of the axes of a mesh that is given by its sizes alone, outermost first."""

_MESH_REMEDY = 'write a mesh as "x=2,y=4", as "2x4", or with one -1: "dp=-1,tp=4"'


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes and their sizes, outermost first.

    Attributes:
        names: one name an axis; each a Python identifier, none twice.
        sizes: devices along each axis, at least 1.

    Raises:
        ArgumentError: if names and sizes do not fit each other, or a size is below 1.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        got = f"names={self.names!r}, sizes={self.sizes!r}"
        if not self.names or len(self.names) != len(self.sizes):
            raise ArgumentError("a mesh needs one name for each size", got=got)
        if len(set(self.names)) != len(self.names):
            raise ArgumentError("a mesh axis name stands twice", got=got)
        if bad := [name for name in self.names if not name.isidentifier()]:
            raise ArgumentError(f"a mesh axis cannot be named {bad[0]!r}", got=got)
        if any(not isinstance(s, int) or isinstance(s, bool) or s < 1 for s in self.sizes):
            raise ArgumentError("the size of a mesh axis is a whole number from 1", got=got)

    @classmethod
    def of(cls, *sizes: int) -> Mesh:
        """A mesh with the default names: `Mesh.of(2, 4)` is `x=2,y=4`.

        Raises:
            ArgumentError: if there are more sizes than default names.
        """
        if len(sizes) > len(DEFAULT_AXIS_NAMES):
            raise ArgumentError(
                f"a mesh of more than {len(DEFAULT_AXIS_NAMES)} axes needs names",
                got=repr(sizes),
                remedy="Mesh(names, sizes)",
            )
        return cls(DEFAULT_AXIS_NAMES[: len(sizes)], tuple(sizes))

    @classmethod
    def parse(cls, text: str, *, devices: int | None = None) -> Mesh:
        """Read `"x=2,y=4"` or `"2x4"`; one size may be -1 if `devices` is given.

        Args:
            text: the axes, outermost first.
            devices: how many devices the mesh must have; -1 stands for what is left of them.

        Raises:
            ArgumentError: if the text is no mesh, or its size is not `devices`.
        """
        separator = "," if "=" in text else "[x,]"
        parts = [part.strip() for part in re.split(separator, text.strip().strip("()"))]
        parts = parts[:-1] if len(parts) > 1 and not parts[-1] else parts
        named = [re.fullmatch(r"(?:(\w+)\s*=\s*)?(-?\d+)", part) for part in parts]
        matches = [match for match in named if match is not None]
        if len(matches) != len(parts) or len({match[1] is None for match in matches}) != 1:
            raise ArgumentError("not a mesh", got=repr(text), remedy=_MESH_REMEDY)
        sizes = _fill(tuple(int(match[2]) for match in matches), devices, text)
        if matches[0][1] is None:
            return cls.of(*sizes)
        return cls(tuple(match[1] for match in matches), sizes)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """`(name, size)` of each axis, outermost first."""
        return tuple(zip(self.names, self.sizes, strict=True))

    @property
    def strides(self) -> tuple[int, ...]:
        """Per axis, how many devices apart two neighbours on it are."""
        return _strides(self.sizes)

    def axis_index(self, name: str) -> int:
        """Position of the axis `name`, 0 = outermost.

        Raises:
            ArgumentError: if the mesh has no such axis.
        """
        if name not in self.names:
            raise ArgumentError(
                f"the mesh has no axis {name!r}", got=str(self), remedy=f"one of {self.names}"
            )
        return self.names.index(name)

    def axis_size(self, name: str) -> int:
        """Devices along the axis `name`; raises ArgumentError if there is no such axis."""
        return self.sizes[self.axis_index(name)]

    def coordinates(self, index: int) -> tuple[int, ...]:
        """Position of device `index` on each axis, outermost first.

        Raises:
            ArgumentError: if `index` is not in `range(self.size)`.
        """
        if not 0 <= index < self.size:
            raise ArgumentError(f"the mesh has no device {index}", got=str(self))
        return tuple(
            index // stride % size for stride, size in zip(self.strides, self.sizes, strict=True)
        )

    def index(self, coordinates: tuple[int, ...]) -> int:
        """The device at `coordinates`: the inverse of `coordinates(index)`."""
        if len(coordinates) != len(self.sizes) or any(
            not 0 <= c < size for c, size in zip(coordinates, self.sizes, strict=True)
        ):
            raise ArgumentError(f"the mesh has no device at {coordinates}", got=str(self))
        return sum(c * stride for c, stride in zip(coordinates, self.strides, strict=True))

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The device groups of a collective over `axes`, each in row-major order of `axes`."""
        moving = [self.axis_index(name) for name in axes]
        members: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
        for device in range(self.size):
            at = self.coordinates(device)
            fixed = tuple(c for i, c in enumerate(at) if i not in moving)
            members.setdefault(fixed, []).append((tuple(at[i] for i in moving), device))
        return tuple(tuple(device for _, device in sorted(group)) for group in members.values())

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)


def _fill(sizes: tuple[int, ...], devices: int | None, text: str) -> tuple[int, ...]:
    """Put a size in place of -1, and hold the product against `devices`."""
    if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
        raise ArgumentError(
            "the sizes of a mesh are whole numbers from 1, and at most one -1",
            got=repr(text),
            remedy=_MESH_REMEDY,
        )
    rest = math.prod(size for size in sizes if size != -1)
    if devices is None:
        if -1 in sizes:
            raise ArgumentError(
                "-1 in a mesh needs a number of devices", got=repr(text), remedy="devices=..."
            )
        return sizes
    if devices % rest or (-1 not in sizes and rest != devices) or devices < 1:
        raise ArgumentError(
            f"the mesh does not fit {devices} devices",
            got=repr(text),
            why=f"the given sizes make {rest}",
            remedy=f"sizes whose product is {devices}",
        )
    return tuple(devices // rest if size == -1 else size for size in sizes)


def factorisations(n: int, max_axes: int) -> tuple[tuple[int, ...], ...]:
    """All ordered ways to write `n` as a product of 1 to `max_axes` factors above 1.

    Fewer factors first, then in ascending order: `factorisations(8, 2)` is
    `((8,), (2, 4), (4, 2))`. `n = 1` has the one factorisation `(1,)`.

    Raises:
        ArgumentError: if `n` or `max_axes` is below 1.
    """
    if n < 1 or max_axes < 1:
        raise ArgumentError("factorisations needs n and max_axes from 1", got=f"{n}, {max_axes}")
    found: list[tuple[int, ...]] = [(n,)]
    if max_axes > 1:
        divisors = [d for d in range(2, n // 2 + 1) if n % d == 0]
        found += [(d, *rest) for d in divisors for rest in factorisations(n // d, max_axes - 1)]
    return tuple(sorted(found, key=lambda factors: (len(factors), factors)))


@dataclass(frozen=True, slots=True)
class AxisSplit:
    """How one logical axis falls on the levels of the hardware.

    Attributes:
        pieces: `(level, size)`, innermost level first; the sizes multiply to the axis size.
        crossed: levels that links between neighbours on the axis can belong to.
        even: whether `pieces` tells all. An uneven axis straddles the edge of a level (groups of
            two on hosts of three devices): then some group has links in each crossed level, and
            `pieces` names only the outermost crossed level, with the whole size.
    """

    pieces: tuple[tuple[int, int], ...]
    crossed: tuple[int, ...]
    even: bool


def split_over_levels(mesh: Mesh, level_sizes: tuple[int, ...]) -> tuple[AxisSplit, ...]:
    """For each axis of `mesh`, the levels it spans; level 0 is the outermost.

    An axis of stride `s` and size `n` joins the devices `b, b+s, ..., b+(n-1)s`. Level `j` with
    `t` devices below one of its units and `l` units covers strides from `t` to `t*l`. The axis
    has its full share of the level if the edges `s`, `t`, `t*l`, `s*n` divide each other in order.

    Raises:
        ArgumentError: if the mesh has not as many devices as the levels.
    """
    if mesh.size != math.prod(level_sizes):
        raise ArgumentError(
            f"a mesh of {mesh.size} devices does not fit {math.prod(level_sizes)} devices",
            got=f"mesh {mesh}, levels {level_sizes}",
            remedy=f"axis sizes whose product is {math.prod(level_sizes)}",
        )
    lows = _strides(level_sizes)
    return tuple(
        _split_axis(stride, stride * size, lows, level_sizes)
        for stride, size in zip(mesh.strides, mesh.sizes, strict=True)
    )


def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))


def _split_axis(
    low: int, high: int, lows: tuple[int, ...], level_sizes: tuple[int, ...]
) -> AxisSplit:
    """Split the stride range `[low, high)` at the edges of the levels."""
    if low == high:
        return AxisSplit((), (), even=True)
    pieces: list[tuple[int, int]] = []
    crossed: list[int] = []
    even = True
    for level in reversed(range(len(lows))):
        start, stop = lows[level], lows[level] * level_sizes[level]
        if start == stop:
            continue
        bottom, top = max(low, start), min(high, stop)
        # The edge `start` is met evenly if the axis lies below it, above it, or is cut by it in
        # whole steps; otherwise some group has devices on both sides of it by accident.
        below, above = start % high == 0, low % start == 0
        straddles = not (below or above or (start % low == 0 and high % start == 0))
        even = even and not straddles
        if bottom < top or straddles:
            crossed.append(level)
        if bottom < top:
            pieces.append((level, top // bottom))
    if not even:
        pieces = [(min(crossed), high // low)]
    return AxisSplit(tuple(pieces), tuple(sorted(crossed)), even=even)
