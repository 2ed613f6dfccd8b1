import math

import pytest

from autopar.hardware import Device
from autopar.solver.cost.compute import compute_seconds

DEVICE = Device("d", (("default", 100.0), ("bfloat16", 400.0)), 1e9, 10.0)


@pytest.mark.parametrize(
    ("flops", "moved", "dtype", "seconds"),
    [
        (1000.0, 1.0, "float32", 10.0),
        (1000.0, 1.0, "bfloat16", 2.5),
        (1000.0, 500.0, "bfloat16", 50.0),
        (0.0, 0.0, "float32", 0.0),
    ],
)
def test_roofline(flops: float, moved: float, dtype: str, seconds: float) -> None:
    assert compute_seconds(flops, moved, DEVICE, dtype) == seconds


def test_infinite_figures_are_free() -> None:
    assert compute_seconds(1e30, 1e30, Device("d"), "float32") == 0.0
    memory_only = Device("d", memory_bandwidth=2.0)
    assert compute_seconds(1e30, 8.0, memory_only, "float32") == 4.0
    assert compute_seconds(8.0, 1e9, Device("d", (("default", 4.0),)), "int8") == 2.0
    assert not math.isnan(compute_seconds(0.0, 0.0, Device("d"), "float32"))
