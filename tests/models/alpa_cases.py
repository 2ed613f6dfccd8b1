"""The models of Alpa's auto-sharding tests (Zheng et al., OSDI 2022) in plain JAX and optax.

Alpa publishes the best objective of each on a (4, 1) mesh with alpha = beta = (1, 1), so they are
acceptance cases for a solver. `case(name)` gives the train step and the shapes of its arguments;
nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

Tree: TypeAlias = Any
TrainStep: TypeAlias = Callable[[Tree, Tree, Tree], tuple[Tree, Tree, jax.Array]]


@dataclass(frozen=True, slots=True)
class MlpCase:
    """Dense layers of one width with bias, ReLU between them."""

    batch: int
    width: int
    layers: int = 6

    def init(self, key: jax.Array) -> Tree:
        keys = jax.random.split(key, self.layers)
        return [_dense(k, self.width, self.width) for k in keys]

    def apply(self, params: Tree, x: jax.Array) -> jax.Array:
        for layer in params[:-1]:
            x = jax.nn.relu(_apply_dense(layer, x))
        return _apply_dense(params[-1], x)

    def shape(self) -> tuple[int, ...]:
        """Of the inputs and of the targets: [B, H]."""
        return (self.batch, self.width)


@dataclass(frozen=True, slots=True)
class BertCase:
    """BERT encoder layers on float inputs: no embedding, no dropout, no mask, post-norm."""

    batch: int
    length: int
    width: int
    heads: int = 8
    layers: int = 2

    def init(self, key: jax.Array) -> Tree:
        keys = jax.random.split(key, (self.layers, 4))
        return [self._init_layer(layer_keys) for layer_keys in keys]

    def _init_layer(self, keys: jax.Array) -> Tree:
        width = self.width
        return {
            "qkv": _dense(keys[0], width, 3 * width),
            "attention_out": _dense(keys[1], width, width),
            "attention_norm": _norm(width),
            "intermediate": _dense(keys[2], width, 4 * width),
            "output": _dense(keys[3], 4 * width, width),
            "output_norm": _norm(width),
        }

    def apply(self, params: Tree, x: jax.Array) -> jax.Array:
        for layer in params:
            x = _layer_norm(layer["attention_norm"], x + self.attention(layer, x))
            hidden = jax.nn.gelu(_apply_dense(layer["intermediate"], x))
            x = _layer_norm(layer["output_norm"], x + _apply_dense(layer["output"], hidden))
        return x

    def attention(self, layer: Tree, x: jax.Array) -> jax.Array:
        """Self-attention of [B, S, H], or the share of it that a block of heads has.

        The fused projection is [B, S, 3 H] read as [B, S, heads, head width, 3]: the head is the
        major-most part, so splitting 3 H into equal blocks splits the heads and moves nothing.
        """
        batch, length, _ = x.shape
        head_width = self.width // self.heads
        fused = _apply_dense(layer["qkv"], x)
        fused = fused.reshape(batch, length, self.heads, head_width, 3)
        query, key, value = fused[..., 0], fused[..., 1], fused[..., 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", query / head_width**0.5, key)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
        return _apply_dense(layer["attention_out"], mixed.reshape(batch, length, self.width))

    def shape(self) -> tuple[int, ...]:
        """Of the inputs and of the targets: [B, S, H]."""
        return (self.batch, self.length, self.width)


CASES: dict[str, MlpCase | BertCase] = {
    "mlp-data": MlpCase(batch=256, width=32),
    "mlp-model": MlpCase(batch=32, width=256),
    "bert-data": BertCase(batch=64, length=64, width=32),
    "bert-model": BertCase(batch=8, length=8, width=128),
}
"""Named for what is best: all-reduce of gradients only, or tensor parallelism."""


def case(name: str) -> tuple[TrainStep, tuple[Tree, Tree, Tree], tuple[int, ...]]:
    """`(step, (params, opt_state, batch), batch_argnums)`; the arguments are ShapeDtypeStructs."""
    return build(CASES[name])


def build(model: MlpCase | BertCase) -> tuple[TrainStep, tuple[Tree, Tree, Tree], tuple[int, ...]]:
    """As `case`, of any sizes: mean squared error on the output, Adam."""
    optimizer = optax.adam(1e-2)

    def loss_of(params: Tree, batch: Tree) -> jax.Array:
        return jnp.mean(jnp.square(model.apply(params, batch["x"]) - batch["y"]))

    def train_step(params: Tree, opt_state: Tree, batch: Tree) -> tuple[Tree, Tree, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = jax.eval_shape(model.init, jax.random.key(0))
    opt_state = jax.eval_shape(optimizer.init, params)
    rows = jax.ShapeDtypeStruct(model.shape(), jnp.float32)
    return train_step, (params, opt_state, {"x": rows, "y": rows}), (2,)


def random_args(name: str) -> tuple[Tree, Tree, Tree]:
    """Real arguments of `case(name)`."""
    model = CASES[name]
    params = model.init(jax.random.key(0))
    x, y = jax.random.normal(jax.random.key(1), (2, *model.shape()))
    return params, optax.adam(1e-2).init(params), {"x": x, "y": y}


def _dense(key: jax.Array, fan_in: int, fan_out: int) -> Tree:
    kernel = jax.random.normal(key, (fan_in, fan_out)) * fan_in**-0.5
    return {"kernel": kernel, "bias": jnp.zeros(fan_out)}


def _apply_dense(layer: Tree, x: jax.Array) -> jax.Array:
    out: jax.Array = x @ layer["kernel"] + layer["bias"]
    return out


def _norm(width: int) -> Tree:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def _layer_norm(params: Tree, x: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    scaled: jax.Array = centred * jax.lax.rsqrt(variance + 1e-6) * params["scale"] + params["bias"]
    return scaled
