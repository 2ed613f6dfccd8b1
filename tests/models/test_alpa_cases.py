from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.alpa_cases import CASES, BertCase, build, case, random_args


@pytest.mark.parametrize(
    ("name", "rows", "parameters"),
    [
        ("mlp-data", (256, 32), 6 * (32 * 32 + 32)),
        ("mlp-model", (32, 256), 6 * (256 * 256 + 256)),
        ("bert-data", (64, 64, 32), 2 * (12 * 32 * 32 + 13 * 32)),
        ("bert-model", (8, 8, 128), 2 * (12 * 128 * 128 + 13 * 128)),
    ],
)
def test_sizes_are_those_of_the_paper(name: str, rows: tuple[int, ...], parameters: int) -> None:
    step, args, batch_argnums = case(name)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args))
    assert batch_argnums == (2,)
    assert {leaf.shape for leaf in jax.tree.leaves(args[2])} == {rows}
    assert sum(leaf.size for leaf in jax.tree.leaves(args[0])) == parameters
    *state, loss = jax.eval_shape(step, *args)
    assert jax.tree.map(_aval, tuple(state)) == jax.tree.map(_aval, args[:2])
    assert loss.shape == ()


@pytest.mark.parametrize("name", sorted(CASES))
def test_random_args_fit_the_case(name: str) -> None:
    shapes = case(name)[1]
    assert jax.tree.map(_aval, random_args(name)) == jax.tree.map(_aval, shapes)


@pytest.mark.parametrize("name", ["mlp-data", "mlp-model", "bert-model"])
def test_loss_falls(name: str) -> None:
    step = jax.jit(case(name)[0])
    params, opt_state, batch = random_args(name)
    losses = []
    for _ in range(5):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    assert np.all(np.isfinite(losses))
    assert min(losses[1:]) < losses[0]


def test_a_block_of_the_fused_projection_is_a_block_of_heads() -> None:
    """Attention of the first half of the heads needs the first half of the fused outputs alone."""
    model = BertCase(batch=2, length=3, width=16, heads=4, layers=1)
    (layer,) = model.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), model.shape())
    halves = []
    for first in (0, 1):
        heads = BertCase(batch=2, length=3, width=8, heads=2, layers=1)
        halves.append(_attention_of_half(heads, layer, x, first))
    whole = model.attention(layer, x)
    np.testing.assert_allclose(
        sum(halves) + layer["attention_out"]["bias"], whole, rtol=1e-5, atol=1e-5
    )


def test_layers_are_unrolled_and_dots_dominate() -> None:
    step, args, _ = build(BertCase(batch=2, length=4, width=16, heads=4, layers=2))
    dots = [e for e in jax.make_jaxpr(step)(*args).eqns if e.primitive.name == "dot_general"]
    # A layer has six dots forward (four dense, two in attention) and two more for each backward,
    # less the input gradient of the very first dense layer.
    assert len(dots) == 2 * 6 * 3 - 1


def _attention_of_half(heads: BertCase, layer: Any, x: jax.Array, half: int) -> jax.Array:
    fused, out = layer["qkv"], layer["attention_out"]
    width = out["kernel"].shape[0] // 2
    columns, rows = _block(half, 3 * width), _block(half, width)
    local = {
        "qkv": {"kernel": fused["kernel"][:, columns], "bias": fused["bias"][columns]},
        "attention_out": {"kernel": out["kernel"][rows], "bias": jnp.zeros(2 * width)},
    }
    return heads.attention(local, x)


def _block(index: int, size: int) -> slice:
    return slice(index * size, (index + 1) * size)


def _aval(leaf: Any) -> tuple[tuple[int, ...], Any]:
    return leaf.shape, jnp.dtype(leaf.dtype)
