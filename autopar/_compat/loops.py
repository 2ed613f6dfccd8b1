"""How a scan says which of its operands are constants and which are carried.

Until 0.11 in `num_consts` and `num_carry`; later in `ft_in`, a tree of three parts (constants,
carry, slices) with an entry an operand. Delete the first branch with JAX 0.10.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int] | None:
    """Numbers of constants and of carried values; None if this JAX version is not understood."""
    if "num_consts" in params and "num_carry" in params:
        return int(params["num_consts"]), int(params["num_carry"])
    parts: tuple[Any, ...] = tuple(getattr(params.get("ft_in"), "unpack", tuple)())
    if len(parts) != 3:
        return None
    return len(list(parts[0].vals)), len(list(parts[1].vals))
