"""Stages of least simulated makespan: best-first search over partial splits.

The space is Alpa's (arXiv 2201.12023, section 5.2): L layers in a row are cut into stages, each
on a submesh, and the submeshes tile the mesh. Alpa minimises a closed formula; here the time of a
split is what `evaluate` says, the simulator of the schedule that will run, transfers included.

For each number of stages, partial splits grow by one stage at a time. `stage_bound` bounds what
any completion can reach; the partial split of least bound is grown next, and a whole split is
timed only when its own bound comes up. So once the least bound reaches the best time seen, that
split is the optimum, and before that it is the lower bound the answer carries. The search starts
from the splits that the closed formula likes best (`closed_form`), improved by moving one boundary
or one pair of submeshes at a time (`neighbours`).

Same problem, same answer: every order here is that of (bound, depth, number of stages, stages),
work is counted, and no clock is read.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autopar.errors import SolveError
from autopar.solver.inter.closed_form import closed_form_splits
from autopar.solver.inter.no_stages import no_stages_error
from autopar.solver.inter.stage_bound import Bounds
from autopar.solver.inter.stage_growth import Children, children
from autopar.solver.inter.stage_problem import (
    Evaluate,
    StageChoice,
    StageProblem,
    StageSlice,
)
from autopar.solver.inter.stage_tables import Costs, tabulate
from autopar.solver.inter.submesh import Shape, placeable

ROUNDING = 1e-12
"""Relative difference below which two times count as equal: a few sums of float64."""

BOUND_ROUNDING = 1e-9
"""Relative difference that the sums of a simulation of many actions may add up to."""

Stages = tuple[StageSlice, ...]


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Work after which the search stops and its answer carries a gap.

    Attributes:
        expansions: partial splits grown, about 0.2 ms each.
        evaluations: whole splits timed; each costs one simulation of `2 m` actions a stage.
    """

    expansions: int = 10_000
    evaluations: int = 1_000


DEFAULT_LIMITS = SearchLimits()


def solve_stages(
    problem: StageProblem, evaluate: Evaluate, *, limits: SearchLimits = DEFAULT_LIMITS
) -> StageChoice:
    """Choose the stages whose simulated makespan is least.

    Args:
        problem: layers, submeshes, costs, memory and what is known of the schedule.
        evaluate: a split to its makespan in seconds under that schedule, with transfers and
            updates: at least what the chains of `stage_bound` take. It decides the answer; the
            costs of the problem only steer and bound the search.
        limits: work after which the best split so far is returned with its gap.

    Raises:
        SolveError: no split uses all devices, fits the memory (says by how many bytes the best
            one misses it) and tiles the mesh; or none was found within the limits; or the
            evaluator is faster than the costs of the problem allow.
    """
    costs = tabulate(problem)
    search = _Search(costs, evaluate, limits)
    search.start()
    search.run()
    return search.choice()


