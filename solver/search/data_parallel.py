"""Data parallelism: the batch is split, the state replicated, gradients are all-reduced."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import SolveError
from autopar.ir.graph import OpGraph
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.solver.search.space import Space, batch_inputs


def split_batch(
    graph: OpGraph, leaf: tuple[int, int], options: tuple[Sharding, ...], mesh: Mesh
) -> tuple[Sharding, ...]:
    """The batch leaf's batch dim over the whole mesh; `leaf` is (input position, dim).

    Raises:
        SolveError: it does not divide.
    """
    entry, dim = graph.inputs[leaf[0]], leaf[1]
    shape = graph.values[entry.value].shape
    if not shape:
        return options[:1]
    wanted = Sharding(tuple(mesh.names if d == dim else () for d in range(len(shape))))
    if wanted not in options:
        size = shape[dim]
        near = max(mesh.size, size // mesh.size * mesh.size)
        raise SolveError(
            f"the batch does not divide over {mesh.size} devices",
            where=entry.name,
            got=f"shape {shape}",
            why="data parallelism splits its batch dim evenly",
            remedy=f"a batch of {near}, or fewer devices; batch_argnums= if this is no batch",
        )
    return (wanted,)


def data_parallel(graph: OpGraph, devices: int, batch: Mapping[int, int]) -> Space:
    """The space of plain data parallelism on a flat mesh.

    Only all-reduces (and the free mask) may be used, so nothing that is replicated is ever split.
    """
    examples = batch_inputs(graph, batch)

    def allowed(mesh: Mesh, position: int, options: tuple[Sharding, ...]) -> tuple[Sharding, ...]:
        if position in examples:
            return split_batch(graph, (position, examples[position]), options, mesh)
        return options[:1]

    return Space("data-parallel", (Mesh.of(devices),), allowed, ("all-reduce", "mask"))
