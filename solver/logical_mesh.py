"""The logical meshes that devices are tried as."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import ArgumentError
from autopar.ir.mesh import Mesh, factorisations

MAX_AXES = 2
"""Logical meshes of more axes are tried only when asked for: their tables are large."""


def logical_meshes(sizes: Sequence[int] | None, devices: int) -> tuple[Mesh, ...]:
    """The mesh that is asked for; else every factorisation into at most two axes.

    Raises:
        ArgumentError: it has another number of devices.
    """
    if sizes is not None:
        return (fitting(Mesh.of(*sizes), devices),)
    shapes = factorisations(devices, MAX_AXES) or ((1,),)
    return tuple(Mesh.of(*shape) for shape in shapes)


def fitting(mesh: Mesh, devices: int) -> Mesh:
    """The mesh, if it has so many devices.

    Raises:
        ArgumentError: it has not.
    """
    if mesh.size != devices:
        raise ArgumentError(
            f"the logical mesh has another number of devices than the {devices} that it is for",
            got=f"{mesh} = {mesh.size} devices",
            remedy="sizes whose product is that number; or leave logical_mesh out: every "
            "factorisation is tried",
        )
    return mesh
