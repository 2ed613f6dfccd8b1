"""A pipeline plan as text for people: stages, what goes between them, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopar.plan.pipeline import PipelinePlan
from autopar.plan.plan import PricedCollective
from autopar.report.console import grid, plain_text
from autopar.report.groups import collective_groups
from autopar.report.units import bytes_text, seconds_text

MOST_COLLECTIVES = 6
"""Lines of collectives a stage; the rest is summed."""


def pipeline_summary(plan: PipelinePlan, *, width: int = 100) -> str:
    """The plan as plain text of at most `width` columns (or 80); equal plans give equal texts."""
    return plain_text(_parts(plan), width)


def _parts(plan: PipelinePlan) -> Iterator[RenderableType]:
    yield _head(plan)
    yield ""
    yield Text("stages")
    yield _stages(plan)
    if plan.transfers:
        yield ""
        yield Text("between stages, for each micro-batch")
        yield _transfers(plan)
    for number, stage in enumerate(plan.stages):
        lines = stage.plan.collectives
        title = f"collectives of stage {number} in a step"
        yield ""
        yield Text(title if lines else f"{title}: none")
        if lines:
            yield _collectives(lines)
    for note in dict.fromkeys((*plan.notes, *plan.solver.notes)):
        yield Text(f"note: {note}")


def _head(plan: PipelinePlan) -> Table:
    cost, solver = plan.cost, plan.solver
    devices = sum(len(stage.devices) for stage in plan.stages)
    quality = f"gap {100 * solver.gap:.2g} %" if solver.gap else "no better one by its estimate"
    rows = (
        ("plan of", f"{plan.function} ({len(plan.signatures)} ops, jax {plan.jax_version})"),
        ("runs on", f"{devices} devices in {len(plan.stages)} stages, cluster {plan.cluster}"),
        ("schedule", f"{plan.schedule.name}, {plan.micro_batches} micro-batches"),
        ("method", f"{plan.method}, {solver.name}: {quality}"),
        (
            "step",
            f"{seconds_text(cost.step_seconds)} simulated, {100 * plan.bubble():.0f} % of it idle",
        ),
        ("memory", f"{bytes_text(cost.peak_bytes)} on a device of the fullest stage"),
    )
    return grid(rows)


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


def _collectives(lines: Sequence[PricedCollective]) -> Table:
    table = _table("kind", "axes", "times", "bytes", "time", "of")
    groups = sorted(collective_groups(lines), key=lambda group: -group.seconds)
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
