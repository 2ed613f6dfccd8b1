"""Arrays that stay on workers: what a step on a cluster returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from autopar.errors import WorkerError
from autopar.lower.instructions import BufferSpec


class Keeper(Protocol):
    """The runtime whose workers hold the arrays."""

    def fetch(self, array: DistributedArray) -> np.ndarray[Any, Any]:
        """The whole array, here."""

    def settle(self) -> None:
        """Wait for the step under way; raise if it failed."""

    def forget(self, parts: Mapping[int, int]) -> None:
        """Nobody holds these (worker, handle) any more; from any thread, at any time."""

    def discard(self, parts: Mapping[int, int]) -> None:
        """Free these now."""


class DistributedArray:
    """An array whose shards lie on the devices of one or more workers.

    It is a leaf of any pytree. It can be passed to the next step, which then moves nothing; numpy
    and JAX read it through `__array__`. When the last reference goes, the workers free it.

    Attributes:
        shape, dtype: of the global array.
        parts: per worker that has it, the handle there.
        specs: per worker, how it lies there.
    """

    def __init__(
        self,
        keeper: Keeper,
        shape: tuple[int, ...],
        dtype: str,
        parts: Mapping[int, int],
        specs: Mapping[int, BufferSpec],
    ) -> None:
        self._keeper = keeper
        self.shape = shape
        self.dtype = jnp.dtype(dtype)
        self.parts = dict(parts)
        self.specs = dict(specs)
        self._deleted = ""

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the global array."""
        return self.size * int(self.dtype.itemsize)

    @property
    def sharding(self) -> str:
        """`worker 0: [x,-]`, one a worker that has it."""
        return "; ".join(f"worker {rank}: {spec.sharding}" for rank, spec in self.specs.items())

    def is_deleted(self) -> bool:
        """Whether it was deleted, or given away to a step."""
        return bool(self._deleted)

    def held_by(self, keeper: Keeper) -> bool:
        """Whether it lies on the workers of that runtime."""
        return self._keeper is keeper

    def check(self) -> None:
        """Refuse a deleted array.

        Raises:
            WorkerError: it was deleted, or given away.
        """
        if self._deleted:
            raise WorkerError(
                f"this array was {self._deleted}",
                got=repr(self),
                remedy="use the array that the step returned in its place",
            )

    def mark_gone(self, how: str) -> None:
        """The workers have it no longer: `deleted`, or `given away to a step`."""
        self._deleted = self._deleted or how

    def delete(self) -> None:
        """Free it on the workers."""
        if not self._deleted:
            self.mark_gone("deleted")
            self._keeper.discard(self.parts)

    def block_until_ready(self) -> DistributedArray:
        """Wait until the step that makes it has ended.

        Raises:
            WorkerError: the step failed.
        """
        self.check()
        self._keeper.settle()
        return self

    def __array__(
        self,
        dtype: Any = None,
        copy: bool | None = None,  # noqa: FBT001 - numpy's protocol
    ) -> np.ndarray[Any, Any]:
        """The whole array, fetched from a worker that has it."""
        self.check()
        found = self._keeper.fetch(self)
        return found if dtype is None else found.astype(dtype)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def item(self) -> Any:
        """The one element, as a Python number."""
        return np.asarray(self).item()

    def __repr__(self) -> str:
        state = f", {self._deleted}" if self._deleted else f", {self.sharding}"
        return f"DistributedArray({self.dtype}{list(self.shape)}{state})"

    def __del__(self) -> None:
        if not getattr(self, "_deleted", "unmade"):
            self._keeper.forget(self.parts)
