"""Timelines of pipelines: of a plan, by simulation, and of a run, as it was measured."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.errors import PlanError
from autopar.plan.pipeline import PipelinePlan
from autopar.report.timeline import Arrow, Span, TimelineChart

_ACTION = re.compile(r"\d+([FB])(\d+)")


def simulated_chart(plan: PipelinePlan) -> TimelineChart:
    """The step of a plan as the simulator of its schedule sees it."""
    pipelines = importlib.import_module("autopar.solver.inter.pipeline")
    timeline = pipelines.timeline_of(plan.stages, plan.schedule, plan.transfers)
    spans = []
    for event in timeline.events:
        action = event.action
        kind = "update" if action is None else action.kind
        name = "" if action is None else str(action.micro)
        tip = "update" if action is None else str(action)
        spans.append(Span(event.rank, name, event.start, event.end, kind, tip))
    arrows = [
        Arrow(m.source, m.target, f"{m.kind}{m.micro}", m.start, m.end) for m in timeline.transfers
    ]
    return TimelineChart(
        f"{plan.function}: simulated step",
        _rows(plan),
        tuple(spans),
        tuple(arrows),
        f"{plan.schedule.name}, {plan.micro_batches} micro-batches, cluster {plan.cluster}",
    )


def measured_chart(
    plan: PipelinePlan, events: Sequence[Sequence[Mapping[str, Any]]], step: int
) -> TimelineChart:
    """One step of a run, from the events of each worker.

    Args:
        plan: that ran.
        events: per worker, `runtime.executor.Event` fields.
        step: number of the step.

    Raises:
        PlanError: there are no events of that step.
    """
    spans = []
    for row, found in enumerate(events):
        for event in found:
            if event["step"] != step or event["kind"] not in ("RUN", "WAIT"):
                continue
            action = _ACTION.fullmatch(str(event["mark"]))
            kind = "wait" if event["kind"] == "WAIT" else action[1] if action else "update"
            name = action[2] if action and kind != "wait" else ""
            tip = f"{event['mark']} {event['text']}"[:120]
            spans.append(Span(row, name, event["start"], event["end"], kind, tip))
    if not spans:
        raise PlanError(f"no events of step {step} were recorded")
    note = "as measured; rows of other processes share the host's clock"
    return TimelineChart(f"{plan.function}: step {step}", _rows(plan), tuple(spans), (), note)


def _rows(plan: PipelinePlan) -> tuple[str, ...]:
    return tuple(
        f"stage {number} ({len(stage.devices)} devices)" for number, stage in enumerate(plan.stages)
    )
