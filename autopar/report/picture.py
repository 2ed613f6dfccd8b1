"""A plan as one picture: where the time goes, and what part of each argument a device holds.

Every array is drawn by its two dims that matter most (split ones first), sides growing with the
logarithm of the size; the filled part is the block of one device, lines are the cuts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from jinja2 import Environment

from autopar.ir.mesh import Mesh
from autopar.plan.plan import FrozenPlan
from autopar.report.groups import LeafGroup, collective_groups, leaf_groups
from autopar.report.units import bytes_text, seconds_text

MOST_CARDS = 20
"""Arguments that are drawn: the largest."""

WIDTH = 960
"""Of the picture; all lengths here are in SVG user units (pixels at scale 1)."""

_MARGIN, _BAR_LEFT = 28, 150
_BAR_WIDTH = WIDTH - _BAR_LEFT - _MARGIN
_FIRST_BAR, _BAR_STEP = 86, 54
_COLUMNS = 5
_CARD_WIDTH = (WIDTH - 2 * _MARGIN) // _COLUMNS
_DRAWING_HEIGHT = 84
_CARD_HEIGHT = _DRAWING_HEIGHT + 72
_NAME_LENGTH, _NAME_LINES = 29, 3
_LINES_TO_CUT = 64  # more cuts than this along a side would be a grey smear

_AXIS_COLORS = ("#2b6cd4", "#d9772b", "#2a9060", "#8a55c7")
_PALE_COLORS = ("#dbe7f9", "#f9e5d5", "#d8eee3", "#e9def6")
_WHOLE, _WHOLE_PALE = "#64748b", "#e5e9ef"
_COMPUTE = "#475569"
_KIND_COLORS = ("#b4456a", "#d98aa5", "#7c5cc4", "#b9a4e6", "#c9a227", "#8d99a8")


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of a bar."""

    label: str
    color: str
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class _Bar:
    """A bar of parts, drawn at height y."""

    name: str
    y: int
    parts: tuple[_Part, ...]


@dataclass(frozen=True, slots=True)
class _Line:
    """A cut."""

    x1: float
    y1: float
    x2: float
    y2: float


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of a type's text, in the colour of an axis or the usual one."""

    text: str
    color: str = ""


@dataclass(frozen=True, slots=True)
class _Card:
    """One group of equal arguments at (x, y); all else relative to that."""

    x: int
    y: int
    left: float
    top: float
    width: float
    height: float
    block_width: float
    block_height: float
    color: str
    pale: str
    lines: tuple[_Line, ...]
    type: tuple[_Piece, ...]
    names: tuple[str, ...]
    tip: str
    middle: float = _CARD_WIDTH / 2
    type_y: int = _DRAWING_HEIGHT + 22
    name_y: int = _DRAWING_HEIGHT + 37


@dataclass(frozen=True, slots=True)
class _Axis:
    """An entry of the legend."""

    name: str
    size: int
    color: str


def plan_picture(plan: FrozenPlan) -> str:
    """The plan as the text of an SVG file; equal plans give equal texts."""
    groups = leaf_groups(plan.inputs, plan.mesh)
    dearest = sorted(range(len(groups)), key=lambda i: (-groups[i].bytes, i))[:MOST_CARDS]
    shown = [groups[i] for i in sorted(dearest)]
    bars = _bars(plan)
    legend_y = _FIRST_BAR + _BAR_STEP * len(bars) + 18
    cards_y = legend_y + 22
    rows = -(-len(shown) // _COLUMNS)
    rest = len(plan.inputs) - sum(group.count for group in shown)
    cost = plan.cost
    source = resources.files("autopar.report").joinpath("picture.svg.j2")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source.read_text(encoding="utf-8")).render(
        width=WIDTH,
        height=cards_y + rows * _CARD_HEIGHT + (36 if rest else 14),
        title=f"{plan.function} on {plan.mesh.size} devices, mesh {plan.mesh}",
        subtitle=f"{plan.cluster}, {plan.method}: {seconds_text(cost.step_seconds)} a step, "
        f"{bytes_text(cost.peak_bytes)} a device at the peak (predicted)",
        bars=bars,
        bar_left=_BAR_LEFT,
        bar_width=_BAR_WIDTH,
        legend_y=legend_y,
        axes=_legend(plan.mesh),
        whole_color=_WHOLE,
        cards=[_card(group, plan.mesh, i, cards_y) for i, group in enumerate(shown)],
        left_out=f"and {rest} smaller arguments" if rest else "",
    )


def _legend(mesh: Mesh) -> tuple[_Axis, ...]:
    return tuple(_Axis(name, size, _axis_color(mesh, name)) for name, size in mesh.axes if size > 1)


def _axis_color(mesh: Mesh, axis: str, colors: Sequence[str] = _AXIS_COLORS) -> str:
    return colors[mesh.axis_index(axis) % len(colors)]


