"""Train step of a decoder-only transformer: next-token cross-entropy, clipped AdamW.

    autopar plan examples/gpt.py:make --cluster local:8
    autopar plan examples/gpt.py:make_four_layers --cluster h100-80g:1x8

Pre-norm blocks, learned positions, tanh-GELU; the token embedding is also the head. Heads are a dim
of their own in every attention kernel. The layers are a plain Python loop, so a traced step shows
each of them.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True)
class Config:
    """Sizes and optimiser; `width` must be a multiple of `heads`.

    Args:
        batch: sequences a step (B).
        length: predicted tokens a sequence (T); a batch holds one more.
        vocabulary: number of token ids (V).
        layers: transformer blocks.
        width: of the residual stream (D).
        heads: attention heads (H), each of width K = D / H.
        hidden: inner width of the feed-forward part (F).
        rate: learning rate.
        clip: largest global norm of the gradients.
        weight_decay: decoupled decay of all kernels and embeddings.
        seed: of weights and data.
    """

    batch: int = 48
    length: int = 24
    vocabulary: int = 192
    layers: int = 2
    width: int = 96
    heads: int = 24
    hidden: int = 192
    rate: float = 1e-3
    clip: float = 1.0
    weight_decay: float = 0.01
    seed: int = 0


FOUR_LAYERS = Config(
    batch=48, length=96, vocabulary=1536, layers=4, width=384, heads=24, hidden=1536
)


def make(config: Config = Config()) -> tuple[Any, tuple[Any, ...], tuple[int, ...]]:
    """`(step, (params, opt_state, batch), batch_argnums)`, with real arrays."""
    return build(config)


def make_four_layers() -> tuple[Any, tuple[Any, ...], tuple[int, ...]]:
    """`make` of four wider layers, for planning: about 8 million parameters."""
    return build(FOUR_LAYERS)


def build(config: Config) -> tuple[Any, tuple[Any, ...], tuple[int, ...]]:
    """The jitted step `(params, opt_state, batch) -> (params, opt_state, loss)` and arguments.

    A batch is `{"tokens": i32[B, T + 1]}`.
    """
    optimizer = make_optimizer(config)

    @jax.jit
    def train_step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = init(config)
    return train_step, (params, optimizer.init(params), random_batch(config)), (2,)


def make_optimizer(config: Config) -> Any:
    """Clipping by global norm, then AdamW; norms and biases (one dim) do not decay."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            config.rate,
            b2=0.95,
            eps=1e-6,
            weight_decay=config.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )


def init(config: Config) -> Any:
    """Normal weights of deviation 0.02; what writes to the residual stream starts smaller."""
    head_width = config.width // config.heads
    residual = 0.02 / (2 * config.layers) ** 0.5
    keys = iter(jax.random.split(jax.random.key(config.seed), 2 + 6 * config.layers))

    def normal(*shape: int, scale: float = 0.02) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape)

    def dense(*shape: int, bias: tuple[int, ...], scale: float = 0.02) -> Any:
        return {"kernel": normal(*shape, scale=scale), "bias": jnp.zeros(bias)}

    def norm() -> Any:
        return {"scale": jnp.ones(config.width), "bias": jnp.zeros(config.width)}

    def block() -> Any:
        width, heads = config.width, config.heads
        return {
            "attention_norm": norm(),
            "query": normal(width, heads, head_width),
            "key": normal(width, heads, head_width),
            "value": normal(width, heads, head_width),
            "out": dense(heads, head_width, width, bias=(width,), scale=residual),
            "mlp_norm": norm(),
            "up": dense(width, config.hidden, bias=(config.hidden,)),
            "down": dense(config.hidden, width, bias=(width,), scale=residual),
        }

    return {
        "embedding": normal(config.vocabulary, config.width),
        "positions": normal(config.length, config.width),
        "layers": [block() for _ in range(config.layers)],
        "final_norm": norm(),
    }


def random_batch(config: Config) -> Any:
    """Uniform token ids."""
    shape = (config.batch, config.length + 1)
    key = jax.random.key(config.seed + 1)
    return {"tokens": jax.random.randint(key, shape, 0, config.vocabulary)}


def loss_of(params: Any, batch: Any) -> jax.Array:
    """Mean cross-entropy of the next token, in nats."""
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    log_probs = jax.nn.log_softmax(logits_of(params, inputs))
    return -jnp.mean(jnp.take_along_axis(log_probs, targets[..., None], axis=-1))


def logits_of(params: Any, tokens: jax.Array) -> jax.Array:
    """i32[B, T] -> f32[B, T, V]."""
    x = params["embedding"][tokens] + params["positions"][: tokens.shape[1]]
    for layer in params["layers"]:
        x = x + attention(layer, layer_norm(layer["attention_norm"], x))
        x = x + feed_forward(layer, layer_norm(layer["mlp_norm"], x))
    logits: jax.Array = layer_norm(params["final_norm"], x) @ params["embedding"].T
    return logits


def layer_norm(params: Any, x: jax.Array) -> jax.Array:
    """Over the last dim, with scale and bias."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    scaled: jax.Array = centred * jax.lax.rsqrt(variance + 1e-5) * params["scale"] + params["bias"]
    return scaled


def attention(layer: Any, x: jax.Array) -> jax.Array:
    """Causal self-attention: [B, T, D] -> [B, T, D], kernels [D, H, K] and [H, K, D]."""

    query = jnp.einsum("btd,dhk->bthk", x, layer["query"])
    key = jnp.einsum("btd,dhk->bthk", x, layer["key"])
    value = jnp.einsum("btd,dhk->bthk", x, layer["value"])
    scores = jnp.einsum("bthk,bshk->bhts", query, key) * query.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], dtype=bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30))
    mixed = jnp.einsum("bhts,bshk->bthk", weights, value)
    out: jax.Array = (
        jnp.einsum("bthk,hkd->btd", mixed, layer["out"]["kernel"]) + layer["out"]["bias"]
    )
    return out


def feed_forward(layer: Any, x: jax.Array) -> jax.Array:
    """GELU of one dense layer, through another: [B, T, D] -> [B, T, D]."""
    hidden = jax.nn.gelu(x @ layer["up"]["kernel"] + layer["up"]["bias"])
    out: jax.Array = hidden @ layer["down"]["kernel"] + layer["down"]["bias"]
    return out
