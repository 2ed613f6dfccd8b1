"""The price of a piece of work on one device, in seconds and bytes; prices add and scale."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """What some work takes on each device.

    Attributes:
        compute_seconds: seconds the device computes or waits for its memory.
        communication_seconds: seconds of collectives.
        communication_bytes: bytes that one device sends.
    """

    compute_seconds: float = 0.0
    communication_seconds: float = 0.0
    communication_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """Compute and communication one after the other."""
        return self.compute_seconds + self.communication_seconds

    def __add__(self, other: Cost) -> Cost:
        """Both pieces of work, one after the other."""
        return Cost(
            self.compute_seconds + other.compute_seconds,
            self.communication_seconds + other.communication_seconds,
            self.communication_bytes + other.communication_bytes,
        )

    def __mul__(self, times: float) -> Cost:
        """The same work `times` times."""
        return Cost(
            self.compute_seconds * times,
            self.communication_seconds * times,
            self.communication_bytes * times,
        )

    __rmul__ = __mul__

    def __str__(self) -> str:
        return (
            f"{self.seconds:.4g} s (compute {self.compute_seconds:.4g} s, communication "
            f"{self.communication_seconds:.4g} s, {self.communication_bytes:.4g} bytes)"
        )


def total(costs: Iterable[Cost]) -> Cost:
    """The sum of `costs`, in their order; no costs make a zero cost."""
    result = Cost()
    for cost in costs:
        result = result + cost
    return result
