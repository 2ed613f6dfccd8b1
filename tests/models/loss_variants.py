"""Train steps that differ in how the loss meets the batch.

The steps return `(new params, loss, *auxiliary)`; the batch is their last argument. Shapes are
`(B, T, H)`: examples, positions, width. Where the three agree, nothing can be told from a size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, jax.Array]
Batch = dict[str, jax.Array]
Loss = Callable[[Params, Batch], jax.Array]

RATE = 100.0
"""Learning rate: so large that the new parameters are the gradient, and show any error of it."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One train step.

    Attributes:
        step: `step(params, batch)`.
        args: its arguments.
        batch_dim: dim of the batch in all batch arrays.
        tolerance: largest allowed relative difference between micro-batched and whole results.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    batch_dim: int = 0
    tolerance: float = 2e-5


Sizes = tuple[int, int, int]
"""B examples, T positions, width H."""


def _make(seed: int, sizes: Sizes) -> tuple[Params, Batch]:
    rng = np.random.default_rng(seed)
    rows, length, width = sizes

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(width), jnp.float32)

    params = {
        "w1": normal(width, width),
        "b1": normal(width),
        "w2": normal(width, width),
        "emb": normal(width, width),
    }
    batch = {
        "x": normal(rows, length, width),
        "y": normal(rows, length, width),
        "t": jnp.asarray(rng.integers(0, width, (rows, length)), jnp.int32),
        "m": jnp.asarray(rng.integers(0, 2, (rows, length)), jnp.float32),
        "w": jnp.asarray(rng.uniform(0.5, 1.5, (rows,)), jnp.float32),
    }
    return params, batch


def predict(params: Params, batch: Batch) -> jax.Array:
    """`[B, T, H]`: an embedding, a causal mix over T, two dense layers."""
    x = batch["x"] + params["emb"][batch["t"]]
    length = x.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(causal, jnp.einsum("bth,bsh->bts", x, x), -1e30)
    mixed = jnp.einsum("bts,bsh->bth", jax.nn.softmax(scores, -1), x)
    return jnp.tanh(mixed @ params["w1"] + params["b1"]) @ params["w2"]


def squares(params: Params, batch: Batch) -> jax.Array:
    """Squared error per example and position, `[B, T]`."""
    return jnp.sum((predict(params, batch) - batch["y"]) ** 2, -1)


