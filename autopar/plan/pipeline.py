"""The frozen plan of a step that runs as stages, micro-batch by micro-batch.

It says how the step is divided (batch, micro-batches, where the stages begin, which devices are
theirs, in which order they work) and holds one frozen plan for each stage: a stage is planned as if
it were a function of its own, and its plan carries the fingerprint of that function.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.plan.plan import Boundary, CostSummary, FrozenPlan, SolverReport
from autopar.plan.schedule import Schedule

PIPELINE_VERSION = 1


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage.

    Attributes:
        start: its first position on the forward line (see layers/line.py).
        devices: positions of its devices in the cluster, row-major over its mesh.
        plan: of the stage's graph; figures are those of a whole step.
        forward_seconds, backward_seconds: of one micro-batch.
        update_seconds: once a step, what runs before the micro-batches included.
        base_bytes: held on a device through the step.
        activation_bytes: held on a device by a micro-batch from its forward to its backward.
        workspace_bytes: needed on a device while a task runs.
    """

    start: int
    devices: tuple[int, ...]
    plan: FrozenPlan
    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    base_bytes: int
    activation_bytes: int
    workspace_bytes: int

    def busy_seconds(self, micro_batches: int) -> float:
        """Seconds of work in a step."""
        each = self.forward_seconds + self.backward_seconds
        return micro_batches * each + self.update_seconds


@dataclass(frozen=True, slots=True)
class TransferCost:
    """What one micro-batch moves from stage to stage.

    Attributes:
        source, target: stages.
        kind: F or B, the task it comes from.
        bytes: of all arrays.
        seconds: on the slowest link between the two.
    """

    source: int
    target: int
    kind: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A complete plan of a pipelined step.

    Attributes:
        function, jax_version, fingerprint, signatures: of the whole function.
        cluster: all devices.
        method: how it was asked for.
        batch: `(input, dim)` of the inputs that hold one row per example.
        inputs, outputs: leaves of the whole function; their layouts on the stage that has them.
        num_hidden: how many inputs, at the end, are closed-over arrays.
        schedule: compute actions; its rank `s` is stage `s`.
        stages: in order.
        transfers: per micro-batch.
        cost: of a step, per device of the busiest stage; compute is the simulated makespan without
            what is waited for transfers.
        solver: how the stages were found.
        notes: what a reader should know.
    """

    function: str
    jax_version: str
    fingerprint: str
    signatures: tuple[str, ...]
    cluster: Cluster
    method: str
    batch: tuple[tuple[int, int], ...]
    inputs: tuple[Boundary, ...]
    outputs: tuple[Boundary, ...]
    num_hidden: int
    schedule: Schedule
    stages: tuple[StagePlan, ...]
    transfers: tuple[TransferCost, ...]
    cost: CostSummary
    solver: SolverReport
    notes: tuple[str, ...] = ()

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches."""
        return self.schedule.micro_batches

    def bubble(self) -> float:
        """The share of the predicted step in which an average device waits."""
        busy = [stage.busy_seconds(self.micro_batches) for stage in self.stages]
        total = len(busy) * self.cost.step_seconds
        return max(0.0, 1 - math.fsum(busy) / total) if total else 0.0
