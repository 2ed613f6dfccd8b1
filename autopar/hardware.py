"""What hardware is made of: devices, levels and their links; and the presets that ship.

All figures are SI: seconds, bytes, bytes per second, floating-point operations per second. A
figure that is infinite (compute that costs nothing, memory without a limit) is null in JSON.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar

from autopar.errors import ClusterError

PRESET_VERSION = 1
"""Version of the preset files, under the key "autopar_hardware"."""

ALL_REDUCE = "all-reduce"
ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"
ALL_TO_ALL = "all-to-all"
COLLECTIVE_KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL)
"""The collectives that are priced."""

T = TypeVar("T")

_PRESET_FOLDER = "solver/cost/hardware"


@dataclass(frozen=True, slots=True)
class Link:
    """Measured figures of one kind of collective in one range of sizes.

    Attributes:
        kind: one of COLLECTIVE_KINDS.
        alpha: seconds a collective takes before its first byte.
        beta: seconds per byte, in the ring formula of its kind.
        max_bytes: the largest full tensor, in bytes, that the figures hold for; None: any.
    """

    kind: str
    alpha: float
    beta: float
    max_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the hardware: `size` units (hosts, devices) and the links between them.

    Attributes:
        name: "host", "network", ...
        size: units side by side in one unit of the level outside.
        alpha: seconds a collective over this level takes before its first byte.
        beta: seconds per byte that one device sends (or receives), all devices sending at once.
        links: figures by kind and size that take the place of alpha and beta. The ranges of a
            kind stand in ascending order, and the last has max_bytes None.
        source: where the figures come from.

    Raises:
        ClusterError: if a figure is negative or not finite, or the links are out of order.
    """

    name: str
    size: int
    alpha: float
    beta: float
    links: tuple[Link, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        where = f"level {self.name!r}"
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ClusterError("a level has at least one unit", where=where, got=repr(self.size))
        for holder in (self, *self.links):
            for key in ("alpha", "beta"):
                value = getattr(holder, key)
                if not (math.isfinite(value) and value >= 0):
                    raise ClusterError(
                        f"{key} is a finite number from 0", where=where, got=repr(value)
                    )
        for kind in dict.fromkeys(link.kind for link in self.links):
            _check_ranges(where, kind, self.links_of(kind))

    def links_of(self, kind: str) -> tuple[Link, ...]:
        """The links of one kind, in ascending order of size."""
        return tuple(link for link in self.links if link.kind == kind)


def _check_ranges(where: str, kind: str, links: tuple[Link, ...]) -> None:
    if kind not in COLLECTIVE_KINDS:
        raise ClusterError(
            "unknown collective", where=where, got=repr(kind), remedy=f"one of {COLLECTIVE_KINDS}"
        )
    limits = [math.inf if link.max_bytes is None else link.max_bytes for link in links]
    ascending = all(low < high for low, high in itertools.pairwise(limits))
    if not ascending or limits[0] <= 0 or limits[-1] != math.inf:
        raise ClusterError(
            f"the size ranges of {kind} are out of order",
            where=where,
            got=repr([link.max_bytes for link in links]),
            why="each size must have one figure",
            remedy="ascending max_bytes, null for the last",
        )


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one CPU device.

    Attributes:
        name: the preset's name or the kind of device.
        peak_flops: `(dtype, FLOP/s)`, with one entry for "default".
        memory_bytes: bytes a program can use.
        memory_bandwidth: bytes per second between the device and its memory.
        source: where the figures come from.

    Raises:
        ClusterError: if a figure is not above 0, or "default" is missing.
    """

    name: str
    peak_flops: tuple[tuple[str, float], ...] = (("default", math.inf),)
    memory_bytes: float = math.inf
    memory_bandwidth: float = math.inf
    source: str = ""

    def __post_init__(self) -> None:
        where = f"device {self.name!r}"
        names = [dtype for dtype, _ in self.peak_flops]
        if "default" not in names or len(set(names)) != len(names):
            raise ClusterError(
                'peak_flops needs each dtype once, and "default"', where=where, got=repr(names)
            )
        memory = (("memory_bytes", self.memory_bytes), ("memory_bandwidth", self.memory_bandwidth))
        for key, value in (*memory, *((f"peak_flops[{d}]", v) for d, v in self.peak_flops)):
            if not value > 0:
                raise ClusterError(f"{key} is a number above 0", where=where, got=repr(value))

    def peak(self, dtype: str) -> float:
        """FLOP/s of matrix products in `dtype`, such as "bfloat16" or "float8_e4m3fn".

        The exact name is looked up first, then its part before "_", then "default".
        """
        figures = dict(self.peak_flops)
        family = dtype.split("_", maxsplit=1)[0]
        return figures.get(dtype, figures.get(family, figures["default"]))


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object that is read key by key, with errors that name file and key.

    Attributes:
        data: the object.
        file: the file's name, for errors.
        path: the key of this object inside the file, "" for the whole file.
    """

    data: Mapping[str, Any]
    file: str
    path: str = ""

    def error(self, key: str, why: str, remedy: str = "") -> ClusterError:
        """The error that `key` cannot be used."""
        full = f"{self.path}.{key}" if self.path else key
        got = repr(self.data[key]) if key in self.data else "no such key"
        return ClusterError(
            f"the key {full!r} cannot be used",
            where=f"{self.file}: {full}",
            got=got[:80],
            why=why,
            remedy=remedy or "write such files with cluster.save(path)",
        )

    def only(self, *keys: str) -> None:
        """Refuse keys that are not among `keys`: a mistyped key must not be lost."""
        for key in self.data:
            if key not in keys:
                close = difflib.get_close_matches(key, keys, n=1)
                raise self.error(key, "unknown key", f"{close[0]!r}?" if close else "")

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self.data.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "it must be a string")
        return value

    def integer(self, key: str) -> int:
        """A whole number."""
        value = self.data.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, "it must be a whole number")
        return value

    def number(self, key: str, *, null: float | None = None) -> float:
        """A number; null stands for the value `null` if that is given."""
        value = self.data.get(key)
        if value is None and key in self.data and null is not None:
            return null
        if not isinstance(value, (int, float)) or isinstance(value, bool) or math.isnan(value):
            raise self.error(key, "it must be a number" + (" or null" if null is not None else ""))
        return float(value)

    def child(self, key: str) -> Fields:
        """An object."""
        value = self.data.get(key)
        if not isinstance(value, dict):
            raise self.error(key, "it must be an object")
        return Fields(value, self.file, f"{self.path}.{key}" if self.path else key)

    def children(self, key: str) -> tuple[Fields, ...]:
        """A list of objects."""
        value = self.data.get(key)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.error(key, "it must be a list of objects")
        path = f"{self.path}.{key}" if self.path else key
        return tuple(Fields(v, self.file, f"{path}[{i}]") for i, v in enumerate(value))

    def build(self, make: Callable[..., T], **values: Any) -> T:
        """`make(**values)`, whose errors name the file and this object's key."""
        try:
            return make(**values)
        except ClusterError as error:
            raise ClusterError(
                error.what,
                where=f"{self.file}: {self.path or 'top level'}",
                got=error.got,
                why=error.why,
                remedy=error.remedy,
            ) from error


