"""The comparison with the single device itself: what it must let pass, and what it must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from tests.models.small_models import NAMES, small_model
from tests.oracles.single_device import RELATIVE, differences, single_device

Change = Callable[[Any], Any]


def _compare(name: str, change: Change) -> list[str]:
    model, expected = small_model(name), single_device(name)
    return differences(model, model.args, expected, change(jax.tree.map(np.copy, expected)))


def _edit(part: int, edit: Callable[[Any], Any]) -> Change:
    """Edit the largest leaf of one result."""

    def change(results: Any) -> Any:
        leaves, tree = jax.tree.flatten(results[part])
        largest = max(range(len(leaves)), key=lambda i: leaves[i].size)
        leaves[largest] = edit(leaves[largest])
        return (*results[:part], jax.tree.unflatten(tree, leaves), *results[part + 1 :])

    return change


def _off_by(share: float) -> Callable[[Any], Any]:
    """One entry moved by a share of the leaf's largest."""

    def edit(leaf: Any) -> Any:
        flat = leaf.reshape(-1).copy()
        flat[0] += share * np.max(np.abs(leaf))
        return flat.reshape(leaf.shape)

    return edit


@pytest.mark.parametrize("name", NAMES)
def test_the_same_result_is_equal(name: str) -> None:
    assert _compare(name, lambda results: results) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", [1, 2, 3], ids=["opt_state", "loss", "grads"])
def test_differences_beyond_the_tolerance_are_told(name: str, part: int) -> None:
    assert _compare(name, _edit(part, _off_by(0.5 * RELATIVE))) == []
    (line,) = _compare(name, _edit(part, _off_by(2 * RELATIVE)))
    assert line.startswith(f"[{part}]")
    assert "1 of" in line


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_and_another_shape_or_dtype_are_told(name: str) -> None:
    (line,) = _compare(name, _edit(0, lambda leaf: np.where(leaf == leaf.flat[0], np.nan, leaf)))
    assert "nan" in line
    assert "in place of" in _compare(name, _edit(0, lambda leaf: leaf[:1]))[0]
    assert "in place of" in _compare(name, _edit(3, lambda leaf: leaf.astype(np.float64)))[0]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_rich_enough_to_compare(name: str) -> None:
    for leaf in jax.tree.leaves(single_device(name)[3]):
        assert np.isfinite(leaf).all()
        assert np.count_nonzero(leaf) > 0.5 * leaf.size


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_the_counter_of_steps_must_be_equal(name: str) -> None:
    model, expected = small_model(name), single_device(name)
    changed = jax.tree.map(lambda leaf: leaf + (leaf.dtype == np.int32), expected)
    lines = differences(model, model.args, expected, changed)
    assert len(lines) == 1
    assert "count" in lines[0]


@pytest.mark.parametrize("name", ["mlp", "gpt"])
@pytest.mark.parametrize(("share", "fine"), [(1e-6, True), (1e-1, False)])
def test_adam_may_flip_an_update_only_where_the_gradient_is_next_to_nothing(
    name: str, *, share: float, fine: bool
) -> None:
    """The gradient of one entry is made `share` of its leaf's largest, then its update flipped."""
    model, adam = small_model(name), small_model(name).adam
    assert adam is not None
    expected = jax.tree.map(np.copy, single_device(name))
    flipped = jax.tree.map(np.copy, expected)
    gradient, parameter = jax.tree.leaves(expected[3])[0], jax.tree.leaves(flipped[0])[0]
    size = share * np.abs(gradient).max()
    gradient.flat[0] = size
    parameter.flat[0] += 2 * adam.rate * size / (size + adam.eps)
    found = (*flipped[:3], expected[3])
    assert (differences(model, model.args, expected, found) == []) is fine
