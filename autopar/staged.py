"""What users hold of a pipeline plan: stages, schedule, and the function they are for."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.ir.mesh import Mesh
from autopar.lower.pipeline import LoweredPipeline, lower_pipeline
from autopar.lower.program import Program
from autopar.plan.pipeline import PipelinePlan, StagePlan
from autopar.plan.pipeline_json import save_pipeline
from autopar.plan.plan import PricedCollective
from autopar.plan.schedule import Schedule
from autopar.plans import COMPILE_SECONDS, Plan, report_room, trace

if TYPE_CHECKING:
    from autopar.report.audit import AuditReport
    from autopar.report.check import CheckReport


@dataclass(frozen=True, slots=True)
class StagedPlan(Plan):
    """A pipeline plan, and the function it is for if it is known.

    Attributes:
        frozen: the decisions.
        traced: the function; None for a plan that was only loaded (see `bind`).
    """

    # Plan's field, narrowed: both are frozen, so nobody can assign the other kind.
    frozen: PipelinePlan  # type: ignore[assignment]

    @property
    def mesh(self) -> Mesh:
        """All devices in a line; each stage has a logical mesh of its own."""
        return Mesh.of(self.devices)

    @property
    def cluster(self) -> Cluster:
        """All devices."""
        return self.frozen.cluster

    @property
    def schedule(self) -> Schedule:
        """Which stage does what in which order."""
        return self.frozen.schedule

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        """The stages, each with the plan of its part of the function."""
        return self.frozen.stages

    @property
    def devices(self) -> int:
        """Number of devices of all stages."""
        return sum(len(stage.devices) for stage in self.stages)

    @property
    def collectives(self) -> tuple[PricedCollective, ...]:
        """What will run inside the stages; what goes from stage to stage is in the schedule."""
        return tuple(line for stage in self.stages for line in stage.plan.collectives)

    def program(self) -> Program:
        """Refused: a pipeline is several programs, see `lower`."""
        raise PlanError(
            "a pipeline is several programs", remedy="plan.lower(): tasks and instruction lists"
        )

    def check(self) -> CheckReport:
        """Refused: the independent check of prices does not know stages yet."""
        raise PlanError(
            "the independent check does not cover pipelines yet",
            remedy="plan.audit() holds what is compiled against what was planned",
        )

    def summary(self, *, width: int = 100) -> str:
        """The plan as text, to be read by people."""
        text: str = report_room("pipeline_summary").pipeline_summary(self.frozen, width=width)
        return text

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        save_pipeline(self.frozen, path)

    def bind(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> StagedPlan:
        """The plan together with the function it is for.

        Raises:
            PlanError: it is the plan of another function.
        """
        traced = trace(function, args, kwargs, plan=self.frozen)
        lower_pipeline(self.frozen, traced.graph, traced.rules)
        return StagedPlan(self.frozen, traced)

    def lower(self) -> LoweredPipeline:
        """Tasks and instruction lists.

        Raises:
            PlanError: the plan was loaded without its function.
        """
        traced = self._bound()
        return lower_pipeline(self.frozen, traced.graph, traced.rules)

    def verify(self, *, timeout: float = COMPILE_SECONDS) -> tuple[AuditReport, float]:
        """The audit of all tasks, and the parallel share of the least parallel stage."""
        lowered = self.lower()
        room = report_room("audit_stages")
        audited: tuple[AuditReport, tuple[float, ...]] = room.verify_stages(
            lowered.stages, timeout=timeout
        )
        return audited[0], min(audited[1])

    def audit(self, *, timeout: float = COMPILE_SECONDS) -> AuditReport:
        """Compile every task of every stage; hold compiled against planned."""
        return self.verify(timeout=timeout)[0]

    def parallel_shares(self, *, timeout: float = COMPILE_SECONDS) -> tuple[float, ...]:
        """Per stage, FLOPs of its tasks on one device over n times those of one of its devices."""
        room = report_room("audit_stages")
        shares: tuple[float, ...] = room.verify_stages(self.lower().stages, timeout=timeout)[1]
        return shares

    def parallel_share(self, *, timeout: float = COMPILE_SECONDS) -> float:
        """The parallel share of the least parallel stage."""
        return min(self.parallel_shares(timeout=timeout))

    def bubble(self) -> float:
        """The share of the predicted step in which an average device waits."""
        return self.frozen.bubble()