def read_fields(text: str, file: str) -> Fields:
    """Parse a JSON object; raises ClusterError with file and line."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterError(
            "a cluster file is not JSON", where=f"{file}:{error.lineno}", why=error.msg
        ) from error
    if not isinstance(data, dict):
        raise ClusterError("a cluster file holds one JSON object", where=file, got=text[:40])
    return Fields(data, file)


def finite_or_none(value: float) -> float | None:
    """Infinity is null in JSON."""
    return None if math.isinf(value) else value


def device_to_json(device: Device) -> dict[str, Any]:
    """The JSON object of a device."""
    return {
        "name": device.name,
        "peak_flops": {dtype: finite_or_none(value) for dtype, value in device.peak_flops},
        "memory_bytes": finite_or_none(device.memory_bytes),
        "memory_bandwidth": finite_or_none(device.memory_bandwidth),
        "source": device.source,
    }


def device_from_json(fields: Fields) -> Device:
    """Read what `device_to_json` wrote."""
    fields.only("name", "peak_flops", "memory_bytes", "memory_bandwidth", "source")
    peaks = fields.child("peak_flops")
    return fields.build(
        Device,
        name=fields.text("name"),
        peak_flops=tuple((dtype, peaks.number(dtype, null=math.inf)) for dtype in peaks.data),
        memory_bytes=fields.number("memory_bytes", null=math.inf),
        memory_bandwidth=fields.number("memory_bandwidth", null=math.inf),
        source=fields.text("source", ""),
    )


def level_to_json(level: Level) -> dict[str, Any]:
    """The JSON object of a level."""
    return {
        "name": level.name,
        "size": level.size,
        "alpha": level.alpha,
        "beta": level.beta,
        "links": [
            {"kind": k.kind, "alpha": k.alpha, "beta": k.beta, "max_bytes": k.max_bytes}
            for k in level.links
        ],
        "source": level.source,
    }


def level_from_json(fields: Fields) -> Level:
    """Read what `level_to_json` wrote."""
    fields.only("name", "size", "alpha", "beta", "links", "source")
    return fields.build(
        Level,
        name=fields.text("name"),
        size=fields.integer("size"),
        alpha=fields.number("alpha"),
        beta=fields.number("beta"),
        links=tuple(_link_from_json(link) for link in fields.children("links")),
        source=fields.text("source", ""),
    )


def _link_from_json(fields: Fields) -> Link:
    fields.only("kind", "alpha", "beta", "max_bytes")
    limit = fields.number("max_bytes", null=math.inf)
    return Link(
        kind=fields.text("kind"),
        alpha=fields.number("alpha"),
        beta=fields.number("beta"),
        max_bytes=finite_or_none(limit),
    )


@dataclass(frozen=True, slots=True)
class Preset:
    """Datasheet figures of a device, of the links inside a host, and of the network.

    Attributes:
        device: the device.
        host: the level of the devices in one host, of size 1.
        network: the level of the hosts, of size 1.
        device_kinds: what JAX calls such a device in `device.device_kind`.
    """

    device: Device
    host: Level
    network: Level
    device_kinds: tuple[str, ...]


def preset_names() -> tuple[str, ...]:
    """Names of the presets that ship, sorted."""
    folder = resources.files("autopar") / _PRESET_FOLDER
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def load_preset(name: str) -> Preset:
    """The preset `name`; raises ClusterError, with the closest names, if there is none."""
    names = preset_names()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
        raise ClusterError(
            "no such hardware preset",
            got=repr(name),
            remedy=f"{' or '.join(close)}?" if close else f"one of {', '.join(names)}",
        )
    file = f"{name}.json"
    text = (resources.files("autopar") / _PRESET_FOLDER / file).read_text(encoding="utf-8")
    return preset_from_json(read_fields(text, file))


def preset_from_json(fields: Fields) -> Preset:
    """Read a preset file: see `solver/cost/hardware/`."""
    fields.only("autopar_hardware", "device", "device_kinds", "host", "network")
    if fields.integer("autopar_hardware") != PRESET_VERSION:
        raise fields.error("autopar_hardware", f"this is version {PRESET_VERSION}")
    kinds = fields.data.get("device_kinds")
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise fields.error("device_kinds", "it must be a list of strings")
    device = fields.child("device")
    sources = "; ".join(f"{key}: {device.child('sources').text(key)}" for key in _FIGURES)
    plain = {k: v for k, v in device.data.items() if k != "sources"} | {"source": sources}
    return Preset(
        device=device_from_json(Fields(plain, fields.file, device.path)),
        host=_preset_level(fields.child("host"), "host"),
        network=_preset_level(fields.child("network"), "network"),
        device_kinds=tuple(kinds),
    )


_FIGURES = ("peak_flops", "memory_bytes", "memory_bandwidth")


def _preset_level(fields: Fields, name: str) -> Level:
    fields.only("alpha", "beta", "sources")
    sources = fields.child("sources")
    return fields.build(
        Level,
        name=name,
        size=1,
        alpha=fields.number("alpha"),
        beta=fields.number("beta"),
        source="; ".join(f"{key}: {sources.text(key)}" for key in ("alpha", "beta")),
    )
