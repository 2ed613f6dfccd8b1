"""Which arguments of a `jax.jit` object are static. JAX has no public accessor for it."""

from __future__ import annotations

from typing import Any


def static_positions(jitted: Any, count: int) -> frozenset[int] | None:
    """Positions of the static ones among `count` positional arguments; None if JAX hides them.

    `jitted.trace(...).args_info` leaves static arguments out, and a static integer looks like an
    array of no dims, so positions cannot be worked out from it alone. Delete when jit objects or
    their traces tell.
    """
    info = getattr(jitted, "_jit_info", None)
    numbers = getattr(info, "static_argnums", None)
    if numbers is None:
        return None
    return frozenset(number % count for number in numbers if -count <= number < count)
