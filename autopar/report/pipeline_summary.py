"""A pipeline plan as text for people: stages, what goes between them, and what it costs."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autopar.plan.pipeline import PipelinePlan
from autopar.report.groups import collective_groups
from autopar.report.units import bytes_text, seconds_text

LEAST_WIDTH = 80
MOST_COLLECTIVES = 6
"""Lines of collectives a stage; the rest is summed."""


def pipeline_summary(plan: PipelinePlan, *, width: int = 100) -> str:
    """The plan as plain text of at most `width` columns (or 80); equal plans give equal texts."""
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=max(width, LEAST_WIDTH),
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        legacy_windows=False,
        emoji=False,
        markup=False,
        highlight=False,
    )
    console.print(_head(plan))
    console.print()
    console.print(Text("stages"))
    console.print(_stages(plan))
    if plan.transfers:
        console.print()
        console.print(Text("between stages, for each micro-batch"))
        console.print(_transfers(plan))
    for number in range(len(plan.stages)):
        console.print()
        lines = plan.stages[number].plan.collectives
        title = f"collectives of stage {number} in a step"
        console.print(Text(title if lines else f"{title}: none"))
        if lines:
            console.print(_collectives(plan, number))
    notes = dict.fromkeys((*plan.notes, *plan.solver.notes))
    for note in notes:
        console.print(Text(f"note: {note}"))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _head(plan: PipelinePlan) -> Table:
    cost, solver = plan.cost, plan.solver
    devices = sum(len(stage.devices) for stage in plan.stages)
    table = Table.grid(padding=(0, 2))
    quality = f"gap {100 * solver.gap:.2g} %" if solver.gap else "no better one by its estimate"
    rows = (
        ("plan of", f"{plan.function} ({len(plan.signatures)} ops, jax {plan.jax_version})"),
        ("runs on", f"{devices} devices in {len(plan.stages)} stages, cluster {plan.cluster}"),
        ("schedule", f"{plan.schedule.name}, {plan.micro_batches} micro-batches"),
        ("method", f"{plan.method}, {solver.name}: {quality}"),
        (
            "step",
            f"{seconds_text(cost.step_seconds)} simulated, {100 * _bubble(plan):.0f} % of it idle",
        ),
        ("memory", f"{bytes_text(cost.peak_bytes)} on a device of the fullest stage"),
    )
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    return table


def _bubble(plan: PipelinePlan) -> float:
    busy = [
        plan.micro_batches * (s.forward_seconds + s.backward_seconds) + s.update_seconds
        for s in plan.stages
    ]
    total = len(busy) * plan.cost.step_seconds
    return max(0.0, 1 - sum(busy) / total) if total else 0.0


def _table(*names: str) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number == 0 else "right", overflow="fold")
    return table


def _stages(plan: PipelinePlan) -> Table:
    table = _table("stage", "devices", "mesh", "ops", "forward", "backward", "update", "memory")
    for number, stage in enumerate(plan.stages):
        peak = stage.base_bytes + stage.activation_bytes + stage.workspace_bytes
        table.add_row(
            str(number),
            f"{len(stage.devices)} (from {stage.devices[0]})",
            str(stage.plan.mesh),
            str(len(stage.plan.strategies)),
            seconds_text(stage.forward_seconds),
            seconds_text(stage.backward_seconds),
            seconds_text(stage.update_seconds),
            bytes_text(peak),
        )
    return table


def _transfers(plan: PipelinePlan) -> Table:
    table = _table("from", "to", "what", "bytes", "time")
    names = {"F": "activations", "B": "gradients"}
    for move in plan.transfers:
        table.add_row(
            f"stage {move.source}",
            f"stage {move.target}",
            names.get(move.kind, move.kind),
            bytes_text(move.bytes),
            seconds_text(move.seconds),
        )
    return table


def _collectives(plan: PipelinePlan, number: int) -> Table:
    table = _table("kind", "axes", "times", "bytes", "time", "of")
    groups = sorted(
        collective_groups(plan.stages[number].plan.collectives),
        key=lambda group: -group.seconds,
    )
    for group in groups[:MOST_COLLECTIVES]:
        table.add_row(
            group.kind,
            ",".join(group.first.axes),
            str(group.times),
            bytes_text(group.bytes),
            seconds_text(group.seconds),
            group.name,
        )
    if rest := groups[MOST_COLLECTIVES:]:
        table.add_row(
            f"{len(rest)} more",
            "",
            str(sum(group.times for group in rest)),
            "",
            seconds_text(sum(group.seconds for group in rest)),
            "",
        )
    return table
