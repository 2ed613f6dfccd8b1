"""Plain text of a width, for reports that are the same on every terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

LEAST_WIDTH = 80
"""Columns of a report however few are asked for: narrower tables cannot be read."""


def plain_text(parts: Iterable[RenderableType], width: int) -> str:
    """The parts one below the other, as plain text of at most `width` columns (or 80)."""
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
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def grid(rows: Iterable[tuple[str, ...]], gap: int = 2) -> Table:
    """Rows of texts in columns without lines."""
    table = Table.grid(padding=(0, gap))
    for row in rows:
        table.add_row(*map(Text, row))
    return table
