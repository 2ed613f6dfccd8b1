"""The boundary of a graph as a plan writes it down."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.graph import OpGraph
from autopar.ir.sharding import Sharding
from autopar.plan.plan import Boundary


def argument_boundaries(graph: OpGraph, shardings: Sequence[Sharding]) -> tuple[Boundary, ...]:
    """The inputs of a graph, laid out as the shardings say."""
    made = []
    for entry, sharding in zip(graph.inputs, shardings, strict=True):
        value = graph.values[entry.value]
        tail = (entry.donated, entry.tied_output)
        made.append(Boundary(entry.name, value.shape, str(value.dtype), sharding, *tail))
    return tuple(made)


def result_boundaries(graph: OpGraph, shardings: Sequence[Sharding]) -> tuple[Boundary, ...]:
    """The outputs of a graph, laid out as the shardings say."""
    rows = zip(graph.output_names, graph.outputs, shardings, strict=True)
    return tuple(
        Boundary(name, graph.shape_of(operand), str(graph.dtype_of(operand)), sharding)
        for name, operand, sharding in rows
    )
