"""Train step of a multi-layer perceptron: mean squared error, Adam.

autopar plan examples/mlp.py:make --cluster local:8
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True)
class Config:
    """Sizes and learning rate.

    Args:
        batch: rows a step.
        widths: width of the input, of each hidden layer, and of the output.
        rate: Adam's learning rate.
        seed: of weights and data.
    """

    batch: int = 48
    widths: tuple[int, ...] = (96, 192, 192, 96)
    rate: float = 1e-3
    seed: int = 0


def make(config: Config = Config()) -> tuple[Any, tuple[Any, ...], tuple[int, ...]]:
    """`(step, (params, opt_state, batch), batch_argnums)`, with real arrays."""
    return build(config)


def build(config: Config) -> tuple[Any, tuple[Any, ...], tuple[int, ...]]:
    """The jitted step `(params, opt_state, batch) -> (params, opt_state, loss)` and arguments.

    A batch is `{"inputs": f32[B, widths[0]], "targets": f32[B, widths[-1]]}`.
    """
    optimizer = optax.adam(config.rate)

    @jax.jit
    def train_step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = init(config)
    return train_step, (params, optimizer.init(params), random_batch(config)), (2,)


def init(config: Config) -> Any:
    """One `{"kernel": [I, O], "bias": [O]}` a layer, He-initialised."""
    fans = list(zip(config.widths[:-1], config.widths[1:], strict=True))
    keys = jax.random.split(jax.random.key(config.seed), len(fans))
    return [
        {
            "kernel": jax.random.normal(key, (fan_in, fan_out)) * (2 / fan_in) ** 0.5,
            "bias": jnp.zeros(fan_out),
        }
        for key, (fan_in, fan_out) in zip(keys, fans, strict=True)
    ]


def random_batch(config: Config) -> Any:
    """Normal inputs; the targets are a smooth function of them, so there is something to learn."""
    key, mixing = jax.random.split(jax.random.key(config.seed + 1))
    inputs = jax.random.normal(key, (config.batch, config.widths[0]))
    matrix = jax.random.normal(mixing, (config.widths[0], config.widths[-1]))
    return {"inputs": inputs, "targets": jnp.tanh(inputs @ matrix / config.widths[0] ** 0.5)}


def loss_of(params: Any, batch: Any) -> jax.Array:
    """Mean squared error over all elements."""
    x = batch["inputs"]
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    outputs = x @ params[-1]["kernel"] + params[-1]["bias"]
    return jnp.mean(jnp.square(outputs - batch["targets"]))
