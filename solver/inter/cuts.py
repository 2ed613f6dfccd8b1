"""Where stages begin, and which devices are theirs."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.errors import ArgumentError, ClusterError
from autopar.layers.divide import Divided
from autopar.layers.grouping import group
from autopar.methods import ManualStages, PipeshardParallel
from autopar.solver.inter.profile import Profile
from autopar.solver.inter.shapes import allowed_shapes, flat_shape, submesh_cluster
from autopar.solver.inter.stage_dp import solve_stages
from autopar.solver.inter.submesh import Shape, place
from autopar.trace.batch import BEFORE

AUTO_LAYERS = 8
"""Layers of a search over stages, where nobody says otherwise: 36 intervals to choose from."""


@dataclass(frozen=True, slots=True)
class Place:
    """Devices of a stage.

    Attributes:
        devices: positions in the cluster, row-major.
        cluster: these devices alone, for prices.
    """

    devices: tuple[int, ...]
    cluster: Cluster


@dataclass(frozen=True, slots=True)
class Cut:
    """A choice of stages.

    Attributes:
        starts: positions on the forward line.
        places: devices of each.
        name: how it was found.
        lower_bound: no choice takes fewer seconds by the estimate of the search; 0 if unknown.
        gap: of the search, by its own estimate; 0 for an optimum or where nothing was searched.
        notes: what a reader should know.
    """

    starts: tuple[int, ...]
    places: tuple[Place, ...]
    name: str
    lower_bound: float = 0.0
    gap: float = 0.0
    notes: tuple[str, ...] = ()

    def report(self, makespan: float) -> tuple[float, float]:
        """(lower bound, gap) for the solver's report."""
        if not self.lower_bound:
            return makespan, 0.0
        return min(makespan, self.lower_bound), self.gap


def lay(cluster: Cluster, shapes: Sequence[Shape]) -> tuple[Place, ...]:
    """Put submeshes on the cluster.

    Raises:
        ClusterError: they do not tile it.
    """
    laid = place(flat_shape(cluster), shapes)
    if laid is None:
        raise ClusterError(
            "the stages' submeshes do not tile the cluster",
            got=f"{', '.join('x'.join(map(str, s)) for s in shapes)} on {cluster}",
            why="every device belongs to one stage",
            remedy="a number of stages that divides the devices, or ManualStages(devices=...)",
        )
    return tuple(
        Place(devices, submesh_cluster(cluster, shape))
        for devices, shape in zip(laid, shapes, strict=True)
    )


def _shape_of_size(cluster: Cluster, size: int) -> Shape:
    """The allowed submesh of so many devices with the fewest hosts.

    Raises:
        ClusterError: there is none.
    """
    fitting = [shape for shape in allowed_shapes(cluster) if math.prod(shape) == size]
    if not fitting:
        inside = " inside one host" if cluster.kind == "ray" else ""
        raise ClusterError(
            f"no submesh of {size} devices fits the cluster{inside}",
            got=str(cluster),
            why="a stage takes a divisor of the hosts and of the devices of each",
            remedy=f"one of {sorted({math.prod(s) for s in allowed_shapes(cluster)})} devices",
        )
    return min(fitting)


def uniform_cut(cluster: Cluster, starts: tuple[int, ...], name: str) -> Cut:
    """Stages at `starts` on equal parts of the cluster.

    Raises:
        ClusterError: the devices do not divide.
    """
    count = len(starts)
    if cluster.size % count:
        raise ClusterError(
            f"{cluster.size} devices do not divide into {count} equal stages",
            got=str(cluster),
            remedy=f"a number of stages that divides {cluster.size}, or ManualStages(devices=...)",
        )
    shape = _shape_of_size(cluster, cluster.size // count)
    return Cut(starts, lay(cluster, [shape] * count), name)


def manual_cut(divided: Divided, cluster: Cluster, stages: ManualStages) -> Cut:
    """Stages that begin where the named parameters are first used.

    Raises:
        ArgumentError: a name is no parameter's, or the stages are out of order.
    """
    starts = (0, *(_first_use(divided, prefix) for prefix in stages.starts))
    if list(starts) != sorted(set(starts)):
        raise ArgumentError(
            "the stages of ManualStages are not in the order of the forward",
            got=", ".join(
                f"{prefix} at operation {start}"
                for prefix, start in zip(stages.starts, starts[1:], strict=True)
            ),
            remedy="name parameters in the order in which the forward first uses them",
        )
    if stages.devices is None:
        return uniform_cut(cluster, starts, "manual stages")
    shapes = [_shape_of_size(cluster, size) for size in stages.devices]
    return Cut(starts, lay(cluster, shapes), "manual stages")


def _first_use(divided: Divided, prefix: str) -> int:
    micro = divided.micro
    whole = [
        entry
        for entry, role in zip(micro.graph.inputs, micro.roles, strict=True)
        if role.kind == "whole"
    ]
    named = {entry.value for entry in whole if _is_under(entry.name, prefix)}
    if not named:
        near = difflib.get_close_matches(prefix, _prefixes(e.name for e in whole), n=4, cutoff=0.0)
        raise ArgumentError(
            "ManualStages names no parameter",
            got=repr(prefix),
            why=f"a stage starts where a parameter under that path is first used; near to it are "
            f"{', '.join(near)}",
        )
    place = {op: number for number, op in enumerate(divided.line.ops)}
    for op in micro.graph.ops:
        reads = not named.isdisjoint(op.reads)
        if reads and op.index in place:
            return place[op.index]
        if reads and micro.phases[op.index] == BEFORE:
            named.update(op.outputs)
    raise ArgumentError(
        "the forward never uses the parameter that ManualStages names", got=repr(prefix)
    )


def _prefixes(names: Iterable[str]) -> list[str]:
    """The paths, and all that they are under."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split("/")
        found.update(("/".join(parts[: n + 1]), None) for n in range(len(parts)))
    return list(found)


def _is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix.rstrip("/") + "/")


def auto_cut(
    divided: Divided,
    cluster: Cluster,
    method: PipeshardParallel,
    progress: Callable[[str], None],
) -> Cut:
    """The stages whose simulated step is shortest.

    Raises:
        SolveError: none fits in memory.
    """
    line = divided.line
    layers = min(method.layers.count or AUTO_LAYERS, len(line.ops))
    firsts = group(line.work, line.cuts, layers)
    profile = Profile(divided, firsts, cluster, method, progress)
    choice = solve_stages(profile.problem, profile.makespan)
    starts = tuple(firsts[stage.first] for stage in choice.stages)
    shapes = [profile.problem.submeshes[stage.submesh] for stage in choice.stages]
    notes = (
        f"{layers} layers; {choice.evaluated} splits simulated, {choice.expanded} grown; "
        f"estimated step {choice.makespan:.4g} s",
    )
    bound, gap = choice.lower_bound, choice.gap
    return Cut(starts, lay(cluster, shapes), "stage search", bound, gap, notes)
