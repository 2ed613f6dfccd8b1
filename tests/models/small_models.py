"""The example models at sizes for tests: steps that return their gradients besides.

Most dims are multiples of 24, so that meshes of 2, 3, 4, 6 and 8 devices divide them. One compile
gives everything that a plan must not change: new parameters, optimiser state, loss, gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax

from examples import convnet, gpt, mlp


@dataclass(frozen=True, slots=True)
class Adam:
    """What Adam does to a gradient; see `optax.adam`.

    Attributes:
        rate: learning rate.
        b1, b2: decay of the first and second moments.
        eps: added to the root of the second moment.
        clip: largest global norm of the gradients before Adam sees them.
    """

    rate: float
    b1: float
    b2: float
    eps: float
    clip: float = math.inf


@dataclass(frozen=True, slots=True)
class SmallModel:
    """A model to be run on one device and under a plan.

    Attributes:
        name: its name.
        step: `(params, opt_state, batch) -> (params, opt_state, loss, grads)`.
        args: arrays for it.
        adam: how parameters are updated, if by Adam; momentum SGD otherwise.
    """

    name: str
    step: Callable[..., Any]
    args: tuple[Any, Any, Any]
    adam: Adam | None


MLP = mlp.Config(batch=24, widths=(24, 48, 48, 24))
GPT = gpt.Config(batch=24, length=12, vocabulary=48, layers=2, width=48, heads=24, hidden=48)
CONVNET = convnet.Config(batch=24, size=12, channels=(3, 24, 24), classes=24)

NAMES = ("mlp", "gpt", "convnet")


@functools.cache
def small_model(name: str) -> SmallModel:
    """The model of that name; its arrays are shared, so give none of them away."""
    return {"mlp": _mlp, "gpt": _gpt, "convnet": _convnet}[name]()


def _mlp() -> SmallModel:
    optimizer = optax.adam(MLP.rate)
    params = mlp.init(MLP)
    args = (params, optimizer.init(params), mlp.random_batch(MLP))
    adam = Adam(MLP.rate, b1=0.9, b2=0.999, eps=1e-8)
    return SmallModel("mlp", _step(mlp.loss_of, optimizer), args, adam)


def _gpt() -> SmallModel:
    optimizer = gpt.make_optimizer(GPT)
    params = gpt.init(GPT)
    args = (params, optimizer.init(params), gpt.random_batch(GPT))
    adam = Adam(GPT.rate, b1=0.9, b2=0.95, eps=1e-6, clip=GPT.clip)
    return SmallModel("gpt", _step(gpt.loss_of, optimizer), args, adam)


def _convnet() -> SmallModel:
    optimizer = optax.sgd(CONVNET.rate, momentum=CONVNET.momentum)
    params = convnet.init(CONVNET)
    args = (params, optimizer.init(params), convnet.random_batch(CONVNET))
    return SmallModel("convnet", _step(convnet.loss_of, optimizer), args, None)


def _step(loss_of: Callable[[Any, Any], jax.Array], optimizer: Any) -> Callable[..., Any]:
    def train_step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array, Any]:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, grads

    return train_step
