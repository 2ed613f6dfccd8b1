"""The order of paired runs and the interval of their ratio."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from benchmarks.pairs import Contender, Pair, median_interval, time_pairs


def _order(pairs: int, seed: int) -> tuple[list[str], tuple[Pair, ...]]:
    ran: list[str] = []

    def run(name: str, seconds: float) -> float:
        ran.append(name)
        return seconds

    timed = time_pairs(lambda: run("ours", 3.0), lambda: run("theirs", 2.0), pairs=pairs, seed=seed)
    return ran, timed


def test_each_pair_runs_both_in_the_order_it_tells() -> None:
    ran, timed = _order(50, seed=1)
    told = [("ours", "theirs") if pair.ours_first else ("theirs", "ours") for pair in timed]
    assert ran == [name for pair in told for name in pair]
    assert {pair.ratio for pair in timed} == {1.5}


def test_chance_draws_the_order_and_the_seed_repeats_it() -> None:
    firsts = [pair.ours_first for pair in _order(200, seed=1)[1]]
    assert 70 < sum(firsts) < 130
    assert firsts == [pair.ours_first for pair in _order(200, seed=1)[1]]
    assert firsts != [pair.ours_first for pair in _order(200, seed=2)[1]]


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    samples = [np.exp(generator.normal(0.1, 0.3, size=80)) for _ in range(200)]
    intervals = [median_interval(sample.tolist(), seed=0) for sample in samples]
    for sample, interval in zip(samples, intervals, strict=True):
        assert interval.median == statistics.median(sample)
        assert interval.low <= interval.median <= interval.high
    held = sum(interval.low <= np.exp(0.1) <= interval.high for interval in intervals)
    assert 180 <= held <= 198


def test_more_pairs_make_a_narrower_interval() -> None:
    draws = np.exp(np.random.default_rng(3).normal(0, 0.2, size=400))
    few, many = (median_interval(draws[:count].tolist(), seed=0) for count in (20, 400))
    assert many.high - many.low < few.high - few.low
    assert median_interval([0.5] * 7, seed=0).low == median_interval([0.5] * 7, seed=0).high == 0.5


def test_a_contender_feeds_its_state_back() -> None:
    def step(state: Any, other: Any, batch: Any) -> Any:
        return state + batch, other * 2, state

    runner = Contender(step, (np.zeros(2), np.ones(2)), np.array([1.0, 3.0]))
    assert runner.run(3) > 0
    np.testing.assert_array_equal(runner.loss, [2.0, 6.0])
    runner.run(1)
    np.testing.assert_array_equal(runner.loss, [3.0, 9.0])
