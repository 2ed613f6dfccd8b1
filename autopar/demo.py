"""What `autopar demo` trains: a small byte-level transformer on the manual that Python ships.

The text is `pydoc_data.topics` (CPython's help texts, close to half a megabyte), so nothing has to
be downloaded. The model is a pre-norm decoder-only transformer whose token embedding is also its
head, trained by AdamW (Loshchilov & Hutter, 2019) with global-norm clipping. It is plain JAX and
optax and knows nothing of devices; every size divides by eight.

The optimiser is tuned to be *comparable*. A parallel run adds the same numbers in another order;
Adam divides by the root of a second moment and so turns a rounding error in a tiny gradient into a
whole step. A warm-up, clipping and an `eps` well above that rounding error keep both runs together
for the length of the demo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pydoc_data import topics
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

Tree: TypeAlias = Any
"""A tree of arrays: parameters (nested dicts) or optax's optimizer state."""

Batch: TypeAlias = Mapping[str, Any]
"""`{"tokens": int32[B, T + 1]}`, of numpy or JAX."""

Step: TypeAlias = Callable[[Tree, Tree, Batch], tuple[Tree, Tree, jax.Array]]
"""(params, opt_state, batch) -> (params, opt_state, loss); the loss is that before the update."""

_VOCABULARY = 256  # one token a byte


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """Model, data and optimiser of the demo.

    Args:
        steps: length of the run, and of the learning-rate schedule.
        batch: sequences a step.
        length: tokens predicted a sequence (a batch holds one more).
        layers: transformer layers.
        width: width of the residual stream; must be a multiple of `heads`.
        heads: attention heads.
        expansion: hidden width of the feed-forward part, in widths.
        peak_rate: learning rate at the end of the warm-up.
        warmup: steps of linear warm-up, at most half of `steps`; a cosine decay to a tenth of the
            peak follows.
        clip: largest global norm of the gradient.
        eps: Adam's epsilon.
        weight_decay: decoupled decay of everything with two dims or more.
        seed: of the initial weights and of the batches.
    """

    steps: int = 300
    batch: int = 16
    length: int = 64
    layers: int = 2
    width: int = 128
    heads: int = 8
    expansion: int = 4
    peak_rate: float = 3e-3
    warmup: int = 30
    clip: float = 1.0
    eps: float = 1e-6
    weight_decay: float = 0.01
    seed: int = 0


def text_bytes() -> npt.NDArray[np.uint8]:
    """The training text, one byte a token: CPython's help topics in the order of their names."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return np.frombuffer(text.encode(), dtype=np.uint8)


def batches(config: DemoConfig) -> Iterator[dict[str, npt.NDArray[np.int32]]]:
    """Endless batches `{"tokens": int32[B, T + 1]}`: random windows, the same for the same seed."""
    text = text_bytes().astype(np.int32)
    generator = np.random.default_rng(config.seed)
    window = np.arange(config.length + 1)
    while True:
        starts = generator.integers(0, len(text) - config.length, size=config.batch)
        yield {"tokens": text[starts[:, None] + window]}


def init_state(config: DemoConfig) -> tuple[Tree, Tree]:
    """Fresh `(params, opt_state)`, the same for the same seed."""
    params = _init_params(config)
    return params, _optimizer(config).init(params)


def make_step(config: DemoConfig) -> Step:
    """The train step on `{"tokens": int32[B, T + 1]}`, not jitted."""
    optimizer = _optimizer(config)

    def train_step(params: Tree, opt_state: Tree, batch: Batch) -> tuple[Tree, Tree, jax.Array]:
        loss, grads = jax.value_and_grad(_loss)(params, batch["tokens"])
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step


def _optimizer(config: DemoConfig) -> Any:
    # A run cut short still warms up, and still decays.
    warmup = min(config.warmup, config.steps // 2)
    rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.peak_rate,
        warmup_steps=warmup,
        decay_steps=config.steps,
        end_value=config.peak_rate / 10,
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(rate, b2=0.95, eps=config.eps, weight_decay=config.weight_decay, mask=_decayed),
    )


def _decayed(params: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def _init_params(config: DemoConfig) -> Tree:
    """Normal weights of variance 1 / fan-in; what writes to the residual stream starts smaller."""
    width, heads, hidden = config.width, config.heads, config.expansion * config.width
    head_width = width // heads
    narrow, residual = width**-0.5, (2 * config.layers) ** -0.5
    keys = iter(jax.random.split(jax.random.key(config.seed), 2 + 6 * config.layers))

    def normal(*shape: int, scale: float) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape)

    def norm() -> Tree:
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    def layer() -> Tree:
        return {
            "attention_norm": norm(),
            "query": normal(width, heads, head_width, scale=narrow),
            "key": normal(width, heads, head_width, scale=narrow),
            "value": normal(width, heads, head_width, scale=narrow),
            "out": normal(heads, head_width, width, scale=narrow * residual),
            "mlp_norm": norm(),
            "up": {"kernel": normal(width, hidden, scale=narrow), "bias": jnp.zeros(hidden)},
            "down": {
                "kernel": normal(hidden, width, scale=hidden**-0.5 * residual),
                "bias": jnp.zeros(width),
            },
        }

    return {
        "embedding": normal(_VOCABULARY, width, scale=narrow),
        "positions": normal(config.length, width, scale=narrow),
        "layers": [layer() for _ in range(config.layers)],
        "final_norm": norm(),
    }


def _loss(params: Tree, tokens: jax.Array) -> jax.Array:
    return jnp.mean(token_losses(params, tokens))


def token_losses(params: Tree, tokens: jax.Array) -> jax.Array:
    """Cross-entropy of each next byte, in nats: int32[B, T + 1] -> float32[B, T]."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = params["embedding"][inputs] + params["positions"]
    for layer in params["layers"]:
        x = x + _attention(layer, _layer_norm(layer["attention_norm"], x))
        x = x + _mlp(layer, _layer_norm(layer["mlp_norm"], x))
    logits = _layer_norm(params["final_norm"], x) @ params["embedding"].T
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]


def _layer_norm(params: Tree, x: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    scaled: jax.Array = centred * jax.lax.rsqrt(variance + 1e-5) * params["scale"] + params["bias"]
    return scaled


def _attention(layer: Tree, x: jax.Array) -> jax.Array:
    """Causal self-attention; x is [B, T, D], the kernels are [D, H, K] and [H, K, D]."""
    query = jnp.einsum("btd,dhk->bthk", x, layer["query"])
    key = jnp.einsum("btd,dhk->bthk", x, layer["key"])
    value = jnp.einsum("btd,dhk->bthk", x, layer["value"])
    scores = jnp.einsum("bthk,bshk->bhts", query, key) * query.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], dtype=bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30))
    mixed = jnp.einsum("bhts,bshk->bthk", weights, value)
    return jnp.einsum("bthk,hkd->btd", mixed, layer["out"])


def _mlp(layer: Tree, x: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(x @ layer["up"]["kernel"] + layer["up"]["bias"])
    out: jax.Array = hidden @ layer["down"]["kernel"] + layer["down"]["bias"]
    return out
