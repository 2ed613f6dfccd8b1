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


def _check_count(name: str, count: object) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ArgumentError(f"{name} must be a whole number from 1", got=repr(count))


@dataclass(frozen=True, slots=True)
class ShardParallel:
    """The optimum over all shardings of every op on one logical mesh.

    Args:
        logical_mesh: sizes of its axes; None tries every factorisation of the devices.
        num_micro_batches: gradients are accumulated over so many slices of the batch; the result is
            exactly that of the whole batch, and gradients are reduced once a step.
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
        _check_count("num_micro_batches", self.num_micro_batches)


@dataclass(frozen=True, slots=True)
class Auto:
    """The default: the best over all logical meshes. Pipelines are not searched yet.

    Args:
        num_micro_batches: as for ShardParallel; None is 1.
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


@dataclass(frozen=True, slots=True)
class AutoLayers:
    """Layers found by where little is alive between them.

    Args:
        count: how many; None: as many as there are stages, or 8 for a search over stages.
    """

    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None:
            _check_count("AutoLayers(count)", self.count)


@dataclass(frozen=True, slots=True)
class UniformStages:
    """`count` stages of about equal work, on equal parts of the cluster."""

    count: int

    def __post_init__(self) -> None:
        _check_count("UniformStages(count)", self.count)


@dataclass(frozen=True, slots=True)
class ManualStages:
    """Stages that begin where a parameter is first used.

    Args:
        starts: for each stage but the first, the path of a parameter (`params/blocks/2`, or a
            prefix of it): the stage begins at the first forward operation that uses one.
        devices: devices of each stage; equal parts of the cluster if None.
    """

    starts: tuple[str, ...]
    devices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.devices is not None and len(self.devices) != len(self.starts) + 1:
            raise ArgumentError(
                "ManualStages needs one number of devices for each stage",
                got=f"{len(self.starts) + 1} stages, devices={self.devices}",
            )


@dataclass(frozen=True, slots=True)
class AutoStages:
    """The number, the bounds and the submeshes of stages that make the simulated step shortest.

    Args:
        memory_bytes: of a device; None: as the cluster says.
    """

    memory_bytes: float | None = None


SCHEDULE_NAMES = ("1f1b", "gpipe", "inference")


@dataclass(frozen=True, slots=True)
class PipeshardParallel:
    """Stages on parts of the cluster, micro-batches that flow through them, ops sharded inside.

    Args:
        num_micro_batches: slices of the batch.
        layers: how the forward is cut into layers, which stages are made of.
        stages: how layers become stages.
        schedule: "1f1b", "gpipe" or "inference".
        shard: how each stage is sharded over its devices.
    """

    num_micro_batches: int
    layers: AutoLayers = field(default_factory=AutoLayers)
    stages: UniformStages | ManualStages | AutoStages = field(default_factory=AutoStages)
    schedule: str = "1f1b"
    shard: ShardParallel = field(default_factory=ShardParallel)

    def __post_init__(self) -> None:
        _check_count("num_micro_batches", self.num_micro_batches)
        kinds = (
            ("layers", self.layers, AutoLayers),
            ("stages", self.stages, (UniformStages, ManualStages, AutoStages)),
            ("shard", self.shard, ShardParallel),
        )
        for name, value, kind in kinds:
            if not isinstance(value, kind):
                raise ArgumentError(f"{name}= cannot be used", got=repr(value)[:80])
        if self.schedule not in SCHEDULE_NAMES:
            raise ArgumentError(
                "unknown schedule", got=repr(self.schedule), remedy=f"one of {SCHEDULE_NAMES}"
            )
        if self.shard.num_micro_batches != 1:
            raise ArgumentError(
                "micro-batches are counted by the pipeline, not by its shard method",
                got=f"shard.num_micro_batches={self.shard.num_micro_batches}",
                remedy="PipeshardParallel(num_micro_batches=...)",
            )

    @property
    def time_limit(self) -> float:
        """Seconds of search for each stage."""
        return self.shard.time_limit


METHODS = (
    Auto,
    ShardParallel,
    DataParallel,
    Zero2Parallel,
    Zero3Parallel,
    ManualParallel,
    PipeshardParallel,
)

Method = (
    Auto
    | ShardParallel
    | DataParallel
    | Zero2Parallel
    | Zero3Parallel
    | ManualParallel
    | PipeshardParallel
)