class _Search:
    """The state of one search: the open partial splits, and the best whole one."""

    def __init__(self, costs: Costs, evaluate: Evaluate, limits: SearchLimits) -> None:
        self._costs = costs
        self._problem = costs.problem
        self._evaluate = evaluate
        self._limits = limits
        self._bounds = Bounds(costs)
        self._open: list[tuple[float, int, int, Stages]] = []
        self._timed: dict[Stages, float] = {}
        self._tiles: dict[tuple[Shape, ...], bool] = {}
        self._best: Stages = ()
        self._makespan = math.inf
        self._expanded = 0

    def start(self) -> None:
        """Open one empty split for each number of stages, and time the closed formula's splits."""
        for form in closed_form_splits(self._costs):
            if self._tiles_mesh(form.stages):
                self._time(form.stages)
        if self._best:
            self._improve()
        for stages in range(1, self._problem.most_stages + 1):
            self._push(stages, ())

    def run(self) -> None:
        """Grow the partial split of least bound until none can beat the best, or work is spent."""
        limits = self._limits
        while self._open and self._open[0][0] < self._cutoff():
            if self._expanded >= limits.expansions or len(self._timed) >= limits.evaluations:
                return
            _, _, count, stages = heapq.heappop(self._open)
            if len(stages) < count:
                self._expanded += 1
                self._push(count, stages)
            elif self._time(stages):
                self._improve()

    def choice(self) -> StageChoice:
        """The best split, with the least bound that is still open."""
        if not self._best:
            raise no_stages_error(self._costs, stopped=bool(self._open), work=self._expanded)
        unfinished = self._open and self._open[0][0] < self._cutoff()
        bound = self._open[0][0] if unfinished else self._makespan
        return StageChoice(
            stages=self._best,
            makespan=self._makespan,
            lower_bound=bound,
            expanded=self._expanded,
            evaluated=len(self._timed),
        )

    def _cutoff(self) -> float:
        return self._makespan * (1 - ROUNDING)

    def _push(self, count: int, stages: Stages) -> None:
        """Open the splits that go one stage further and may still beat the best."""
        grown = children(self._bounds, count, stages)
        for index in np.flatnonzero(grown.bound < self._cutoff()):
            after = (*stages, _slice(grown, stages, int(index)))
            if len(after) < count or self._tiles_mesh(after):
                bound = float(grown.bound[index])
                heapq.heappush(self._open, (bound, -len(after), count, after))

    def _tiles_mesh(self, stages: Stages) -> bool:
        key = tuple(sorted(self._problem.shapes(stages)))
        found = self._tiles.get(key)
        if found is None:
            found = self._tiles[key] = placeable(self._problem.mesh, key)
        return found

    def _time(self, stages: Stages) -> bool:
        """Time a whole split, once; whether it is the best so far."""
        if stages in self._timed:
            return False
        makespan = self._timed[stages] = self._evaluate(stages)
        self._check_bound(stages, makespan)
        better = makespan < self._cutoff() or not self._best
        if better:
            self._best, self._makespan = stages, makespan
        return better

    def _check_bound(self, stages: Stages, makespan: float) -> None:
        """A time below the bound means that search and evaluator price different things."""
        grown = children(self._bounds, len(stages), stages[:-1])
        at = (grown.stop == stages[-1].last + 1) & (grown.submesh == stages[-1].submesh)
        bound = float(grown.bound[at][0])
        if makespan < bound * (1 - BOUND_ROUNDING):
            raise SolveError(
                "a split was timed below what its stages and transfers take at least",
                got=f"{makespan:.9g} s, bound {bound:.9g} s, for {stages}",
                why="the evaluator leaves out a cost, or `live` or `discipline` is not the "
                "schedule's",
                remedy="let both read the same costs, and give Discipline.ANY if in doubt",
            )

    def _improve(self) -> None:
        """Move to better neighbours of the best split until it has none."""
        improved = True
        while improved and len(self._timed) < self._limits.evaluations:
            improved = False
            for stages in neighbours(self._costs, self._best):
                improved |= self._time(stages)


def _slice(grown: Children, stages: Stages, index: int) -> StageSlice:
    first = stages[-1].last + 1 if stages else 0
    return StageSlice(first, int(grown.stop[index]) - 1, int(grown.submesh[index]))


def neighbours(costs: Costs, stages: Stages) -> Iterator[Stages]:
    """The splits within memory that differ by one layer at a boundary, or by a swap of submeshes.

    They have the same submeshes, so they tile the mesh if the split does.
    """
    tail = costs.problem.tail(len(stages))
    for at, (left, right) in enumerate(itertools.pairwise(stages)):
        swapped = (
            left._replace(submesh=right.submesh),
            right._replace(submesh=left.submesh),
        )
        pairs = [swapped] if left.submesh != right.submesh else []
        for move in (-1, 1):
            last = left.last + move
            if left.first <= last < right.last:
                pairs.append((left._replace(last=last), right._replace(first=last + 1)))
        for pair in pairs:
            moved = (*stages[:at], *pair, *stages[at + 2 :])
            caps = zip(moved, tail, strict=True)
            if all(costs.fits(cap)[s.first, s.last + 1, s.submesh] for s, cap in caps):
                yield moved
