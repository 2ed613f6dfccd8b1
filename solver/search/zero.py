"""ZeRO (Rajbhandari et al. 2020): data parallelism with the state split instead of replicated.

Stage 2 splits the optimizer state (and with it the update), stage 3 the parameters too. The layouts
of the state alone would let the solver leave data parallelism (and gather activations in place of
small kernels), so the data-parallel answer is found first and what it splits is kept.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.graph import OpGraph
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.solver.search.data_parallel import data_parallel, split_batch
from autopar.solver.search.space import Space, batch_inputs

STEPS = ("all-reduce", "reduce-scatter", "all-gather", "slice", "mask")


def most_split(options: tuple[Sharding, ...], shape: tuple[int, ...]) -> Sharding:
    """The candidate that splits one dim over the whole mesh: the largest dim, the first of equals.

    Falls back to replication (the first candidate) where no dim divides.
    """
    whole = [
        (shape[dim], -dim, sharding)
        for sharding in options
        for dim, axes in enumerate(sharding.dims)
        if axes and len(axes) == max(len(o.split_axes) for o in options)
    ]
    return max(whole, key=lambda row: row[:2])[2] if whole else options[0]


def zero(graph: OpGraph, devices: int, batch: Mapping[int, int], *, stage: int) -> Space:
    """The space of ZeRO stage 2 or 3 on a flat mesh.

    Parameters are the tied leaves of the first argument that has any; all other tied leaves are
    optimizer state.
    """
    examples = batch_inputs(graph, batch)
    parameters = parameter_inputs(graph)

    def allowed(mesh: Mesh, position: int, options: tuple[Sharding, ...]) -> tuple[Sharding, ...]:
        entry = graph.inputs[position]
        if position in examples:
            return split_batch(graph, (position, examples[position]), options, mesh)
        if entry.tied_output < 0 or (stage == 2 and position in parameters):
            return options[:1]
        return (most_split(options, graph.values[entry.value].shape),)

    base = data_parallel(graph, devices, batch)
    return Space(f"zero{stage}", (Mesh.of(devices),), allowed, STEPS, base)


def parameter_inputs(graph: OpGraph) -> frozenset[int]:
    """Positions of the tied leaves of the first argument that has tied leaves."""
    tied = [i for i, entry in enumerate(graph.inputs) if entry.tied_output >= 0]
    if not tied:
        return frozenset()
    first = graph.inputs[tied[0]].name.split("/")[0]
    return frozenset(i for i in tied if graph.inputs[i].name.split("/")[0] == first)
