"""A net with a skip over a stage and three heads of unequal size, clipped and updated by Adam."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.models.small_models import Adam, SmallModel

BATCH, WIDTH, LAYERS = 24, 24, 6
HEADS = (24, 48, 96)


def _loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    early = jnp.tanh(x @ params["layers"][0]["w"] + params["layers"][0]["b"])
    x = early
    for layer in params["layers"][1:]:
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    # The first layer's result skips everything between.
    x = x + early @ params["skip"]
    losses = []
    for head, target in zip(params["heads"], batch["y"], strict=True):
        out = jax.nn.gelu(x @ head["up"]) @ head["down"]
        losses.append(jnp.mean((out - target) ** 2))
    return losses[0] + 0.5 * losses[1] + 0.25 * losses[2]


def headed_model() -> SmallModel:
    """The model, with arrays for it."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    params = {
        "layers": [{"w": normal(WIDTH, WIDTH), "b": normal(WIDTH)} for _ in range(LAYERS)],
        "skip": normal(WIDTH, WIDTH),
        "heads": [{"up": normal(WIDTH, size), "down": normal(size, WIDTH)} for size in HEADS],
    }
    batch = {"x": normal(BATCH, WIDTH), "y": [normal(BATCH, WIDTH) for _ in HEADS]}
    clip, rate = 0.5, 1e-2
    optimizer = optax.chain(optax.clip_by_global_norm(clip), optax.adam(rate))

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array, Any]:
        loss, grads = jax.value_and_grad(_loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, grads

    args = (params, optimizer.init(params), batch)
    return SmallModel("headed", step, args, Adam(rate, b1=0.9, b2=0.999, eps=1e-8, clip=clip))
