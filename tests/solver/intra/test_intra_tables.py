from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.solver.intra import tables
from autopar.solver.intra.tables import TableCache, argmin_dtype, minimise_out


def random_factors(seed: int) -> list[np.ndarray]:
    """Factors over a variable and up to three others, with ties and impossible entries."""
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1, 7, size=int(rng.integers(2, 5))))
    factors = []
    for _ in range(int(rng.integers(1, 5))):
        size = tuple(n if rng.random() < 0.6 else 1 for n in shape)
        factor = rng.integers(0, 3, size=size).astype(np.float64)
        factor[rng.random(size) < 0.1] = math.inf
        factors.append(factor)
    factors.append(np.zeros(shape[:1] + (1,) * (len(shape) - 1)))
    return factors


@pytest.mark.parametrize("entries", [1, 7, 40, 1 << 17])
def test_equals_the_plain_sum_and_argmin(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "BLOCK_ENTRIES", entries)
    for seed in range(60):
        factors = random_factors(seed)
        total = sum(factors[1:], start=factors[0])
        message = minimise_out(factors)
        np.testing.assert_array_equal(message.table, total.min(axis=0))
        np.testing.assert_array_equal(message.argmin, total.argmin(axis=0))


@pytest.mark.parametrize("size", [255, 256, 300])
def test_many_choices_do_not_wrap_the_argmin(size: int) -> None:
    costs = np.ones((size, 1))
    table = np.ones((size, 2))
    table[size - 1, 1] = 0.0
    assert minimise_out([costs, table]).argmin.tolist() == [0, size - 1]


def test_argmin_type_is_the_smallest_that_fits() -> None:
    assert [argmin_dtype(n) for n in (1, 255, 256, 65535, 65536)] == [
        np.uint8,
        np.uint8,
        np.uint16,
        np.uint16,
        np.uint32,
    ]


def test_cache_shares_equal_steps_and_only_those() -> None:
    cache = TableCache(1 << 20)
    table = np.arange(6.0).reshape(2, 3)
    first = cache.minimise([np.zeros((2, 1)), table])
    assert cache.minimise([np.zeros((2, 1)), table.copy()]) is first
    assert cache.minimise([np.ones((2, 1)), table]) is not first
    # Same bytes, another shape.
    assert cache.token(np.zeros((2, 3))) != cache.token(np.zeros((3, 2)))
    # Same memory, read the other way.
    square = np.arange(9.0).reshape(3, 3)
    assert cache.token(square) != cache.token(square.T)


def test_cache_gives_the_uncached_answers_when_it_overflows() -> None:
    cache = TableCache(100)
    for seed in [*range(20), *range(20)]:
        factors = random_factors(seed)
        cached, plain = cache.minimise(factors), minimise_out(factors)
        np.testing.assert_array_equal(cached.table, plain.table)
        np.testing.assert_array_equal(cached.argmin, plain.argmin)
