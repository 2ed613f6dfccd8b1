"""A parallelised function is a whole program: it refuses to be differentiated or batched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_batching import custom_vmap

from autopar.errors import TransformError


def _refusal(name: str, transform: str, remedy: str) -> TransformError:
    return TransformError(
        f"{transform} of the parallelised function {name!r} is refused",
        why="the plan is made for the function as given, not for its transform",
        remedy=remedy,
    )


def grad_error(name: str) -> TransformError:
    """What differentiation gets."""
    return _refusal(name, "differentiation", "parallelise the function that calls jax.grad itself")


def vmap_error(name: str) -> TransformError:
    """What batching gets."""
    return _refusal(name, "jax.vmap", "parallelise the function that calls jax.vmap itself")


def traced_leaves(leaves: Sequence[Any], name: str = "step") -> bool:
    """Whether the call is being traced by an enclosing `jax.jit`.

    Raises:
        TransformError: it is being differentiated or batched.
    """
    tracers = [leaf for leaf in leaves if isinstance(leaf, jax.core.Tracer)]
    for tracer in tracers:
        kind = type(tracer).__name__
        if "Batch" in kind:
            raise vmap_error(name)
        if "JVP" in kind or "Linearize" in kind:
            raise grad_error(name)
    return bool(tracers)


def refuse_transforms(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function with derivatives and batching that raise; for use inside a traced program."""

    @custom_vmap
    def batched(*args: Any) -> Any:
        return function(*args)

    @batched.def_vmap
    def _no_vmap(axis_size: int, in_batched: Any, *args: Any) -> Any:
        raise vmap_error(name)

    @jax.custom_jvp
    def guarded(*args: Any) -> Any:
        return batched(*args)

    @guarded.defjvp
    def _no_jvp(primals: Any, tangents: Any) -> Any:
        raise grad_error(name)

    return guarded
