"""A timeline as a Chrome trace and as a picture: who works on what, and who waits.

Both take plain spans of time, so that a simulated step and a measured one are drawn alike. The
trace is the JSON of https://ui.perfetto.dev and chrome://tracing (complete events, and flow events
for transfers), in microseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment

from autopar.files import write_atomically
from autopar.report.units import seconds_text

COLORS = {
    "F": "#2b6cd4",
    "B": "#d9772b",
    "update": "#2a9060",
    "wait": "#d8dde5",
    "move": "#b4456a",
}
LABELS = {
    "F": "forward",
    "B": "backward",
    "update": "before and after the loop",
    "wait": "wait",
    "move": "transfer",
}

WIDTH = 960
_LEFT, _RIGHT, _TOP, _ROW = 150, 28, 92, 46
_BAR = 26
_LETTER = 7.0


@dataclass(frozen=True, slots=True)
class Span:
    """Something that one row does.

    Attributes:
        row: index into the chart's rows.
        name: what is written into it, such as the micro-batch's number.
        start, end: seconds.
        kind: a key of COLORS.
        tip: the whole story.
    """

    row: int
    name: str
    start: float
    end: float
    kind: str
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Arrow:
    """Something that goes from row to row."""

    source: int
    target: int
    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class TimelineChart:
    """Spans and arrows on named rows."""

    title: str
    rows: tuple[str, ...]
    spans: tuple[Span, ...]
    arrows: tuple[Arrow, ...] = ()
    note: str = ""

    @property
    def start(self) -> float:
        """The first moment."""
        return min((s.start for s in self.spans), default=0.0)

    @property
    def seconds(self) -> float:
        """From the first moment to the last."""
        return max((s.end for s in self.spans), default=0.0) - self.start

    def idle(self, row: int) -> float:
        """The share of time in which a row does nothing."""
        busy = sum(s.end - s.start for s in self.spans if s.row == row and s.kind != "wait")
        return max(0.0, 1 - busy / self.seconds) if self.seconds else 0.0


def chrome_trace(chart: TimelineChart) -> dict[str, Any]:
    """The chart in Chrome's trace event format."""
    first = chart.start
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": chart.title}}
    ]
    for row, name in enumerate(chart.rows):
        events.append(
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}}
        )
    for span in chart.spans:
        events.append(
            {
                "ph": "X",
                "name": span.name or LABELS[span.kind],
                "cat": span.kind,
                "pid": 0,
                "tid": span.row,
                "ts": (span.start - first) * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": {"what": span.tip},
            }
        )
    for number, arrow in enumerate(chart.arrows):
        ends = (("s", arrow.source, arrow.start), ("f", arrow.target, arrow.end))
        for phase, row, moment in ends:
            event = {"ph": phase, "name": arrow.name, "cat": "move", "id": number, "pid": 0}
            event |= {"tid": row, "ts": (moment - first) * 1e6}
            events.append(event | ({"bp": "e"} if phase == "f" else {}))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def timeline_picture(chart: TimelineChart) -> str:
    """The chart as the text of an SVG file; equal charts give equal texts."""
    scale = (WIDTH - _LEFT - _RIGHT) / chart.seconds if chart.seconds else 0.0
    first = chart.start

    def x(moment: float) -> float:
        return round(_LEFT + (moment - first) * scale, 2)

    def y(row: int) -> int:
        return _TOP + row * _ROW

    boxes = [
        {
            "x": x(s.start),
            "y": y(s.row),
            "width": max(0.4, round((s.end - s.start) * scale, 2)),
            "color": COLORS[s.kind],
            "name": s.name if len(s.name) * _LETTER + 4 <= (s.end - s.start) * scale else "",
            "tip": f"{s.tip or s.name}: {seconds_text(s.end - s.start)}",
            "dark": s.kind != "wait",
        }
        for s in chart.spans
    ]
    lines = [
        {
            "x1": x(a.start),
            "y1": y(a.source) + _BAR * (a.target > a.source),
            "x2": x(a.end),
            "y2": y(a.target) + _BAR * (a.target < a.source),
        }
        for a in chart.arrows
    ]
    rows = [
        {"name": name, "y": y(row), "idle": f"{100 * chart.idle(row):.0f} % idle"}
        for row, name in enumerate(chart.rows)
    ]
    used = [kind for kind in COLORS if any(s.kind == kind for s in chart.spans)]
    legend = [(COLORS[kind], LABELS[kind]) for kind in used]
    if chart.arrows:
        legend.append((COLORS["move"], LABELS["move"]))
    source = resources.files("autopar.report").joinpath("timeline.svg.j2").read_text("utf-8")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return template.from_string(source).render(
        width=WIDTH,
        height=_TOP + _ROW * len(rows) + 44,
        left=_LEFT,
        bar=_BAR,
        line_color=COLORS["move"],
        title=chart.title,
        note=chart.note,
        rows=rows,
        boxes=boxes,
        lines=lines,
        legend=legend,
        total=seconds_text(chart.seconds),
    )


def save_trace(chart: TimelineChart, path: str | os.PathLike[str]) -> None:
    """Write the Chrome trace, whole or not at all."""
    write_atomically(path, json.dumps(chrome_trace(chart)) + "\n")


def save_picture(charts: Sequence[TimelineChart], path: str | os.PathLike[str]) -> None:
    """Write one picture, or several below each other, whole or not at all."""
    texts = [timeline_picture(chart) for chart in charts]
    if len(texts) == 1:
        write_atomically(path, texts[0])
        return
    parts, top = [], 0
    for text, chart in zip(texts, charts, strict=True):
        parts.append(f'<g transform="translate(0 {top})">{text}</g>')
        top += _TOP + _ROW * len(chart.rows) + 56
    whole = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" '
        f'viewBox="0 0 {WIDTH} {top}">' + "".join(parts) + "</svg>\n"
    )
    write_atomically(path, whole)
