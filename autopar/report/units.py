"""Seconds, bytes and counts as people read them: three digits and a unit."""

from __future__ import annotations

import math

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def seconds_text(seconds: float) -> str:
    """`143 us`, `2.5 s`; what is infinite says so."""
    if math.isinf(seconds):
        return "infinite"
    if seconds == 0:
        return "0 s"
    for unit, name in _TIMES:
        if seconds >= 0.9995 * unit:
            return f"{_three_digits(seconds / unit)} {name}"
    return f"{seconds / 1e-9:.2g} ns"


def bytes_text(count: float) -> str:
    """`512 B`, `8.03 MiB`; infinite memory is `unlimited`."""
    if math.isinf(count):
        return "unlimited"
    for unit, name in _SIZES:
        if count >= 0.9995 * unit:
            return f"{_three_digits(count / unit)} {name}"
    return f"{count:.0f} B"


def percent_text(part: float, whole: float) -> str:
    """Whole percent of `whole`; `-` of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _three_digits(number: float) -> str:
    if number >= 999.5:
        return f"{number:,.0f}"
    digits = 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:.{digits}f}"
