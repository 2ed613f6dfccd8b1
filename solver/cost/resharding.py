"""Cheapest way from every sharding of a value to every other: all-pairs shortest paths.

Nodes are the shardings of one value, edges the legal steps of `ir.reshard`, weights seconds
(Floyd 1962, vectorised over rows). Ties break by the number of steps, then by step order.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.ir.mesh import Mesh
from autopar.ir.reshard import COLLECTIVES, LOCAL_STEPS, Step, full_elements, next_steps
from autopar.ir.sharding import Sharding, replicated
from autopar.solver.cost.collectives import CollectiveModel


@dataclass(frozen=True, slots=True)
class Move:
    """One step between two shardings, by index, with its seconds."""

    source: int
    target: int
    step: Step
    seconds: float


@dataclass(frozen=True, slots=True)
class ReshardTable:
    """All shardings of values of one shape and item size, and what it takes between them.

    Attributes:
        states: the shardings.
        index: their positions.
        moves: single steps.
        seconds: [n, n] cheapest seconds from row to column.
    """

    states: tuple[Sharding, ...]
    index: dict[Sharding, int]
    moves: tuple[Move, ...]
    seconds: NDArray[np.float64]

    def between(
        self, sources: Sequence[Sharding], targets: Sequence[Sharding]
    ) -> NDArray[np.float64]:
        """[len(sources), len(targets)] seconds."""
        rows = [self.index[sharding] for sharding in sources]
        columns = [self.index[sharding] for sharding in targets]
        return self.seconds[np.ix_(rows, columns)]

    def path(self, source: Sharding, target: Sharding) -> tuple[Step, ...]:
        """The steps of a cheapest way (Dijkstra 1959)."""
        start, goal = self.index[source], self.index[target]
        leaving: dict[int, list[Move]] = {}
        for move in self.moves:
            leaving.setdefault(move.source, []).append(move)
        counter = itertools.count()
        queue: list[tuple[float, int, int, int, tuple[Step, ...]]] = [(0.0, 0, 0, start, ())]
        done: set[int] = set()
        while queue:
            seconds, length, _, state, steps = heapq.heappop(queue)
            if state == goal:
                return steps
            if state in done:
                continue
            done.add(state)
            for move in leaving.get(state, ()):
                if move.target not in done:
                    total = seconds + move.seconds
                    entry = (total, length + 1, next(counter), move.target, (*steps, move.step))
                    heapq.heappush(queue, entry)
        raise AssertionError(f"no way from {source} to {target}")


def all_shardings(shape: tuple[int, ...], mesh: Mesh, *, summable: bool) -> list[Sharding]:
    """Every sharding with axes in mesh order, with pending sums if the value allows them.

    An empty array is not split: XLA refuses collectives of nothing.
    """
    if 0 in shape:
        return [replicated(len(shape))]
    options = [
        [-1] if size == 1 else [-1, *range(len(shape)), *([len(shape)] if summable else [])]
        for size in mesh.sizes
    ]
    found = []
    for choice in itertools.product(*options):
        pairs = list(zip(mesh.names, choice, strict=True))
        dims = tuple(
            tuple(axis for axis, dim in pairs if dim == wanted) for wanted in range(len(shape))
        )
        partial = tuple(axis for axis, dim in pairs if dim == len(shape))
        sharding = Sharding(dims, partial)
        if all(size % sharding.shards(dim, mesh) == 0 for dim, size in enumerate(shape)):
            found.append(sharding)
    return found


def make_table(
    shape: tuple[int, ...],
    itemsize: int,
    model: CollectiveModel,
    *,
    summable: bool,
    extra: Iterable[Sharding] = (),
    kinds: Sequence[str] = (*COLLECTIVES, *LOCAL_STEPS),
) -> ReshardTable:
    """Build the table of one shape.

    Args:
        shape: global shape.
        itemsize: bytes an element.
        model: prices of collectives.
        summable: whether pending sums make sense.
        extra: shardings beyond those in mesh order that some strategy needs.
        kinds: kinds of step that may be used.
    """
    mesh = model.mesh
    states = tuple(dict.fromkeys([*all_shardings(shape, mesh, summable=summable), *extra]))
    index = {sharding: position for position, sharding in enumerate(states)}
    found: list[tuple[int, int, Step]] = []
    for position, state in enumerate(states):
        for step, after in next_steps(state, shape, mesh):
            allowed = step.kind in kinds and (summable or step.kind != "mask")
            if after in index and allowed:
                found.append((position, index[after], step))
    seconds = _price(found, states, (shape, itemsize), model)
    moves = tuple(Move(*entry, s) for entry, s in zip(found, seconds, strict=True))
    return ReshardTable(states, index, moves, _all_pairs(len(states), moves))


def _price(
    found: Sequence[tuple[int, int, Step]],
    states: Sequence[Sharding],
    sized: tuple[tuple[int, ...], int],
    model: CollectiveModel,
) -> list[float]:
    """Seconds of each step, one vectorised call per (kind, axes)."""
    shape, itemsize = sized
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for number, (_, _, step) in enumerate(found):
        if step.kind not in LOCAL_STEPS:
            groups.setdefault((step.kind, step.axes), []).append(number)
    seconds = [0.0] * len(found)
    for (kind, axes), numbers in groups.items():
        full = np.array(
            [
                full_elements(states[found[n][0]], found[n][2], shape, model.mesh) * itemsize
                for n in numbers
            ],
            dtype=np.float64,
        )
        for number, value in zip(numbers, model.seconds(kind, axes, full), strict=True):
            seconds[number] = float(value)
    return seconds


def _all_pairs(count: int, moves: Sequence[Move]) -> NDArray[np.float64]:
    table = np.full((count, count), np.inf)
    np.fill_diagonal(table, 0.0)
    for move in moves:
        table[move.source, move.target] = min(table[move.source, move.target], move.seconds)
    for middle in range(count):
        np.minimum(table, table[:, middle, None] + table[None, middle, :], out=table)
    table.setflags(write=False)
    return table
