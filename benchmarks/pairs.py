"""Two contenders timed in pairs of random order, and the interval of the ratio of their times.

A machine that others use too drifts: two long runs one after the other compare the machine, not the
programs. So both run in turn, a step or a few at a time; within each pair chance decides who goes
first, and the ratio is taken pair by pair. The interval is that of the median ratio, by bootstrap
(Efron 1979) with a fixed seed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Interval:
    """The median of some ratios, and where it lies with `CONFIDENCE`.

    Attributes:
        median, low, high: ratios.
        pairs: how many there were.
    """

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}] of {self.pairs} pairs"


@dataclass(frozen=True, slots=True)
class Pair:
    """One pair of runs.

    Attributes:
        ours, theirs: seconds.
        ours_first: who went first.
    """

    ours: float
    theirs: float
    ours_first: bool

    @property
    def ratio(self) -> float:
        """Our time over theirs."""
        return self.ours / self.theirs


class Contender:
    """A train step with a state of its own, fed back every time; each step is awaited.

    Args:
        step: `(*state, batch) -> (*state, loss)`; it may give the state's buffers away.
        state: where the step wants it.
        batch: likewise.
    """

    def __init__(self, step: Callable[..., Any], state: Sequence[Any], batch: Any) -> None:
        self._step = step
        self._state = tuple(state)
        self._batch = batch
        self.loss: Any = None

    def run(self, steps: int) -> float:
        """Do some steps; returns the seconds they took."""
        start = time.perf_counter()
        for _ in range(steps):
            *state, loss = self._step(*self._state, self._batch)
            jax.block_until_ready((state, loss))
            self._state, self.loss = tuple(state), loss
        return time.perf_counter() - start


def time_pairs(
    ours: Callable[[], float], theirs: Callable[[], float], *, pairs: int, seed: int
) -> tuple[Pair, ...]:
    """Run both `pairs` times, in an order that a seeded generator draws.

    Args:
        ours, theirs: run once and return the seconds it took.
        pairs: how often.
        seed: of the order.
    """
    generator = random.Random(seed)
    made = []
    for _ in range(pairs):
        ours_first = generator.random() < 0.5
        seconds = {}
        for name in ("ours", "theirs") if ours_first else ("theirs", "ours"):
            seconds[name] = (ours if name == "ours" else theirs)()
        made.append(Pair(seconds["ours"], seconds["theirs"], ours_first))
    return tuple(made)


def median_interval(ratios: Sequence[float], *, seed: int) -> Interval:
    """The median of the ratios with its bootstrap percentile interval."""
    values = np.asarray(ratios, dtype=np.float64)
    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, len(values), size=(RESAMPLES, len(values)))
    medians = np.median(values[drawn], axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(medians, (tail, 1 - tail))
    return Interval(float(np.median(values)), float(low), float(high), len(values))
