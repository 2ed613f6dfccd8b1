"""Seconds one device computes: the roofline (Williams, Waterman, Patterson 2009).

seconds = max(flops / peak, bytes / bandwidth)
"""

from __future__ import annotations

from autopar.hardware import Device


def compute_seconds(flops: float, moved_bytes: float, device: Device, dtype: str) -> float:
    """Seconds of an op that does `flops` in `dtype` and moves `moved_bytes` to and from memory.

    Args:
        flops: floating-point operations on one device, from 0.
        moved_bytes: bytes of its operands and results on one device, from 0.
        device: an infinite peak or bandwidth makes that side free.
        dtype: numpy's name of the type that is multiplied.
    """
    return max(flops / device.peak(dtype), moved_bytes / device.memory_bandwidth)
