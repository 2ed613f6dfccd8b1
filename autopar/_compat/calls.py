"""How JAX versions name the primitives that merely call a jaxpr, and where they keep it."""

from __future__ import annotations

from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

INLINED = frozenset(
    {
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "custom_lin",
        "custom_vmap_call",
    }
)
"""Calls without meaning of their own. `pjit` became `jit` in 0.6."""

REFUSED = {"shard_map": "jax.shard_map (or another parallelised function)"}
"""Primitives that no plan can hold, with what users call them."""

REMAT = frozenset({"remat", "remat2", "checkpoint"})
"""`jax.checkpoint`: a call whose backward must not share work with its forward."""


def called_jaxpr(params: Any) -> ClosedJaxpr | None:
    """The jaxpr that a call-like equation runs. Since 0.12 `ClosedJaxpr is Jaxpr`."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        inner = params.get(key)
        if isinstance(inner, ClosedJaxpr):
            return inner
        if isinstance(inner, Jaxpr):
            return ClosedJaxpr(inner, ())
    return None
