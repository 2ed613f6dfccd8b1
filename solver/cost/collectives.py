"""Seconds of collectives: ring costs with latency alpha and inverse bandwidth beta.

With n devices on an axis and B bytes of the full tensor on that axis (the gathered value of an
all-gather, the value to be summed of a reduce-scatter or an all-reduce, all devices' parts
together of an all-to-all):

    all-gather, reduce-scatter   alpha + beta * (n - 1) / n   * B
    all-reduce                   alpha + beta * (n - 1) / n   * B * 2
    all-to-all                   alpha + beta * (n - 1) / n^2 * B

(Thakur, Rabenseifner, Gropp 2005, with one alpha a collective.) Over several axes, or an axis on
several levels of the cluster, the collective runs level by level, innermost first, on the bytes
left: an all-reduce is a reduce-scatter inside, an all-reduce outside on 1/n of the bytes, and an
all-gather inside; an all-gather is its mirror image, outermost first. An all-to-all leaves the
bytes as they are: each level moves its share of them. Axes on the same level make one ring.

Measured figures by kind and size may contradict each other; the prices still are monotone in
bytes (no size costs less than a smaller one), and an all-reduce is never cheaper than the
reduce-scatter or the all-gather of the same bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import overload

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster, Piece
from autopar.errors import ArgumentError
from autopar.hardware import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVE_KINDS,
    REDUCE_SCATTER,
    Link,
)
from autopar.ir.mesh import Mesh
from autopar.solver.cost.cost import Cost

Bytes = float | NDArray[np.float64]
"""Bytes, or an array of them."""


def ring_share(kind: str, n: int) -> float:
    """The bytes that one of `n` devices sends, as a share of the full tensor's bytes.

    Raises:
        ArgumentError: if `kind` is no collective.
    """
    once = (n - 1) / n
    shares = {
        ALL_REDUCE: 2 * once,
        ALL_GATHER: once,
        REDUCE_SCATTER: once,
        ALL_TO_ALL: once / n,
    }
    if kind not in shares:
        raise ArgumentError(
            "unknown collective", got=repr(kind), remedy=f"one of {COLLECTIVE_KINDS}"
        )
    return shares[kind]


@dataclass(frozen=True, slots=True)
class CollectiveModel:
    """Prices of collectives over the axes of one logical mesh on one cluster.

    Attributes:
        cluster: the hardware.
        mesh: the logical mesh, as many devices as the cluster.
        pieces: per axis, the levels it lies on; made from the two.

    Raises:
        ArgumentError: if the mesh has not as many devices as the cluster.
    """

    cluster: Cluster
    mesh: Mesh
    pieces: tuple[tuple[Piece, ...], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", self.cluster.axis_costs(self.mesh))

    @overload
    def seconds(self, kind: str, axes: tuple[str, ...], full_bytes: float) -> float: ...
    @overload
    def seconds(
        self, kind: str, axes: tuple[str, ...], full_bytes: NDArray[np.float64]
    ) -> NDArray[np.float64]: ...
    def seconds(self, kind: str, axes: tuple[str, ...], full_bytes: Bytes) -> Bytes:
        """Seconds of one collective over `axes`; 0 if they hold one device.

        Args:
            kind: one of COLLECTIVE_KINDS.
            axes: mesh axes, in any order, none twice.
            full_bytes: bytes of the full tensor over `axes`, from 0; a number or an array.

        Raises:
            ArgumentError: if the kind or an axis is unknown, or an axis stands twice.
        """
        steps = self.steps(kind, axes)
        if isinstance(full_bytes, np.ndarray):
            result = np.zeros(full_bytes.shape)
            for piece, share in steps:
                result = result + _piece_seconds(kind, piece, full_bytes * share)
            return result
        seconds = 0.0
        for piece, share in steps:
            seconds += float(_piece_seconds(kind, piece, np.float64(full_bytes * share)))
        return seconds

    def sent_bytes(self, kind: str, axes: tuple[str, ...], full_bytes: float) -> float:
        """Bytes that one device sends in such a collective, over all levels together."""
        return math.fsum(
            ring_share(kind, piece.size) * share * full_bytes
            for piece, share in self.steps(kind, axes)
        )

    def cost(self, kind: str, axes: tuple[str, ...], full_bytes: float) -> Cost:
        """Seconds and bytes of one collective."""
        return Cost(
            communication_seconds=self.seconds(kind, axes, full_bytes),
            communication_bytes=self.sent_bytes(kind, axes, full_bytes),
        )

    def steps(self, kind: str, axes: tuple[str, ...]) -> tuple[tuple[Piece, float], ...]:
        """The rings of a collective, innermost first, each with its share of the full bytes."""
        ring_share(kind, 1)
        if len(set(axes)) != len(axes):
            raise ArgumentError("a mesh axis stands twice in one collective", got=repr(axes))
        pieces = [piece for axis in axes for piece in self.pieces[self.mesh.axis_index(axis)]]
        rings = _merge(pieces)
        devices = math.prod(ring.size for ring in rings)
        steps: list[tuple[Piece, float]] = []
        inner = 1
        for ring in rings:
            # What an all-to-all holds on one ring is the parts of that ring's devices.
            share = ring.size / devices if kind == ALL_TO_ALL else 1 / inner
            steps.append((ring, share))
            inner *= ring.size
        return tuple(steps)


def _merge(pieces: list[Piece]) -> list[Piece]:
    """One ring a level, innermost first: axes with the same links make one ring."""

    def key(piece: Piece) -> tuple[int, float, float]:
        return (-piece.level, piece.beta, piece.alpha)

    rings = []
    for _, group in groupby(sorted(pieces, key=key), key=key):
        same = list(group)
        rings.append(replace(same[0], size=math.prod(piece.size for piece in same)))
    return rings


def _piece_seconds(
    kind: str, piece: Piece, on: np.float64 | NDArray[np.float64]
) -> np.float64 | NDArray[np.float64]:
    """Seconds of one ring on `on` bytes."""
    if kind == ALL_REDUCE and piece.links:
        kinds: tuple[str, ...] = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER)
    else:
        kinds = (kind,)
    prices = [_measured(_links(k, piece), ring_share(k, piece.size), on) for k in kinds]
    return np.maximum.reduce(prices) if len(prices) > 1 else prices[0]


def _links(kind: str, piece: Piece) -> tuple[Link, ...]:
    """The figures of `kind`: the measured ones if there are any."""
    own = tuple(link for link in piece.links if link.kind == kind)
    return own or (Link(kind, piece.alpha, piece.beta),)


def _measured(
    links: tuple[Link, ...], share: float, on: np.float64 | NDArray[np.float64]
) -> np.float64 | NDArray[np.float64]:
    """The price by size range, lifted where it would fall from one range to the next."""
    result = links[0].alpha + links[0].beta * share * on
    floor = 0.0
    for before, link in pairwise(links):
        assert before.max_bytes is not None
        floor = max(floor, before.alpha + before.beta * share * before.max_bytes)
        price = np.maximum(link.alpha + link.beta * share * on, floor)
        result = np.where(on > before.max_bytes, price, result)
    return result
