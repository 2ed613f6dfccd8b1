"""A search space: logical meshes, allowed layouts of arguments, allowed reshard steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopar.ir.graph import OpGraph
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.solver.assemble import ALL_STEPS

InputFilter = Callable[[Mesh, int, tuple[Sharding, ...]], tuple[Sharding, ...]]
"""(mesh, input position, candidates) to the allowed candidates."""


@dataclass(frozen=True, slots=True)
class Space:
    """What a method lets the solver choose from.

    Attributes:
        name: for the report.
        meshes: logical meshes to try.
        allowed: restricts how arguments are laid out; None: freely.
        steps: reshard steps that may be used.
        base: solved first; what its ops split stays so, what it replicates is free.
    """

    name: str
    meshes: tuple[Mesh, ...]
    allowed: InputFilter | None = None
    steps: tuple[str, ...] = ALL_STEPS
    base: Space | None = None


def batch_inputs(graph: OpGraph, batch: Mapping[int, int]) -> Mapping[int, int]:
    """Positions of argument leaves that hold examples, each with its batch dim.

    Those named, else dim 0 of all leaves that are not state.
    """
    if batch:
        return batch
    count = len(graph.inputs) - graph.num_hidden
    return {i: 0 for i in range(count) if graph.inputs[i].tied_output < 0}
