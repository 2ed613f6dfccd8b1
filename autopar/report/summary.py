"""A plan as text for people: what it costs, what lies where, and what is communicated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.plan.plan import FrozenPlan
from autopar.report.console import LEAST_WIDTH, grid, plain_text
from autopar.report.groups import collective_groups, leaf_groups
from autopar.report.units import bytes_text, percent_text, seconds_text

MOST_ARGUMENTS = 40
"""Lines of the arguments table; the rest is summed."""

MOST_COLLECTIVES = 12
"""Lines of the collectives table; the rest is summed."""

LEAST_PATH = 16
"""Columns that a path gets however narrow the text is."""

INDENT = 2
"""Columns before a table."""

MOST_OPS = 8
"""Lines of the ops table; the rest is summed."""


def plan_summary(plan: FrozenPlan, *, width: int = 100) -> str:
    """The plan as plain text of at most `width` columns (or 80); equal plans give equal texts."""
    return plain_text(_parts(plan, max(width, LEAST_WIDTH)), width)


def _parts(plan: FrozenPlan, width: int) -> Iterator[RenderableType]:
    yield _head(plan)
    for title, rows in (
        ("arguments", _arguments(plan)),
        ("ops", _ops(plan)),
        ("collectives of a step, dearest first", _collectives(plan)),
    ):
        yield ""
        yield Text(title if rows.cells else f"{title}: none")
        if rows.cells:
            yield Padding(_table(rows, width - INDENT), (0, 0, 0, INDENT))
    if notes := (*plan.notes, *plan.solver.notes):
        yield ""
        yield Text("notes")
        yield Padding(grid((("-", note) for note in notes), gap=1), (0, 0, 0, INDENT))


def _head(plan: FrozenPlan) -> Table:
    """What and where, and the predicted figures."""
    cost, solver = plan.cost, plan.solver
    memory = plan.cluster.device.memory_bytes
    kept = leaf_groups(plan.inputs, plan.mesh)
    whole, local = sum(g.bytes for g in kept), sum(g.local_bytes for g in kept)
    rows = (
        ("plan of", f"{plan.function} ({len(plan.strategies)} ops, jax {plan.jax_version})"),
        ("runs on", f"{plan.mesh.size} devices as mesh {plan.mesh}, cluster {plan.cluster}"),
        ("method", f"{plan.method}, solved by {solver.name}: {_quality(plan)}"),
        (
            "step",
            f"{seconds_text(cost.step_seconds)} predicted: "
            f"compute {seconds_text(cost.compute_seconds)} + "
            f"communication {seconds_text(cost.communication_seconds)}",
        ),
        (
            "memory",
            f"{bytes_text(cost.peak_bytes)} a device at the peak; "
            f"a device has {bytes_text(memory)}",
        ),
        (
            "arguments",
            f"{bytes_text(whole)}, of which a device holds {bytes_text(local)} "
            f"({percent_text(local, whole)})",
        ),
    )
    return grid(rows)


def _quality(plan: FrozenPlan) -> str:
    """How good the plan is known to be among those of the searched space."""
    solver = plan.solver
    objective = f"objective {seconds_text(solver.objective)}"
    if solver.gap <= 0:
        return f"{objective}, proven the least in the searched space"
    bound = seconds_text(solver.lower_bound)
    return f"{objective}, lower bound {bound}, gap {100 * solver.gap:.2g} %"


@dataclass(frozen=True, slots=True)
class _Rows:
    """A table before it is drawn.

    Attributes:
        columns: headings; those in `numbers` stand to the right.
        numbers: headings of figures.
        cells: one text a column and row.
        paths: heading of the column that gives way when the text is too narrow, or empty.
    """

    columns: tuple[str, ...]
    numbers: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    paths: str = ""


def _table(rows: _Rows, width: int) -> Table:
    """The rows as a table of at most `width` columns if paths can be broken so."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    everything = (rows.columns, *rows.cells)
    widths = [max(map(len, column)) for column in zip(*everything, strict=True)]
    gaps = 2 * (len(widths) - 1)
    for name, own in zip(rows.columns, widths, strict=True):
        right = name in rows.numbers
        room = own
        if name == rows.paths:
            room = min(own, max(LEAST_PATH, width - gaps - sum(widths) + own))
        table.add_column(name, justify="right" if right else "left", overflow="fold", width=room)
    for cells in rows.cells:
        table.add_row(
            *(
                _wrapped(cell, column.width or 0) if name == rows.paths else Text(cell)
                for name, cell, column in zip(rows.columns, cells, table.columns, strict=True)
            )
        )
    return table


