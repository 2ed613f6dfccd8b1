"""Train step of a small convolutional classifier: softmax cross-entropy, SGD with momentum.

autopar plan examples/convnet.py:make --cluster local:8
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True)
class Config:
    """Sizes and optimiser.

    Args:
        batch: images a step.
        size: height and width of an image; halved after every convolution but the first.
        channels: of the image, then of each convolution's output.
        kernel: height and width of every kernel.
        classes: number of labels.
        rate: learning rate.
        momentum: SGD's momentum.
        seed: of weights and data.
    """

    batch: int = 48
    size: int = 24
    channels: tuple[int, ...] = (3, 24, 48, 96)
    kernel: int = 3
    classes: int = 24
    rate: float = 0.05
    momentum: float = 0.9
    seed: int = 0


def make(config: Config = Config()) -> tuple[Any, tuple[Any, ...], tuple[int, ...]]:
    """`(step, (params, opt_state, batch), batch_argnums)`, with real arrays."""
    return build(config)


def build(config: Config) -> tuple[Any, tuple[Any, ...], tuple[int, ...]]:
    """The jitted step `(params, opt_state, batch) -> (params, opt_state, loss)` and arguments.

    A batch is `{"images": f32[B, size, size, C], "labels": i32[B]}`.
    """
    optimizer = optax.sgd(config.rate, momentum=config.momentum)

    @jax.jit
    def train_step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = init(config)
    return train_step, (params, optimizer.init(params), random_batch(config)), (2,)


def init(config: Config) -> Any:
    """Kernels are [height, width, I, O], He-initialised."""
    pairs = list(zip(config.channels[:-1], config.channels[1:], strict=True))
    *conv_keys, head_key = jax.random.split(jax.random.key(config.seed), len(pairs) + 1)
    convolutions = [
        {
            "kernel": jax.random.normal(key, (config.kernel, config.kernel, fan_in, fan_out))
            * (2 / (config.kernel**2 * fan_in)) ** 0.5,
            "bias": jnp.zeros(fan_out),
        }
        for key, (fan_in, fan_out) in zip(conv_keys, pairs, strict=True)
    ]
    last = config.channels[-1]
    head = {
        "kernel": jax.random.normal(head_key, (last, config.classes)) * last**-0.5,
        "bias": jnp.zeros(config.classes),
    }
    return {"convolutions": convolutions, "head": head}


def random_batch(config: Config) -> Any:
    """Normal images with random labels."""
    image_key, label_key = jax.random.split(jax.random.key(config.seed + 1))
    shape = (config.batch, config.size, config.size, config.channels[0])
    return {
        "images": jax.random.normal(image_key, shape),
        "labels": jax.random.randint(label_key, (config.batch,), 0, config.classes),
    }


def loss_of(params: Any, batch: Any) -> jax.Array:
    """Mean softmax cross-entropy over the batch."""
    x = batch["images"]
    for index, layer in enumerate(params["convolutions"]):
        x = jax.nn.relu(convolve(x, layer["kernel"]) + layer["bias"])
        if index > 0:
            x = average_pool(x)
    features = jnp.mean(x, axis=(1, 2))
    logits = features @ params["head"]["kernel"] + params["head"]["bias"]
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_probs, batch["labels"][:, None], axis=-1))


def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Stride 1, same padding: [B, H, W, I] x [h, w, I, O] -> [B, H, W, O]."""
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def average_pool(x: jax.Array) -> jax.Array:
    """Mean of every 2 x 2 window: [B, H, W, C] -> [B, H/2, W/2, C]."""
    window = (1, 2, 2, 1)
    means: jax.Array = jax.lax.reduce_window(x, 0.0, jax.lax.add, window, window, "VALID") / 4
    return means