def train_step(loss: Loss) -> Callable[[Params, Batch], tuple[Params, jax.Array]]:
    """One plain gradient step on `loss`."""

    def step(params: Params, batch: Batch) -> tuple[Params, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value

    return step


def mean_loss(params: Params, batch: Batch) -> jax.Array:
    return squares(params, batch).mean()


def sum_loss(params: Params, batch: Batch) -> jax.Array:
    return squares(params, batch).sum()


def weighted_loss(params: Params, batch: Batch) -> jax.Array:
    """A mean weighted per example, divided by the sum of the weights."""
    weights = batch["w"] / batch["w"].sum()
    return jnp.sum(weights[:, None] * squares(params, batch))


def masked_loss(params: Params, batch: Batch) -> jax.Array:
    """A mean over the positions that a mask keeps."""
    kept = jnp.maximum(batch["m"].sum(), 1.0)
    return jnp.sum(squares(params, batch) * batch["m"]) / kept


def root_loss(params: Params, batch: Batch) -> jax.Array:
    """Root of a mean: the derivative scales the whole cotangent."""
    return jnp.sqrt(squares(params, batch).mean())


def reshaped_loss(params: Params, batch: Batch) -> jax.Array:
    """Batch and time merged into one dim, as many losses do."""
    out = predict(params, batch)
    rows = out.reshape(-1, out.shape[-1])
    picked = jnp.take_along_axis(
        jax.nn.log_softmax(rows @ params["emb"].T), batch["t"].reshape(-1, 1), 1
    )
    return -picked.mean()


def inner_gradient_loss(params: Params, batch: Batch) -> jax.Array:
    """A penalty on the gradient with respect to the inputs: a gradient inside the forward."""

    def energy(x: jax.Array) -> jax.Array:
        return predict(params, {**batch, "x": x}).sum()

    return jnp.mean(jax.grad(energy)(batch["x"]) ** 2) + mean_loss(params, batch)


def checkpoint_loss(params: Params, batch: Batch) -> jax.Array:
    """Rematerialised activations."""
    out = jax.checkpoint(predict)(params, batch)
    return jnp.mean((out - batch["y"]) ** 2)


def scan_loss(params: Params, batch: Batch) -> jax.Array:
    """A recurrent layer: a scan over time with one row per example in its carry."""

    def cell(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = jnp.tanh(x @ params["w1"] + state @ params["w2"] + params["b1"])
        return state, state

    first = jnp.zeros_like(batch["x"][:, 0])
    _, states = jax.lax.scan(cell, first, jnp.swapaxes(batch["x"], 0, 1))
    return jnp.mean((jnp.swapaxes(states, 0, 1) - batch["y"]) ** 2)


def dropout_step(params: Params, key: jax.Array, batch: Batch) -> tuple[Params, jax.Array]:
    """A gradient step with dropout on the predictions."""

    def loss(params: Params) -> jax.Array:
        out = predict(params, batch)
        keep = jax.random.bernoulli(key, 0.75, out.shape)
        return jnp.mean((jnp.where(keep, out / 0.75, 0.0) - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value


def batch_second_loss(params: Params, batch: Batch) -> jax.Array:
    """The batch is dim 1 of every array: `x[T, B, H]`; rows merge as (T B)."""
    x = batch["x"] + params["emb"][batch["t"]]
    rows = x.reshape(-1, x.shape[-1])
    out = (jnp.tanh(rows @ params["w1"] + params["b1"]) @ params["w2"]).reshape(x.shape)
    return jnp.mean(jnp.sum((out - batch["y"]) ** 2, -1) * batch["m"])


def clipped_step(params: Params, batch: Batch) -> tuple[Params, jax.Array, jax.Array, jax.Array]:
    """Global-norm clipping, a norm and per-example losses as auxiliary results."""

    def loss(params: Params) -> tuple[jax.Array, jax.Array]:
        each = squares(params, batch).mean(-1)
        return each.mean(), each

    (value, each), grads = jax.value_and_grad(loss, has_aux=True)(params)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    factor = jnp.where(norm < 0.1, 1.0, 0.1 / norm)
    new = jax.tree.map(lambda p, g: p - RATE * factor * g, params, grads)
    return new, value, norm, each


LOSSES: Mapping[str, Loss] = {
    "mean": mean_loss,
    "sum": sum_loss,
    "weighted": weighted_loss,
    "masked": masked_loss,
    "root_of_mean": root_loss,
    "reshaped": reshaped_loss,
    "inner_gradient": inner_gradient_loss,
    "checkpoint": checkpoint_loss,
    "scan": scan_loss,
}


def variants(sizes: Sizes = (8, 6, 10), *, seed: int = 0) -> dict[str, Variant]:
    """Every step by name, on random arrays; `equal_sizes` has T = H = B whatever is asked."""
    params, batch = _make(seed, sizes)
    made = {name: Variant(train_step(loss), (params, batch)) for name, loss in LOSSES.items()}
    made["dropout"] = Variant(dropout_step, (params, jax.random.key(seed), batch))
    made["equal_sizes"] = Variant(train_step(mean_loss), _make(seed, (sizes[0],) * 3))
    second = {name: jnp.swapaxes(batch[name], 0, 1) for name in ("x", "y", "t", "m")}
    made["batch_dim_1"] = Variant(train_step(batch_second_loss), (params, second), batch_dim=1)
    made["clipped"] = Variant(clipped_step, (params, batch))
    return made


# --- steps that cannot be divided exactly ----------------------------------------------------


def batch_norm_loss(params: Params, batch: Batch) -> jax.Array:
    """Batch statistics inside the network."""
    hidden = batch["x"] @ params["w1"]
    centred = hidden - hidden.mean((0, 1))
    return jnp.mean((jnp.tanh(centred) @ params["w2"] - batch["y"]) ** 2)


def contrast_loss(params: Params, batch: Batch) -> jax.Array:
    """Every example against every other one of the batch."""
    rows = batch["x"][:, 0] @ params["w1"]
    scores = rows @ rows.T
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores)))


def balance_loss(params: Params, batch: Batch) -> jax.Array:
    """A product of two batch means per expert, as in mixtures of experts."""
    gates = jax.nn.softmax(batch["x"] @ params["w1"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), gates.shape[-1])
    return mean_loss(params, batch) + jnp.sum(gates.mean((0, 1)) * chosen.mean((0, 1)))


def partly_scaled_loss(params: Params, batch: Batch) -> jax.Array:
    """A root beside a mean: a whole-batch scalar that multiplies only part of the cotangent."""
    out = predict(params, batch)
    return jnp.sqrt(jnp.mean((out - batch["y"]) ** 2)) + jnp.mean(out**2)


REFUSED: Mapping[str, Loss] = {
    "batch_norm": batch_norm_loss,
    "contrast": contrast_loss,
    "balance": balance_loss,
    "partly_scaled": partly_scaled_loss,
}


def refused_variants(sizes: Sizes = (8, 6, 10), *, seed: int = 0) -> dict[str, Variant]:
    """Steps that must end in a named error."""
    made = _make(seed, sizes)
    return {name: Variant(train_step(loss), made) for name, loss in REFUSED.items()}