def _bars(plan: FrozenPlan) -> tuple[_Bar, ...]:
    """The step's time, and its communication by kind and axes."""
    cost = plan.cost
    step = [
        ("compute", cost.compute_seconds, _COMPUTE),
        ("communication", cost.communication_seconds, _KIND_COLORS[0]),
    ]
    kinds: dict[str, float] = {}
    for group in collective_groups(plan.collectives):
        name = f"{group.kind} over {','.join(group.first.axes)}"
        kinds[name] = kinds.get(name, 0.0) + group.seconds
    ranked = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    most = len(_KIND_COLORS) - 1
    if rest := sum(seconds for _, seconds in ranked[most:]):
        ranked = [*ranked[:most], ("others", rest)]
    communication = [
        (name, seconds, color) for (name, seconds), color in zip(ranked, _KIND_COLORS, strict=False)
    ]
    named = (("predicted step", step), ("communication", communication))
    return tuple(
        _Bar(name, _FIRST_BAR + _BAR_STEP * i, _parts(parts))
        for i, (name, parts) in enumerate((n, p) for n, p in named if sum(x[1] for x in p) > 0)
    )


def _parts(parts: Sequence[tuple[str, float, str]]) -> tuple[_Part, ...]:
    total = sum(seconds for _, seconds, _ in parts)
    made, x = [], float(_BAR_LEFT)
    for name, seconds, color in parts:
        width = _BAR_WIDTH * seconds / total
        made.append(
            _Part(f"{name} {seconds_text(seconds)}", color, _round(x), _round(max(width - 1, 0.5)))
        )
        x += width
    return tuple(made)


def _card(group: LeafGroup, mesh: Mesh, index: int, top: int) -> _Card:
    shape, sharding = group.first.shape, group.first.sharding
    shards = [sharding.shards(dim, mesh) for dim in range(len(shape))]
    rows, columns = _drawn_dims(shape, shards)
    height = _side(shape[rows], _DRAWING_HEIGHT) if rows is not None else 16.0
    width = _side(shape[columns], _CARD_WIDTH - 36) if columns is not None else 16.0
    down = shards[rows] if rows is not None else 1
    across = shards[columns] if columns is not None else 1
    left, upper = (_CARD_WIDTH - width) / 2, (_DRAWING_HEIGHT - height) / 2
    axes = [axis for axis in sharding.split_axes if mesh.axis_size(axis) > 1]
    return _Card(
        x=_MARGIN + _CARD_WIDTH * (index % _COLUMNS),
        y=top + _CARD_HEIGHT * (index // _COLUMNS),
        left=_round(left),
        top=_round(upper),
        width=_round(width),
        height=_round(height),
        block_width=_round(width / across),
        block_height=_round(height / down),
        color=_axis_color(mesh, axes[0]) if axes else _WHOLE,
        pale=_axis_color(mesh, axes[0], _PALE_COLORS) if axes else _WHOLE_PALE,
        lines=_cuts(left, upper, width, height, (down, across)),
        type=_type_pieces(group, mesh),
        names=_name_lines(group),
        tip=f"{group.name}: {group.type} {group.layout}, {bytes_text(group.local_bytes)} "
        f"of {bytes_text(group.bytes)} on a device",
    )


def _drawn_dims(shape: Sequence[int], shards: Sequence[int]) -> tuple[int | None, int | None]:
    """The dims to draw downwards and across: split ones first, then large ones."""
    ranked = sorted(range(len(shape)), key=lambda dim: (shards[dim] == 1, -shape[dim], dim))
    chosen = sorted(ranked[:2])
    if len(chosen) == 2:
        return chosen[0], chosen[1]
    return None, chosen[0] if chosen else None


def _side(size: int, most: float) -> float:
    return min(most, 14 + 9 * math.log2(max(size, 1)))


def _cuts(
    left: float, top: float, width: float, height: float, blocks: tuple[int, int]
) -> tuple[_Line, ...]:
    down, across = (count if count <= _LINES_TO_CUT else 1 for count in blocks)
    right, bottom = _round(left + width), _round(top + height)
    levels = [_round(top + height * i / down) for i in range(1, down)]
    places = [_round(left + width * i / across) for i in range(1, across)]
    return (
        *(_Line(_round(left), y, right, y) for y in levels),
        *(_Line(x, _round(top), x, bottom) for x in places),
    )


def _type_pieces(group: LeafGroup, mesh: Mesh) -> tuple[_Piece, ...]:
    """`f32[` `96/x` `,` `24` `]`, each split dim with its axes in the colour of the first."""
    head, _, _ = group.type.partition("[")
    pieces = [_Piece(f"{head}[")]
    for dim, size in enumerate(group.first.shape):
        axes = group.first.sharding.dims[dim]
        text = "/".join((str(size), *axes))
        pieces += [_Piece(", ")] if dim else []
        pieces.append(_Piece(text, _axis_color(mesh, axes[0]) if axes else ""))
    times = f"] x {group.count}" if group.count > 1 else "]"
    return (*pieces, _Piece(times))


def _name_lines(group: LeafGroup) -> tuple[str, ...]:
    """The name in a few lines, broken after slashes and commas; the end of a long one is kept."""
    lines = [""]
    for part in re.findall(r"[^/,]+[/,]?|[/,]", group.name):
        if lines[-1] and len(lines[-1]) + len(part) > _NAME_LENGTH:
            lines.append("")
        lines[-1] += part
    if len(lines) > _NAME_LINES:
        lines = ["... " + lines[-_NAME_LINES], *lines[1 - _NAME_LINES :]]
    return tuple(lines)


def _round(length: float) -> float:
    return round(length, 1)
