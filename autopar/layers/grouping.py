"""Layers: consecutive parts of the forward, cut where little is alive.

The ops stand in a line (the order in which they were traced); a layer is an interval of it. Among
all ways to cut the line into `count` layers whose work differs from the mean by at most a slack,
the chosen one has the smallest largest cut, then the smallest total cut, then the evenest work:
the layer clustering of Alpa (Zheng et al., OSDI 2022, section 5.2), with balance as a constraint.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ArgumentError

SLACKS = (0.1, 0.2, 0.4, 0.8, 1.6, float("inf"))
"""How far the work of a layer may be from the mean; the first that can be kept is used."""


def group(work: Sequence[float], cuts: Sequence[float], count: int) -> tuple[int, ...]:
    """Cut a line of items into `count` intervals.

    Args:
        work: per item; at least `count` items.
        cuts: `cuts[k]` is what is alive between items `k - 1` and `k`; `cuts[0]` is not used.
        count: number of intervals.

    Returns:
        The first item of each interval; the first is 0.

    Raises:
        ArgumentError: there are fewer items than intervals.
    """
    if not 1 <= count <= len(work):
        raise ArgumentError(
            f"{len(work)} operations cannot be cut into {count} layers",
            remedy=f"a number of layers or stages from 1 to {len(work)}",
        )
    if count == 1:
        return (0,)
    ends = np.concatenate([[0.0], np.cumsum(np.asarray(work, dtype=np.float64))])
    price = np.asarray(cuts, dtype=np.float64)
    for slack in SLACKS:
        mean = ends[-1] / count
        low, high = mean * (1 - slack), mean * (1 + slack)
        bound = _least_largest_cut(ends, price, count, (low, high))
        if bound is None:
            continue
        found = _cheapest(ends, np.where(price <= bound, price, np.inf), count, (low, high))
        assert found is not None
        return found
    raise AssertionError("with no slack at all every cut is allowed")


def _least_largest_cut(
    ends: NDArray[np.float64], price: NDArray[np.float64], count: int, limits: tuple[float, float]
) -> float | None:
    """The smallest bound on single cuts under which the line can be cut; None if it cannot be."""
    bounds = np.unique(price[1:])
    low, high = 0, len(bounds) - 1
    if _cheapest(ends, price, count, limits) is None:
        return None
    while low < high:
        middle = (low + high) // 2
        allowed = np.where(price <= bounds[middle], 0.0, np.inf)
        if _cheapest(ends, allowed, count, limits) is None:
            low = middle + 1
        else:
            high = middle
    return float(bounds[low])


def _cheapest(
    ends: NDArray[np.float64], price: NDArray[np.float64], count: int, limits: tuple[float, float]
) -> tuple[int, ...] | None:
    """Cut points of least total price, then of evenest work, or None.

    Args:
        ends: `ends[k]` is the work of the first `k` items.
        price: of a cut before each item; infinite where none is allowed.
        count: number of intervals.
        limits: of the work of an interval.
    """
    items = len(ends) - 1
    mean = ends[-1] / count
    # Two costs in lexicographic order: total price, and the squared deviation from the mean.
    total = np.full(items + 1, np.inf)
    uneven = np.full(items + 1, np.inf)
    total[0] = uneven[0] = 0.0
    before: list[NDArray[np.int64]] = []
    for number in range(count):
        next_total, next_uneven = np.full_like(total, np.inf), np.full_like(uneven, np.inf)
        came = np.full(items + 1, -1, dtype=np.int64)
        cut = np.concatenate([price, [np.inf]]) if number else np.zeros(items + 1)
        for end in range(number + 1, items + 1):
            if number == count - 1 and end != items:
                continue
            size = ends[end] - ends[:end]
            # A tiny tolerance: the sums that are compared were added up in different orders.
            fits = (size >= limits[0] - 1e-9 * ends[-1]) & (size <= limits[1] + 1e-9 * ends[-1])
            cost = np.where(fits, total[:end] + cut[:end], np.inf)
            least = cost.min()
            if not np.isfinite(least):
                continue
            spread = np.where(cost == least, uneven[:end] + (size - mean) ** 2, np.inf)
            start = int(spread.argmin())
            next_total[end], next_uneven[end], came[end] = least, spread[start], start
        total, uneven = next_total, next_uneven
        before.append(came)
    if not np.isfinite(total[items]):
        return None
    starts, end = [], items
    for came in reversed(before):
        end = int(came[end])
        starts.append(end)
    return tuple(reversed(starts))
