"""The single device's result of a train step, and how far another result may be from it.

Loss, gradients, moments: a difference of at most `RELATIVE` times the leaf's largest entry, or
times `FLOOR` of the largest in its tree where that is more (a gradient that is zero but for
rounding has no scale of its own). Integers are equal. A tree is all parameters, all gradients, all
first moments, and so on: a step counter must not lend its size to second moments.

Parameters updated by Adam are another matter: from zero moments the update is `g / (|g| + eps)`,
the sign of `g`, so an entry that rounding moves from 1e-9 to -1e-9 moves the parameter by twice the
learning rate. What must hold is that the update is Adam's of a gradient within the gradients'
tolerance d: the parameter may differ by `rate * (max u - min u)` over `[g - d, g + d]`, and by the
plain tolerance besides. With moments m and v::

    u(g) = (b1 m + (1 - b1) g) / c1 / (sqrt((b2 v + (1 - b2) g^2) / c2) + eps)

which is smooth with one extremum (but for eps), at `g = (1 - b1) b2 v / ((1 - b2) b1 m)`; from zero
moments it is monotone. `c1`, `c2` correct the bias of the `n`-th step: `1 - b1^n`, `1 - b2^n`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from tests.models.small_models import Adam, SmallModel, small_model

Array = NDArray[np.float64]

RELATIVE = 5e-6
FLOOR = 1e-3


@functools.cache
def single_device(name: str) -> Any:
    """What one device makes of the small model's arguments, as numpy arrays."""
    model = small_model(name)
    return run_single(model, model.args)


def run_single(model: SmallModel, args: tuple[Any, Any, Any]) -> Any:
    """The step on one device, as numpy arrays."""
    return jax.tree.map(np.asarray, jax.jit(model.step)(*args))


def differences(model: SmallModel, args: Sequence[Any], expected: Any, found: Any) -> list[str]:
    """The leaves that are too far from the single device's, each with by how much.

    Args:
        model: the model.
        args: what the step was given.
        expected, found: two results of it.
    """
    pairs = jax.tree_util.tree_flatten_with_path(expected)[0]
    plain = _plain([_group(path) for path, _ in pairs], [leaf for _, leaf in pairs])
    allowed: list[Any] = list(plain)
    if model.adam is not None:
        for number, extra in enumerate(_updates(model.adam, args, expected)):
            allowed[number] = allowed[number] + extra
    aligned = jax.tree.leaves(jax.tree.map(lambda want, got: np.asarray(got), expected, found))
    rows = zip(pairs, aligned, allowed, strict=True)
    lines = [_difference(want, got, limit) for (_, want), got, limit in rows]
    names = [jax.tree_util.keystr(path) for path, _ in pairs]
    return [f"{name}: {line}" for name, line in zip(names, lines, strict=True) if line]


def _difference(want: Any, got: Any, limit: Any) -> str:
    """Where and by how much `got` is out of its limit, or nothing."""
    if want.shape != got.shape or want.dtype != got.dtype:
        return f"{got.dtype}{got.shape} in place of {want.dtype}{want.shape}"
    far = np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64))
    # written so that a NaN is too far
    wrong = ~(far <= limit)
    if not wrong.any():
        return ""
    excess = np.where(np.isnan(far), np.inf, far - limit)
    at = tuple(map(int, np.unravel_index(np.argmax(excess), far.shape)))
    most = float(np.broadcast_to(limit, far.shape)[at])
    return f"{int(wrong.sum())} of {far.size} entries; at {at} by {far[at]:.3g}, allowed {most:.3g}"


def _group(path: Sequence[Any]) -> str:
    """`0` parameters, `2` the loss, `3` gradients, or the field of the optimiser's state."""
    fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    return str(fields[0]) if fields else str(path[0].idx)


def _plain(groups: Sequence[str], leaves: Sequence[Any]) -> list[Any]:
    own = [float(np.max(np.abs(leaf), initial=0.0)) for leaf in leaves]
    largest: dict[str, float] = {}
    for group, size in zip(groups, own, strict=True):
        largest[group] = max(largest.get(group, 0.0), size)
    return [
        0.0
        if np.issubdtype(leaf.dtype, np.integer)
        else RELATIVE * max(size, FLOOR * largest[group])
        for leaf, group, size in zip(leaves, groups, own, strict=True)
    ]


def _updates(adam: Adam, args: Sequence[Any], expected: Any) -> list[Array]:
    """Per parameter leaf, what its entries may differ by because their gradients may."""
    grads = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(expected[3])]
    norm = float(np.sqrt(sum(float(np.sum(np.square(leaf))) for leaf in grads)))
    grads = [leaf * min(1.0, adam.clip / norm) for leaf in grads]
    reach = _plain(["gradients"] * len(grads), grads)
    first, second, steps = _moments(args[1])
    rows = zip(grads, reach, first, second, strict=True)
    return [adam.rate * _spread(adam, g, d, (m, v, steps + 1)) for g, d, m, v in rows]


def _moments(opt_state: Any) -> tuple[list[Array], list[Array], int]:
    """First and second moments of the parameters in order, and the number of steps done."""
    found: dict[str, list[Any]] = {"mu": [], "nu": [], "count": []}
    for path, leaf in jax.tree_util.tree_flatten_with_path(opt_state)[0]:
        fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        found[fields[0]].append(np.asarray(leaf, np.float64))
    return found["mu"], found["nu"], int(found["count"][0])


def _spread(adam: Adam, g: Array, d: float, state: tuple[Array, Array, int]) -> Array:
    """max u - min u over `[g - d, g + d]`, entry by entry."""
    m, v, step = state

    def update(gradient: Array) -> Array:
        mean = (adam.b1 * m + (1 - adam.b1) * gradient) / (1 - adam.b1**step)
        square = (adam.b2 * v + (1 - adam.b2) * gradient**2) / (1 - adam.b2**step)
        made: Array = mean / (np.sqrt(square) + adam.eps)
        return made

    slope = (1 - adam.b2) * adam.b1 * m
    safe = np.where(slope == 0, 1.0, slope)
    extremum = np.where(slope == 0, g, (1 - adam.b1) * adam.b2 * v / safe)
    tried = [update(g - d), update(g), update(g + d), update(np.clip(extremum, g - d, g + d))]
    spread: Array = np.max(tried, axis=0) - np.min(tried, axis=0)
    return spread
