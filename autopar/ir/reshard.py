"""From one sharding to another, as steps that each are one collective or a local cut.

A step is legal only where it keeps blocks contiguous: axes enter and leave a dim at its minor end.

| kind           | before → after                         | wire                        |
|----------------|----------------------------------------|-----------------------------|
| all-reduce     | partial over axes → replicated there   | sum over axes               |
| reduce-scatter | partial over axes → dim split          | sum and scatter             |
| all-gather     | dim split (minor axes) → replicated    | gather                      |
| all-to-all     | split moves from one dim to another    | one axis                    |
| slice          | replicated → dim split                 | nothing: a local cut        |
| mask           | replicated → partial                   | nothing: zero but at rank 0 |
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.errors import VerifyError
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding

COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")
LOCAL_STEPS = ("slice", "mask")

_TEXT = re.compile(r"(?P<kind>[a-z-]+)\((?P<axes>\w+(?:\.\w+)*)\)(?P<dims>(?:@\d+){0,2})")


@dataclass(frozen=True, slots=True)
class Step:
    """One reshard step.

    Attributes:
        kind: one of COLLECTIVES or LOCAL_STEPS.
        axes: the mesh axes it works over, major to minor.
        dim: the dim that is gathered, scattered, or sliced; for all-to-all the dim that gathers.
        to_dim: for all-to-all the dim that becomes split, else -1.
    """

    kind: str
    axes: tuple[str, ...]
    dim: int = -1
    to_dim: int = -1

    def __str__(self) -> str:
        dims = "".join(f"@{d}" for d in (self.dim, self.to_dim) if d >= 0)
        return f"{self.kind}({'.'.join(self.axes)}){dims}"


def parse_step(text: str) -> Step:
    """Read `all-to-all(x)@0@2` back.

    Raises:
        VerifyError: the text is not a step.
    """
    match = _TEXT.fullmatch(text)
    if match is None or match["kind"] not in COLLECTIVES + LOCAL_STEPS:
        raise VerifyError("a reshard step cannot be read", got=text)
    numbers = [int(part) for part in match["dims"].split("@")[1:]]
    return Step(match["kind"], tuple(match["axes"].split(".")), *numbers)


def apply_step(sharding: Sharding, step: Step, mesh: Mesh) -> Sharding:
    """The sharding after `step`.

    Raises:
        VerifyError: the step does not fit the sharding.
    """
    if step.kind in ("all-reduce", "reduce-scatter"):
        if not set(step.axes) <= set(sharding.partial):
            raise VerifyError(f"{step} sums an axis that is not partial", got=str(sharding))
        rest = tuple(axis for axis in sharding.partial if axis not in step.axes)
        done = Sharding(sharding.dims, rest)
        if step.kind == "all-reduce":
            return done
        return done.with_dim(step.dim, (*done.dims[step.dim], *step.axes))
    if step.kind in ("all-gather", "all-to-all"):
        axes = sharding.dims[step.dim]
        if axes[len(axes) - len(step.axes) :] != step.axes:
            raise VerifyError(f"{step} gathers axes that are not minor-most", got=str(sharding))
        done = sharding.with_dim(step.dim, axes[: len(axes) - len(step.axes)])
        if step.kind == "all-gather":
            return done
        return done.with_dim(step.to_dim, (*done.dims[step.to_dim], *step.axes))
    if set(step.axes) & {*sharding.split_axes, *sharding.partial}:
        raise VerifyError(f"{step} uses an axis that is taken", got=str(sharding))
    if step.kind == "mask":
        taken = {*sharding.partial, *step.axes}
        return Sharding(sharding.dims, tuple(n for n in mesh.names if n in taken))
    return sharding.with_dim(step.dim, (*sharding.dims[step.dim], *step.axes))


def full_elements(before: Sharding, step: Step, shape: tuple[int, ...], mesh: Mesh) -> int:
    """Elements of the full tensor on the step's axes: what the cost formulas call B.

    For all-gather and all-to-all that is n times the local block before the step, for
    all-reduce and reduce-scatter the local block itself.
    """
    local = before.local_size(shape, mesh)
    if step.kind in ("all-gather", "all-to-all"):
        for axis in step.axes:
            local *= mesh.axis_size(axis)
    return local


def _subsets(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for length in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, length)


def next_steps(
    sharding: Sharding, shape: tuple[int, ...], mesh: Mesh
) -> Iterator[tuple[Step, Sharding]]:
    """Every legal step from `sharding` with the sharding it leads to, in a fixed order."""
    used = {*sharding.split_axes, *sharding.partial}
    free = tuple(name for name in mesh.names if name not in used)
    steps: list[Step] = [Step("all-reduce", axes) for axes in _subsets(sharding.partial)]
    for dim, axes in enumerate(sharding.dims):
        steps += [Step("reduce-scatter", some, dim) for some in _subsets(sharding.partial)]
        steps += [Step("all-gather", axes[cut:], dim) for cut in range(len(axes))]
        steps += [
            Step("all-to-all", axes[-1:], dim, to) for to in range(len(shape)) if axes and to != dim
        ]
        steps += [Step("slice", (axis,), dim) for axis in free]
    steps += [Step("mask", (axis,)) for axis in free]
    for step in steps:
        after = apply_step(sharding, step, mesh)
        if all(size % after.shards(dim, mesh) == 0 for dim, size in enumerate(shape)):
            yield step, after
