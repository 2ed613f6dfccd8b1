"""Tables over (layers done, devices left, submesh), filled from the last stage to the first.

Alpa's recursion (arXiv 2201.12023, section 5.2), on whole arrays at once: a stage of the layers
`k .. j-1` on submesh `a` joins the best of the rest, which starts at `j` with the devices that `a`
leaves over. Unlike Alpa's, transfers between neighbours are in it, so the submesh of the stage
before is one more index.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.solver.inter.stage_problem import StageCost, StageProblem, StageSlice

Array = NDArray[np.float64]
Fold = Callable[[int, slice], Array]


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """A problem's callables as arrays.

    Attributes:
        problem: where they come from.
        sizes: devices of each submesh `[A]`.
        present: whether the stage of layers `k .. j-1` can run at all `[L, L+1, A]`.
        forward, backward, update: its seconds `[L, L+1, A]`; 0 where it is absent.
        base, activation, workspace: bytes `[L, L+1, A]`.
        there, back: seconds `[L+1, A, A]` over boundary `k` from stage on `a` to stage on `b`, and
            of the gradients that return; 0 at the ends.
    """

    problem: StageProblem
    sizes: tuple[int, ...]
    present: NDArray[np.bool_]
    forward: Array
    backward: Array
    update: Array
    base: Array
    activation: Array
    workspace: Array
    there: Array
    back: Array

    def need(self, in_flight: int) -> Array:
        """Bytes of each stage `[L, L+1, A]`: as `StageCost.need_bytes`, to the last bit."""
        return np.asarray(self.base + in_flight * self.activation + self.workspace)

    def fits(self, in_flight: int) -> NDArray[np.bool_]:
        """Which stages run within memory `[L, L+1, A]`."""
        return np.asarray(self.present & (self.need(in_flight) <= self.problem.memory_bytes))


def tabulate(problem: StageProblem) -> Costs:
    """Ask every callable of the problem once."""
    layers, kinds = problem.layers, len(problem.submeshes)
    stages = [
        (first, last, index)
        for first in range(layers)
        for last in range(first, layers)
        for index in range(kinds)
        if math.prod(problem.submeshes[index]) <= problem.devices
    ]
    table = np.zeros((6, layers, layers + 1, kinds))
    present = np.zeros((layers, layers + 1, kinds), dtype=np.bool_)
    for first, last, index in stages:
        cost = problem.cost(first, last, index)
        if cost is not None:
            present[first, last + 1, index] = True
            table[:, first, last + 1, index] = _row(cost)
    there = np.zeros((layers + 1, kinds, kinds))
    back = np.zeros((layers + 1, kinds, kinds))
    transfer_back = problem.transfer_back or problem.transfer
    for k in range(1, layers):
        for a in range(kinds):
            for b in range(kinds):
                there[k, a, b] = problem.transfer(k, a, b)
                back[k, a, b] = transfer_back(k, b, a)
    sizes = tuple(map(math.prod, problem.submeshes))
    seconds, held = (table[0], table[1], table[2]), (table[3], table[4], table[5])
    return Costs(problem, sizes, present, *seconds, *held, there, back)


def _row(cost: StageCost) -> tuple[float, ...]:
    seconds = (cost.forward, cost.backward, cost.update)
    return (*seconds, cost.base_bytes, cost.activation_bytes, cost.workspace_bytes)


def fold(costs: Costs, rule: Fold) -> Array:
    """The least of a rule over where the next stage ends.

    Args:
        costs: the arrays.
        rule: `(submesh a, s)` to the value `[L, L+1, d]` of a stage of layers `k .. j-1` on `a`,
            the rest given by tables `[j, d, a]` read at `[:, s, a]`; infinite if impossible.

    Returns:
        Values `[L+1, D+1, A]` by first layer, devices left (this stage's among them), submesh.
    """
    layers, devices = costs.problem.layers, costs.problem.devices
    least = np.full((layers + 1, devices + 1, len(costs.sizes)), math.inf)
    for a, size in enumerate(costs.sizes):
        if size <= devices:
            values = rule(a, slice(0, devices + 1 - size))
            least[:layers, size:, a] = values.min(axis=1)
    return least


def hop(values: Array, transfer: Array) -> Array:
    """Values `[L+1, D+1, A]` by next submesh, to the least of them by the submesh before."""
    after = values[:, :, None, :] + transfer[:, None, :, :]
    return np.asarray(after.min(axis=3))


@dataclass(frozen=True, slots=True, eq=False)
class Objective:
    """What a split is judged by: a value of each stage, joined over the stages.

    Attributes:
        stage: in-flight micro-batches to the values `[L, L+1, A]`, infinite where impossible.
        join: `np.add` for a sum, `np.maximum` for the worst stage.
        transfer: `[L+1, A, A]` added between neighbours.
    """

    stage: Callable[[int], Array]
    join: np.ufunc
    transfer: Array


class BestSplits:
    """The best split into any number of stages under one objective."""

    def __init__(self, costs: Costs, objective: Objective) -> None:
        self._costs = costs
        self._objective = objective
        self._rest: dict[tuple[int, ...], Array] = {}

    def best(self, stages: int) -> tuple[float, tuple[StageSlice, ...]] | None:
        """The least value of a split into that many stages, and the first split that has it."""
        problem = self._costs.problem
        tail = problem.tail(stages)
        split: list[StageSlice] = []
        value, first, left = math.inf, 0, problem.devices
        while tail:
            values = self._next(tail, first, left, split[-1].submesh if split else None)
            at = int(values.argmin())
            if not split:
                value = float(values.flat[at])
                if math.isinf(value):
                    return None
            stop, submesh = divmod(at, len(self._costs.sizes))
            split.append(StageSlice(first, stop - 1, submesh))
            first, left, tail = stop, left - self._costs.sizes[submesh], tail[1:]
        return value, tuple(split)

    def _next(self, tail: tuple[int, ...], first: int, left: int, before: int | None) -> Array:
        """Values `[L+1, A]` of the rest, by where the next stage ends and its submesh."""
        objective = self._objective
        after, stage = self._after(tail[1:]), objective.stage(tail[0])
        values = np.full(after.shape[::2], math.inf)
        for a, size in enumerate(self._costs.sizes):
            if size <= left:
                values[:, a] = objective.join(stage[first, :, a], after[:, left - size, a])
        if before is not None:
            values += objective.transfer[first, before]
        return values

    def _after(self, tail: tuple[int, ...]) -> Array:
        """Least values `[L+1, D+1, A]` of the rest, by the submesh of the stage before."""
        found = self._rest.get(tail)
        if found is None:
            found = self._extend(tail) if tail else no_rest(self._costs)
            self._rest[tail] = found
        return found

    def _extend(self, tail: tuple[int, ...]) -> Array:
        after, stage = self._after(tail[1:]), self._objective.stage(tail[0])

        def rule(a: int, s: slice) -> Array:
            return np.asarray(self._objective.join(stage[:, :, a, None], after[:, s, a]))

        return hop(fold(self._costs, rule), self._objective.transfer)


def no_rest(costs: Costs) -> Array:
    """The table `[L+1, D+1, A]` of no stages: 0 where all layers and devices are used up."""
    problem = costs.problem
    done = np.full((problem.layers + 1, problem.devices + 1, len(costs.sizes)), math.inf)
    done[problem.layers, 0, :] = 0.0
    return done
