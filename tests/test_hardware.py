import json
import math
from typing import Any

import pytest

from autopar.errors import ClusterError
from autopar.hardware import (
    Device,
    Fields,
    Level,
    Link,
    load_preset,
    preset_from_json,
    preset_names,
    read_fields,
)

REAL = tuple(name for name in preset_names() if name != "abstract")


@pytest.mark.parametrize("name", preset_names())
def test_every_figure_of_a_preset_is_finite_and_has_a_source(name: str) -> None:
    preset = load_preset(name)
    device = preset.device
    assert device.name == name
    assert all(math.isfinite(peak) for _, peak in device.peak_flops)
    assert math.isfinite(device.memory_bytes)
    assert math.isfinite(device.memory_bandwidth)
    for figure in ("peak_flops", "memory_bytes", "memory_bandwidth"):
        assert f"{figure}: " in device.source
    for level in (preset.host, preset.network):
        assert level.beta > 0
        assert "alpha: " in level.source
        assert "beta: " in level.source
    assert preset.network.beta >= preset.host.beta
    assert preset.network.alpha >= preset.host.alpha


@pytest.mark.parametrize("name", REAL)
def test_presets_are_in_si_units(name: str) -> None:
    """A figure in GB or TFLOP/s by mistake is a thousand times off and leaves these ranges."""
    preset = load_preset(name)
    assert all(1e10 < peak < 1e16 for _, peak in preset.device.peak_flops)
    assert 1e9 < preset.device.memory_bytes < 1e12
    assert 1e10 < preset.device.memory_bandwidth < 1e13
    for level in (preset.host, preset.network):
        assert 1e-7 < level.alpha < 1e-2
        assert 1e-13 < level.beta < 1e-8


def test_no_device_kind_belongs_to_two_presets() -> None:
    kinds = [kind for name in preset_names() for kind in load_preset(name).device_kinds]
    assert len(kinds) == len(set(kinds))
    assert "cpu" in kinds


def test_datasheet_samples() -> None:
    assert load_preset("a100-80g").device.peak("bfloat16") == 312e12
    assert load_preset("v100-16g").device.peak("bfloat16") == 15.7e12
    assert load_preset("tpu-v5e").device.memory_bandwidth == 819e9
    assert load_preset("h200").device.memory_bytes == 141e9


def test_peak_by_exact_name_family_and_default() -> None:
    device = Device("d", (("default", 1.0), ("float8", 2.0), ("float8_e5m2", 3.0)))
    assert device.peak("float8_e5m2") == 3.0
    assert device.peak("float8_e4m3fn") == 2.0
    assert device.peak("int32") == 1.0


@pytest.mark.parametrize(
    "peaks",
    [(), (("float32", 1.0),), (("default", 1.0), ("default", 2.0)), (("default", math.nan),)],
)
def test_device_refuses(peaks: tuple[tuple[str, float], ...]) -> None:
    with pytest.raises(ClusterError, match="device 'd'"):
        Device("d", peaks)


@pytest.mark.parametrize(
    ("size", "alpha", "beta", "links"),
    [
        (0, 0.0, 0.0, ()),
        (2, math.inf, 0.0, ()),
        (2, 0.0, -1.0, ()),
        (2, 0.0, math.nan, ()),
        (2, 0.0, 0.0, (Link("all-reduce", -1.0, 0.0),)),
        (2, 0.0, 0.0, (Link("broadcast", 1.0, 0.0),)),
        (2, 0.0, 0.0, (Link("all-reduce", 1.0, 0.0, 5.0),)),
        (2, 0.0, 0.0, (Link("all-reduce", 1.0, 0.0), Link("all-reduce", 1.0, 0.0))),
        (2, 0.0, 0.0, (Link("all-reduce", 1.0, 0.0, 0.0), Link("all-reduce", 1.0, 0.0))),
    ],
)
def test_level_refuses(size: int, alpha: float, beta: float, links: tuple[Link, ...]) -> None:
    with pytest.raises(ClusterError, match="level 'l'"):
        Level("l", size, alpha, beta, links)


def preset_data() -> dict[str, Any]:
    level = {"alpha": 1.0, "beta": 1.0, "sources": {"alpha": "a", "beta": "b"}}
    sources = {"peak_flops": "p", "memory_bytes": "m", "memory_bandwidth": "w"}
    device = {"name": "d", "peak_flops": {"default": 1.0}, "memory_bytes": 1.0}
    return {
        "autopar_hardware": 1,
        "device": device | {"memory_bandwidth": 1.0, "sources": sources},
        "device_kinds": [],
        "host": level,
        "network": level,
    }


def test_preset_sources_are_joined() -> None:
    preset = preset_from_json(Fields(preset_data(), "p.json"))
    assert preset.device.source == "peak_flops: p; memory_bytes: m; memory_bandwidth: w"
    assert preset.host.source == "alpha: a; beta: b"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("autopar_hardware", 9, "version 1"),
        ("device_kinds", "cpu", "list of strings"),
        ("host", {"alpha": 1.0, "beta": 1.0, "sources": {}}, "host.sources.alpha"),
        ("network", 3, "it must be an object"),
        ("extra", 1, "unknown key"),
    ],
)
def test_preset_refuses(key: str, value: object, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        preset_from_json(Fields(preset_data() | {key: value}, "p.json"))


def test_read_fields() -> None:
    assert read_fields(json.dumps({"a": 1}), "f").integer("a") == 1
    with pytest.raises(ClusterError, match="f: a"):
        read_fields('{"a": 1.5}', "f").integer("a")
