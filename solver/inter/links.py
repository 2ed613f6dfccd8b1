"""Seconds of what travels between two submeshes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cluster import Cluster
from autopar.hardware import Level


def link_seconds(level: Level, size: float, links: int) -> float:
    """Alpha-beta seconds of `size` bytes that are shared out over so many links.

    Between two groups of devices these are as many as the smaller group has devices, since tiles
    are cut along the blocks of both sides (see lower/cross_mesh.py).
    """
    return level.alpha + level.beta * size / links


class TransferPrices:
    """Alpha-beta prices between groups of devices of one cluster."""

    def __init__(self, cluster: Cluster, groups: Sequence[tuple[int, ...]]) -> None:
        self._cluster = cluster
        self._groups = tuple(groups)

    def seconds(self, source: int, target: int, size: float) -> float:
        """Seconds for `size` bytes from one group to another; the slowest level counts."""
        one, other = self._groups[source], self._groups[target]
        level = self._cluster.levels[self._level(one[0], other[0])]
        return link_seconds(level, size, min(len(one), len(other)))

    def _level(self, one: int, other: int) -> int:
        """The outermost level on which two devices are apart."""
        shape = self._cluster.shape
        for level in range(len(shape)):
            below = math.prod(shape[level + 1 :])
            if one // below != other // below:
                return level
        return len(shape) - 1