def _wrapped(path: str, width: int) -> Text:
    """A path over several lines, broken after slashes and commas; longer parts are folded."""
    lines = [""]
    for part in re.findall(r"[^/,]+[/,]?|[/,]", path):
        if lines[-1].strip() and len(lines[-1]) + len(part) > width:
            lines.append(" ")
        lines[-1] += part
    return Text("\n".join(lines))


def _arguments(plan: FrozenPlan) -> _Rows:
    groups = leaf_groups(plan.inputs, plan.mesh)
    rest = groups[MOST_ARGUMENTS:]
    cells = [
        (
            group.name,
            group.type,
            group.layout,
            str(group.count),
            bytes_text(group.local_bytes),
            bytes_text(group.bytes),
        )
        for group in groups[:MOST_ARGUMENTS]
    ]
    if rest:
        count, local = sum(g.count for g in rest), sum(g.local_bytes for g in rest)
        whole = bytes_text(sum(g.bytes for g in rest))
        cells.append((f"{len(rest)} more lines", "", "", str(count), bytes_text(local), whole))
    numbers = ("leaves", "a device holds", "of")
    return _Rows(("name", "array", "layout", *numbers), numbers, tuple(cells), "name")


@dataclass(frozen=True, slots=True)
class _OpCount:
    """Ops of one name: how many, how many are split over each axis, how many over none."""

    name: str
    ops: int
    split: tuple[int, ...]
    whole: int


def _count_ops(plan: FrozenPlan) -> tuple[_OpCount, ...]:
    """Counts by op name; the most frequent first, then by name."""
    counts: dict[str, list[int]] = {}
    axes = plan.mesh.names
    for signature, strategy in zip(plan.signatures, plan.strategies, strict=True):
        name = signature.partition(" ")[0]
        row = counts.setdefault(name, [0] * (len(axes) + 2))
        used = [] if strategy == "-" else [cell.partition(":")[0] for cell in strategy.split()]
        row[0] += 1
        row[1] += not used
        for position, axis in enumerate(axes):
            row[2 + position] += axis in used
    made = [_OpCount(name, row[0], tuple(row[2:]), row[1]) for name, row in counts.items()]
    return tuple(sorted(made, key=lambda count: (-count.ops, count.name)))


def _sum_ops(name: str, counts: Sequence[_OpCount], axes: int) -> _OpCount:
    return _OpCount(
        name,
        sum(count.ops for count in counts),
        tuple(sum(count.split[axis] for count in counts) for axis in range(axes)),
        sum(count.whole for count in counts),
    )


def _ops(plan: FrozenPlan) -> _Rows:
    """How many ops of each name are split over which axis."""
    counts = _count_ops(plan)
    shown, rest = counts[:MOST_OPS], counts[MOST_OPS:]
    axes = len(plan.mesh.names)
    last = [_sum_ops(f"{len(rest)} others", rest, axes)] if rest else []
    lines = (*shown, *last, _sum_ops("all", counts, axes)) if counts else ()
    cells = tuple(
        (line.name, str(line.ops), *map(str, line.split), str(line.whole)) for line in lines
    )
    numbers = ("count", *(f"split over {axis}" for axis in plan.mesh.names), "on every device")
    return _Rows(("op", *numbers), numbers, cells)


def _collectives(plan: FrozenPlan) -> _Rows:
    groups = collective_groups(plan.collectives)
    rest = groups[MOST_COLLECTIVES:]
    cells = [
        (
            group.kind,
            ",".join(group.first.axes),
            bytes_text(group.first.bytes),
            str(group.times),
            seconds_text(group.seconds),
            group.name,
            group.first.source.partition(" ")[0],
        )
        for group in groups[:MOST_COLLECTIVES]
    ]
    if rest:
        times, seconds = sum(g.times for g in rest), sum(g.seconds for g in rest)
        cells.append((f"{len(rest)} more lines", "", "", str(times), seconds_text(seconds), "", ""))
    numbers = ("bytes", "times", "time")
    return _Rows(("kind", "axes", *numbers, "of", "at"), numbers, tuple(cells), "of")
