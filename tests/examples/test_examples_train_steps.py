"""Every example: the contract of `make()`, shapes, sizes, and that it learns."""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import convnet, gpt, mlp

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
Made = tuple[Any, tuple[Any, ...], tuple[int, ...]]

# One layer less and fewer rows than the defaults: the tests compile without optimisation.
SMALL: dict[str, Callable[[], Made]] = {
    "mlp": lambda: mlp.build(mlp.Config(batch=12, widths=(24, 48, 24), rate=1e-2)),
    "gpt": lambda: gpt.build(
        gpt.Config(batch=6, length=12, vocabulary=48, layers=1, width=24, heads=6, hidden=48)
    ),
    "convnet": lambda: convnet.build(
        convnet.Config(batch=12, size=8, channels=(3, 6, 12), classes=6)
    ),
}


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_make_of_the_file_gives_a_step_and_arguments(name: str) -> None:
    step, args, batch_argnums = runpy.run_path(str(EXAMPLES / f"{name}.py"))["make"]()
    params, opt_state, loss = jax.eval_shape(step, *args)
    assert batch_argnums == (2,)
    assert loss.shape == ()
    assert loss.dtype == jnp.float32
    assert jax.tree.map(_aval, (params, opt_state)) == jax.tree.map(_aval, args[:2])
    (rows,) = {leaf.shape[0] for leaf in jax.tree.leaves(args[2])}
    assert rows % 48 == 0


@pytest.mark.parametrize("name", sorted(SMALL))
def test_loss_is_finite_and_falls_over_twenty_steps(name: str) -> None:
    step, (params, opt_state, batch), _ = SMALL[name]()
    losses = []
    for _ in range(20):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    assert np.all(np.isfinite(losses))
    assert losses[-1] < 0.99 * losses[0]


@pytest.mark.parametrize("name", sorted(SMALL))
def test_arguments_are_the_same_each_time(name: str) -> None:
    (_, one, _), (_, two, _) = SMALL[name](), SMALL[name]()
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_gpt_splits_by_eight_and_by_six() -> None:
    _, (params, _, _), _ = gpt.make()
    sizes = {size for leaf in jax.tree.leaves(params) for size in leaf.shape}
    head_width = gpt.Config().width // gpt.Config().heads
    assert all(size % 24 == 0 for size in sizes - {head_width})


def test_gpt_sees_no_later_token() -> None:
    config = gpt.Config(length=12, vocabulary=48, layers=2, width=24, heads=6, hidden=48)
    params = gpt.init(config)
    tokens = jax.random.randint(jax.random.key(2), (2, 12), 0, 48)
    changed = tokens.at[:, 7:].set((tokens[:, 7:] + 1) % 48)
    one, two = gpt.logits_of(params, tokens), gpt.logits_of(params, changed)
    np.testing.assert_array_equal(one[:, :7], two[:, :7])
    assert not np.array_equal(one[:, 7:], two[:, 7:])


def test_gpt_clips_the_gradient_before_adam() -> None:
    optimizer = gpt.make_optimizer(gpt.Config(clip=1.0, weight_decay=0.0))
    params = {"kernel": jnp.ones((2, 2))}
    updates = [
        optimizer.update({"kernel": jnp.full((2, 2), size)}, optimizer.init(params), params)[1]
        for size in (1e3, 1e6)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *updates)


def test_gpt_four_layers_for_planning_is_of_the_stated_size() -> None:
    shapes = jax.eval_shape(lambda: gpt.init(gpt.FOUR_LAYERS))
    assert len(shapes["layers"]) == 4
    assert 7e6 < sum(leaf.size for leaf in jax.tree.leaves(shapes)) < 9e6


def test_average_pool_is_the_mean_of_windows() -> None:
    x = jnp.arange(2 * 4 * 6 * 3.0).reshape(2, 4, 6, 3)
    expected = x.reshape(2, 2, 2, 3, 2, 3).mean(axis=(2, 4))
    np.testing.assert_allclose(convnet.average_pool(x), expected, rtol=1e-6)


def test_configs_are_values() -> None:
    for config in (mlp.Config(), gpt.Config(), convnet.Config()):
        assert dataclasses.replace(config) == config
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.rate = 0.0  # type: ignore[misc]


def _aval(leaf: Any) -> tuple[tuple[int, ...], Any]:
    return leaf.shape, jnp.dtype(leaf.dtype)
