from __future__ import annotations

from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar import demo

SMALL = demo.DemoConfig(steps=20, batch=8, length=24, layers=1, width=32, heads=4, warmup=5)


def test_text_is_long_and_the_same_each_time() -> None:
    text = demo.text_bytes()
    assert text.dtype == np.uint8
    assert len(text) > 100_000
    np.testing.assert_array_equal(text, demo.text_bytes())
    topics = bytes(text).decode()
    assert topics.index('The "assert" statement') < topics.index('The "while" statement')


def test_batches_are_windows_of_the_text_and_follow_the_seed() -> None:
    first = [batch["tokens"] for batch in islice(demo.batches(SMALL), 3)]
    again = [batch["tokens"] for batch in islice(demo.batches(SMALL), 3)]
    other = next(demo.batches(demo.DemoConfig(batch=8, length=24, seed=1)))["tokens"]
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first[0], other)
    text = bytes(demo.text_bytes())
    for row in np.concatenate(first):
        assert row.shape == (SMALL.length + 1,)
        assert row.astype(np.uint8).tobytes() in text


def test_state_follows_the_seed() -> None:
    one, two = demo.init_state(SMALL), demo.init_state(SMALL)
    other = demo.init_state(demo.DemoConfig(layers=1, width=32, heads=4, length=24, seed=1))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert not np.array_equal(one[0]["embedding"], other[0]["embedding"])


def test_step_keeps_the_tree_and_the_loss_falls() -> None:
    step = jax.jit(demo.make_step(SMALL))
    params, opt_state = demo.init_state(SMALL)
    before = jax.tree.map(jax.typeof, (params, opt_state))
    losses = []
    for batch in islice(demo.batches(SMALL), SMALL.steps):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    assert jax.tree.map(jax.typeof, (params, opt_state)) == before
    assert losses[0] == pytest.approx(np.log(256), abs=1.0)
    assert np.mean(losses[-3:]) < losses[0] - 1.0
    assert np.all(np.isfinite(losses))


def test_a_prediction_sees_no_later_token() -> None:
    params, _ = demo.init_state(SMALL)
    tokens = next(demo.batches(SMALL))["tokens"]

    shorter = {**params, "positions": params["positions"][:12]}
    whole = jax.jit(demo.token_losses)(params, jnp.asarray(tokens))
    half = jax.jit(demo.token_losses)(shorter, jnp.asarray(tokens[:, :13]))
    np.testing.assert_allclose(whole[:, :12], half, rtol=1e-4)


def test_every_size_of_the_default_divides_by_eight() -> None:
    params, _ = demo.init_state(demo.DemoConfig())
    sizes = {size for leaf in jax.tree.leaves(params) for size in leaf.shape}
    assert {size for size in sizes if size % 8} == set()
    assert demo.DemoConfig().batch % 8 == 0


def test_a_run_shorter_than_the_warm_up_still_moves() -> None:
    config = demo.DemoConfig(steps=2, batch=2, length=8, layers=1, width=16, heads=2)
    step = jax.jit(demo.make_step(config))
    params, opt_state = start = demo.init_state(config)
    for batch in islice(demo.batches(config), config.steps):
        params, opt_state, loss = step(params, opt_state, batch)
    assert np.isfinite(loss)
    assert not np.array_equal(params["embedding"], start[0]["embedding"])
