"""The stage search under the simulator that plans use, against brute force under the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autopar.solver.inter.stage_dp import solve_stages
from autopar.solver.inter.stage_problem import StageProblem, StageSlice
from autopar.solver.schedules.registry import make_schedule
from autopar.solver.schedules.simulate import Durations, simulate
from tests.oracles.brute_stages import SCHEDULES, all_splits, random_problem
from tests.oracles.brute_stages import simulate as simulate_simply


def makespan(problem: StageProblem, name: str) -> Callable[[tuple[StageSlice, ...]], float]:
    def evaluate(stages: tuple[StageSlice, ...]) -> float:
        costs = [cost for stage in stages if (cost := problem.cost(*stage)) is not None]
        back = problem.transfer_back or problem.transfer

        def transfer(source: int, target: int, kind: str) -> float:
            boundary = stages[max(source, target)].first
            price = problem.transfer if kind == "F" else back
            return price(boundary, stages[source].submesh, stages[target].submesh)

        durations = Durations(
            forward=tuple(cost.forward for cost in costs),
            backward=tuple(cost.backward for cost in costs),
            update=tuple(cost.update for cost in costs),
            transfer=transfer,
        )
        schedule = make_schedule(name, len(stages), problem.micro_batches)
        return simulate(schedule, durations).makespan

    return evaluate


@pytest.mark.parametrize("memory", ["free", "limited"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equals_brute_force_under_the_simulator(schedule: str, memory: str, *, full: bool) -> None:
    for seed in range(1000, 1200 if full else 1030):
        problem = random_problem(seed, schedule, memory=memory == "limited")
        evaluate = makespan(problem, schedule)
        times = {stages: evaluate(stages) for stages in all_splits(problem)}
        choice = solve_stages(problem, evaluate)
        assert choice.makespan == pytest.approx(min(times.values()), rel=1e-9), seed
        assert choice.gap == 0, seed
        for stages, seconds in list(times.items())[:20]:
            # One transfer at a time on a link: never faster than with as many as one likes.
            simple = simulate_simply(problem, SCHEDULES[schedule][0], stages)
            assert seconds >= simple * (1 - 1e-9), seed
