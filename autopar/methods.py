"""How to parallelise: frozen options that name a search space and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec

from autopar.errors import ArgumentError

SOLVERS = ("auto", "elimination", "ilp-highs", "ilp-cbc")


def _check_limits(memory_bytes: float | None, time_limit: float) -> None:
    if memory_bytes is not None and memory_bytes <= 0:
        raise ArgumentError("memory_bytes must be positive", got=str(memory_bytes))
    if not time_limit > 0:
        raise ArgumentError("time_limit must be positive seconds", got=str(time_limit))


@dataclass(frozen=True, slots=True)
class ShardParallel:
    """The optimum over all shardings of every op on one logical mesh.

    Args:
        logical_mesh: sizes of its axes; None tries every factorisation of the devices.
        num_micro_batches: only 1 for now.
        solver: "auto", "elimination", "ilp-highs" or "ilp-cbc".
        memory_bytes: refuse plans that need more than this on a device.
        time_limit: seconds of search.
    """

    logical_mesh: tuple[int, ...] | None = None
    num_micro_batches: int = 1
    solver: str = "auto"
    memory_bytes: float | None = None
    time_limit: float = 60.0

    def __post_init__(self) -> None:
        _check_limits(self.memory_bytes, self.time_limit)
        if self.solver not in SOLVERS:
            raise ArgumentError("unknown solver", got=repr(self.solver), remedy=f"one of {SOLVERS}")
        sizes = self.logical_mesh
        if sizes is not None and not all(isinstance(n, int) and n > 0 for n in sizes):
            raise ArgumentError(
                "logical_mesh holds something else than axis sizes",
                got=repr(sizes),
                remedy="a tuple such as (2, 4)",
            )
        if self.num_micro_batches != 1:
            raise ArgumentError(
                "micro-batches are not available yet",
                got=f"num_micro_batches={self.num_micro_batches}",
                remedy="use num_micro_batches=1",
            )


@dataclass(frozen=True, slots=True)
class Auto:
    """The default: the best over all logical meshes. Pipelines are not searched yet.

    Args:
        num_micro_batches: only None or 1 for now.
        memory_bytes: refuse plans that need more than this on a device.
        time_limit: seconds of search.
    """

    num_micro_batches: int | None = None
    memory_bytes: float | None = None
    time_limit: float = 60.0

    def __post_init__(self) -> None:
        count = 1 if self.num_micro_batches is None else self.num_micro_batches
        ShardParallel(None, count, "auto", self.memory_bytes, self.time_limit)


@dataclass(frozen=True, slots=True)
class DataParallel:
    """The batch split over all devices, everything else replicated, gradients all-reduced."""

    time_limit: float = 60.0

    def __post_init__(self) -> None:
        _check_limits(None, self.time_limit)


@dataclass(frozen=True, slots=True)
class Zero2Parallel:
    """Data parallel with optimizer state split: gradients reduce-scattered."""

    time_limit: float = 60.0

    def __post_init__(self) -> None:
        _check_limits(None, self.time_limit)


@dataclass(frozen=True, slots=True)
class Zero3Parallel:
    """Data parallel with parameters and optimizer state split: parameters gathered on use."""

    time_limit: float = 60.0

    def __post_init__(self) -> None:
        _check_limits(None, self.time_limit)


@dataclass(frozen=True, slots=True)
class ManualParallel:
    """Layouts given by hand for some arguments; the rest is solved around them.

    Args:
        specs: argument path (`params/blocks/0/q`, or a prefix of it) to PartitionSpec; the longest
            matching prefix counts.
        logical_mesh: axis names and sizes the specs speak of.
        time_limit: seconds of search.
    """

    specs: Mapping[str, PartitionSpec] = field(default_factory=dict)
    logical_mesh: tuple[tuple[str, int], ...] | None = None
    time_limit: float = 60.0

    def __post_init__(self) -> None:
        _check_limits(None, self.time_limit)


METHODS = (Auto, ShardParallel, DataParallel, Zero2Parallel, Zero3Parallel, ManualParallel)

Method = Auto | ShardParallel | DataParallel | Zero2Parallel | Zero3Parallel | ManualParallel
