"""The sizes that the solver-size probe reports."""

from __future__ import annotations

import numpy as np

from autopar.solver.intra.ordering import best_order
from autopar.solver.intra.problem import Edge, Problem
from benchmarks.probes.solver_size import bags, elimination_of, model_of, run_solver, size_of, sizes
from examples import gpt

TINY = gpt.Config(batch=8, length=8, vocabulary=16, layers=1, width=16, heads=8, hidden=16)


def _random_problem(seed: int) -> Problem:
    generator = np.random.default_rng(seed)
    counts = generator.integers(1, 5, size=9)
    pairs = [(a, b) for a in range(9) for b in range(a + 1, 9) if generator.random() < 0.4]
    return Problem(
        tuple(generator.random(count) for count in counts),
        tuple(Edge(a, b, generator.random((counts[a], counts[b]))) for a, b in pairs),
    )


def test_the_bags_add_up_to_the_orders_work() -> None:
    for seed in range(10):
        problem = _random_problem(seed)
        order = best_order(problem)
        looked_at = list(bags(problem, order))
        assert sum(looked_at) == order.entries
        assert elimination_of("", problem).largest == max(looked_at)


def test_size_of_a_known_problem() -> None:
    problem = Problem((np.zeros(2), np.zeros(3)), (Edge(0, 1, np.zeros((2, 3))),))
    found = size_of("", problem)
    assert (found.nodes, found.edges, found.choices, found.most, found.entries) == (2, 1, 5, 3, 6)
    assert found.mean == 2.5
    assert size_of("", Problem(())).mean == 0


def test_every_stage_is_smaller_and_both_ways_agree() -> None:
    model = model_of("2x4", TINY)
    stages, orders = sizes(model)
    assert [s.stage for s in stages][:3] == ["enumerated", "followers merged", "simplified"]
    choices = [stage.choices for stage in stages]
    assert choices == sorted(choices, reverse=True)
    assert choices[0] > choices[-1]
    work = [order.entries for order in orders]
    assert work == sorted(work, reverse=True)
    runs = [run_solver(name, "2x4", model.problem) for name in ("elimination", "ilp-highs")]
    assert runs[0].gap == 0
    np.testing.assert_allclose(runs[0].objective, runs[1].objective, rtol=1e-6)
    assert all(run.peak_bytes >= 0 and run.seconds > 0 for run in runs)
