"""Seconds of what travels between two submeshes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cluster import Cluster


class TransferPrices:
    """Alpha-beta prices between groups of devices of one cluster.

    The bytes are shared out over the links between the two groups: as many as the smaller of them
    has devices, since tiles are cut along the blocks of both sides (see lower/cross_mesh.py).
    """

    def __init__(self, cluster: Cluster, groups: Sequence[tuple[int, ...]]) -> None:
        self._cluster = cluster
        self._groups = tuple(groups)

    def seconds(self, source: int, target: int, size: float) -> float:
        """Seconds for `size` bytes from one group to another; the slowest level counts."""
        one, other = self._groups[source], self._groups[target]
        level = self._cluster.levels[self._level(one[0], other[0])]
        return level.alpha + level.beta * size / max(1, min(len(one), len(other)))

    def _level(self, one: int, other: int) -> int:
        """The outermost level on which two devices are apart."""
        shape = self._cluster.shape
        for level in range(len(shape)):
            below = math.prod(shape[level + 1 :])
            if one // below != other // below:
                return level
        return len(shape) - 1
