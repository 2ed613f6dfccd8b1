"""Pruning removes no optimum: brute force on small graphs, at three scales of cost."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.errors import SolveError
from autopar.solver.intra.problem import Problem, evaluate
from autopar.solver.intra.pruning import SLACK, narrow
from autopar.solver.intra.simplify import EXACT_PASSES, simplify
from tests.oracles.brute_force import SCALES, brute_force, random_problem


def _simplified(seed: int, scale: float) -> Problem | None:
    """A random problem after the exact passes, or None if it is infeasible or has no nodes."""
    try:
        drawn = random_problem(np.random.default_rng(seed), scale=scale)
        problem = simplify(drawn, EXACT_PASSES).problem
    except SolveError:
        return None
    return problem if problem.node_costs else None


@pytest.mark.parametrize("scale", SCALES)
def test_what_is_left_holds_an_optimum_and_the_bound_is_below_it(
    scale: float, *, full: bool
) -> None:
    checked = narrower = 0
    for seed in range(400 if full else 80):
        problem = _simplified(seed, scale)
        if problem is None:
            continue
        _, best = brute_force(problem)
        if not np.isfinite(best):
            continue
        narrowed = narrow(problem, cheap=0, rounds=6)
        choices, left = brute_force(narrowed.problem)
        assert choices is not None
        assert left == pytest.approx(best, rel=1e-12, abs=1e-12 * scale)
        assert narrowed.bound <= best + SLACK * abs(best)
        incumbent = narrowed.decode(narrowed.incumbent)
        assert evaluate(problem, incumbent) >= best - SLACK * abs(best)
        decoded = narrowed.decode(choices)
        assert evaluate(problem, decoded) == pytest.approx(best, rel=1e-12, abs=1e-12 * scale)
        checked += 1
        narrower += sum(narrowed.problem.sizes) < sum(problem.sizes)
    assert checked >= 30
    assert narrower >= checked // 4


def test_incumbent_is_what_evaluate_says() -> None:
    problem = next(p for p in (_simplified(seed, 1.0) for seed in range(99)) if p is not None)
    narrowed = narrow(problem, cheap=0, rounds=3)
    one = evaluate(narrowed.problem, narrowed.incumbent)
    assert one == pytest.approx(evaluate(problem, narrowed.decode(narrowed.incumbent)))
