"""The values of the stage search: what may be chosen, what it costs, and what was chosen.

Layers are numbered 0 .. L-1, and boundary `k` lies between the layers `k-1` and `k`. A stage runs
the layers `first .. last` (both included) on one submesh. All times are seconds of one device,
all bytes those of one device.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from autopar.errors import ArgumentError
from autopar.solver.inter.submesh import Shape


class Discipline(enum.Enum):
    """What is known of the order in which the schedule runs a stage's actions.

    The more is known, the tighter is the bound of the search; the answer is the same.
    """

    ANY = "any"
    """Nothing but the data dependencies."""

    CAPPED = "capped"
    """At most `live` micro-batches of a stage are between start of F and end of B: 1F1B and kin."""

    FORWARDS_FIRST = "forwards first"
    """A stage runs all its forwards before any of its backwards: GPipe, inference."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage costs on one submesh.

    Attributes:
        forward: seconds of the forward of one micro-batch.
        backward: seconds of its backward; 0 for inference.
        update: seconds of the update, once a step, after the stage's last backward.
        base_bytes: bytes held through the step (weights, optimizer state, gradients).
        activation_bytes: bytes a micro-batch holds from its forward to its backward.
        workspace_bytes: largest bytes of temporaries while an action runs.
    """

    forward: float
    backward: float
    update: float = 0.0
    base_bytes: float = 0.0
    activation_bytes: float = 0.0
    workspace_bytes: float = 0.0

    def __post_init__(self) -> None:
        values = (
            *(self.forward, self.backward, self.update),
            *(self.base_bytes, self.activation_bytes, self.workspace_bytes),
        )
        if not all(math.isfinite(value) and value >= 0 for value in values):
            raise ArgumentError(
                "a stage's seconds and bytes must be finite and not negative",
                got=str(self),
                remedy="return None for a stage that cannot run",
            )

    def need_bytes(self, live: int) -> float:
        """Bytes a device needs with `live` micro-batches in flight."""
        return self.base_bytes + live * self.activation_bytes + self.workspace_bytes


class StageSlice(NamedTuple):
    """Layers `first .. last`, both included, on submesh number `submesh` of the problem."""

    first: int
    last: int
    submesh: int


@dataclass(frozen=True, slots=True)
class StageProblem:
    """Consecutive layers to be cut into stages over submeshes that tile the mesh.

    Attributes:
        layers: L, at least 1.
        mesh: hosts and devices per host; the stages use all devices, each once.
        submeshes: the shapes a stage may take, none twice.
        micro_batches: m, at least 1.
        cost: `(first, last, submesh index)` to the cost of that stage; None if it cannot run.
        transfer: `(k, a, b)` to the seconds between the end of an action on submesh `a` and the
            start of the one on submesh `b` that needs its result, over boundary `k`. Both
            directions are asked: `(k, a, b)` for activations, `(k, b, a)` for their gradients.
        transfer_back: the same for gradients alone, asked `(k, b, a)`; None: `transfer`.
        memory_bytes: what a device has; infinity for no limit.
        live: `(stages, stage index, m)` to the largest number of micro-batches that stage holds
            between the start of a forward and the end of its backward under the schedule. It must
            never be too small.
        discipline: what the bound may assume of the schedule.

    Raises:
        ArgumentError: a size is below 1, there is no submesh, or one is given twice.
    """

    layers: int
    mesh: Shape
    submeshes: tuple[Shape, ...]
    micro_batches: int
    cost: Callable[[int, int, int], StageCost | None]
    transfer: Callable[[int, int, int], float]
    live: Callable[[int, int, int], int]
    memory_bytes: float = math.inf
    discipline: Discipline = Discipline.ANY
    transfer_back: Callable[[int, int, int], float] | None = None

    def __post_init__(self) -> None:
        sizes = (self.layers, self.micro_batches, *self.mesh)
        if min(sizes) < 1 or not self.submeshes:
            raise ArgumentError(
                "stages need at least one layer, micro-batch, device and submesh shape",
                got=f"layers, micro-batches, mesh = {sizes}; submeshes = {self.submeshes}",
            )
        if len(set(self.submeshes)) != len(self.submeshes) or min(map(min, self.submeshes)) < 1:
            raise ArgumentError(
                "submesh shapes must be positive and given once each", got=str(self.submeshes)
            )

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.mesh)

    @property
    def most_stages(self) -> int:
        """No split has more stages than layers, nor than devices over the smallest submesh."""
        return min(self.layers, self.devices // min(map(math.prod, self.submeshes)))

    def tail(self, stages: int) -> tuple[int, ...]:
        """The in-flight micro-batches of each of `stages` stages, first to last."""
        return tuple(self.live(stages, index, self.micro_batches) for index in range(stages))

    def shapes(self, stages: tuple[StageSlice, ...]) -> tuple[Shape, ...]:
        """The submesh shapes of a split, in stage order."""
        return tuple(self.submeshes[stage.submesh] for stage in stages)


@dataclass(frozen=True, slots=True)
class StageChoice:
    """The split that was found, and how good it is known to be.

    Attributes:
        stages: the chosen stages, in layer order.
        makespan: seconds of a step, as the evaluator gave it.
        lower_bound: seconds no split can beat under the evaluator; equal to `makespan` when the
            search was finished.
        expanded: partial splits that were extended.
        evaluated: whole splits that the evaluator timed.
    """

    stages: tuple[StageSlice, ...]
    makespan: float
    lower_bound: float
    expanded: int
    evaluated: int

    @property
    def gap(self) -> float:
        """`(makespan - lower bound) / makespan`, 0 for an optimum."""
        return (self.makespan - self.lower_bound) / self.makespan if self.makespan else 0.0


Evaluate = Callable[[tuple[StageSlice, ...]], float]
"""A split to its simulated makespan in seconds; equal splits get equal times."""


def one_f_one_b_live(stages: int, index: int, micro_batches: int) -> int:
    """In-flight micro-batches of stage `index` under 1F1B: `min(m, p - r)`."""
    return min(micro_batches, stages - index)


def gpipe_live(stages: int, index: int, micro_batches: int) -> int:
    """In-flight micro-batches of any stage under GPipe: all `m`."""
    assert 0 <= index < stages
    return micro_batches
