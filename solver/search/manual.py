"""Layouts given by hand for some arguments; the rest is solved around them."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import PartitionSpec

from autopar.errors import ArgumentError
from autopar.ir.graph import OpGraph
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.solver.search.space import Space


def from_spec(spec: PartitionSpec, rank: int, name: str) -> Sharding:
    """A PartitionSpec as a sharding of a value of `rank` dims.

    Raises:
        ArgumentError: the spec has more entries than the value has dims.
    """
    if len(spec) > rank:
        raise ArgumentError("a spec has more entries than dims", where=name, got=f"{spec}")
    cells = [() if c is None else (c,) if isinstance(c, str) else tuple(c) for c in spec]
    return Sharding((*cells, *((),) * (rank - len(cells))))


def manual(graph: OpGraph, mesh: Mesh, specs: Mapping[str, PartitionSpec]) -> Space:
    """The space in which the leaves under the given path prefixes have the given layouts.

    Raises:
        ArgumentError: a prefix matches nothing, or a spec does not fit its leaf.
    """
    names = [entry.name for entry in graph.inputs]
    for prefix in specs:
        if not any(_under(name, prefix) for name in names):
            raise ArgumentError(
                "a manual spec matches no argument",
                got=repr(prefix),
                remedy=f"arguments start with {sorted({n.split('/')[0] for n in names})}",
            )

    def allowed(here: Mesh, position: int, options: tuple[Sharding, ...]) -> tuple[Sharding, ...]:
        name = names[position]
        matching = [prefix for prefix in specs if _under(name, prefix)]
        if not matching:
            return options
        shape = graph.values[graph.inputs[position].value].shape
        wanted = from_spec(specs[max(matching, key=len)], len(shape), name)
        if wanted not in options:
            raise ArgumentError(
                "a manual spec does not fit its argument",
                where=name,
                got=f"{wanted} on shape {shape}, mesh {here}",
                why="an axis is unknown, used twice, out of mesh order, or does not divide",
            )
        return (wanted,)

    return Space("manual", (mesh,), allowed)


def _under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}/")
