"""A cluster is a value: levels of links from the outside in, and the device at the bottom.

It holds all that planning needs to know of the hardware, so planning needs no hardware. A cluster
comes from a preset (datasheet figures), from measurements, from the devices of this process, or
from plain numbers; it is saved as JSON and read back.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from autopar.errors import ClusterError
from autopar.files import write_atomically
from autopar.hardware import (
    Device,
    Fields,
    Level,
    Link,
    Preset,
    device_from_json,
    device_to_json,
    level_from_json,
    level_to_json,
    load_preset,
    preset_names,
    read_fields,
)
from autopar.ir.mesh import AxisSplit, Mesh, split_over_levels

CLUSTER_VERSION = 1
"""Version of the cluster files, under the key "autopar_cluster"."""

CLUSTER_KINDS = ("local", "ray", "preset", "abstract")
"""Where a cluster comes from; the first two can run programs."""

_FORMS = "FILE.json | PRESET:HxD | local | local:N | ray:HxD | abstract:2x4"


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a logical mesh axis that lies on one level of the cluster.

    Attributes:
        level: index into `cluster.levels`, 0 = outermost.
        size: devices of the axis on that level, at least 2.
        alpha: seconds, as in Level.
        beta: seconds per byte, as in Level.
        links: measured figures by kind and size, as in Level.
    """

    level: int
    size: int
    alpha: float
    beta: float
    links: tuple[Link, ...] = ()


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices of one kind on nested levels of links.

    Attributes:
        levels: from the outside in, such as (network of hosts, devices of a host).
        device: the kind of device.
        kind: one of CLUSTER_KINDS.
        address: of a running Ray, for kind "ray"; None starts a local one.
        device_ids: for kind "local", the ids of the JAX devices in order; else empty.

    Raises:
        ClusterError: if the parts do not fit each other.
    """

    levels: tuple[Level, ...]
    device: Device
    kind: str = "abstract"
    address: str | None = None
    device_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.levels:
            raise ClusterError("a cluster has at least one level")
        if self.kind not in CLUSTER_KINDS:
            raise ClusterError(
                "unknown kind of cluster", got=repr(self.kind), remedy=f"one of {CLUSTER_KINDS}"
            )
        if self.device_ids and len(self.device_ids) != self.size:
            raise ClusterError(
                f"a cluster of {self.size} devices needs as many device ids",
                got=f"{len(self.device_ids)} ids",
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each level, outermost first: also the natural logical mesh."""
        return tuple(level.size for level in self.levels)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    @classmethod
    def local(cls, devices: int | Sequence[jax.Device] | None = None) -> Cluster:
        """The devices of this process, as one level.

        Known accelerators get the figures of their preset, all others those of the preset "cpu".

        Args:
            devices: the devices, or how many of this process's devices to take; None: all.

        Raises:
            ClusterError: if there are not as many devices.
        """
        chosen: tuple[jax.Device, ...]
        if devices is None or isinstance(devices, int):
            chosen = _first_devices(devices)
        else:
            chosen = tuple(devices)
        if not chosen:
            raise ClusterError("a local cluster needs at least one device")
        preset, figures = _preset_of_kind(chosen[0].device_kind)
        return cls(
            levels=(replace(preset.host, size=len(chosen)),),
            device=figures,
            kind="local",
            device_ids=tuple(device.id for device in chosen),
        )

    @classmethod
    def preset(cls, name: str, *, hosts: int = 1, devices_per_host: int = 8) -> Cluster:
        """Hardware nobody has to own: datasheet figures with their sources, for planning.

        Raises:
            ClusterError: if there is no such preset; it names the closest ones.
        """
        preset = load_preset(name)
        levels = _host_levels(preset, hosts, devices_per_host)
        return cls(levels, preset.device, kind="preset")

    @classmethod
    def abstract(
        cls,
        shape: Sequence[int],
        *,
        alpha: Sequence[float] | None = None,
        beta: Sequence[float] | None = None,
        peak_flops: float = math.inf,
        memory_bandwidth: float = math.inf,
        memory_bytes: float = math.inf,
    ) -> Cluster:
        """A cluster of plain numbers, one level for each entry of `shape`.

        Args:
            shape: level sizes, outermost first; also the natural logical mesh.
            alpha: seconds, one a level; None: the figures of the preset "abstract".
            beta: seconds per byte, one a level; None: as for alpha.
            peak_flops: FLOP/s of a device in every dtype; infinite: compute is free.
            memory_bandwidth: bytes per second of a device; infinite: memory traffic is free.
            memory_bytes: bytes of a device; infinite: no limit.

        Raises:
            ClusterError: if the lengths differ, or a figure is out of range.
        """
        preset = load_preset("abstract")
        defaults = [preset.network] * (len(shape) - 1) + [preset.host]
        alphas = [level.alpha for level in defaults] if alpha is None else list(alpha)
        betas = [level.beta for level in defaults] if beta is None else list(beta)
        if not len(shape) == len(alphas) == len(betas):
            raise ClusterError(
                "an abstract cluster needs one alpha and one beta for each level",
                got=f"shape {tuple(shape)}, alpha {tuple(alphas)}, beta {tuple(betas)}",
            )
        levels = tuple(
            Level(f"level{i}", size, float(alphas[i]), float(betas[i]))
            for i, size in enumerate(shape)
        )
        device = Device(
            name="abstract",
            peak_flops=(("default", float(peak_flops)),),
            memory_bytes=float(memory_bytes),
            memory_bandwidth=float(memory_bandwidth),
            source="given by the caller",
        )
        return cls(levels, device)

    @classmethod
    def ray(
        cls, hosts: int, devices_per_host: int, address: str | None = None, *, device: str = "cpu"
    ) -> Cluster:
        """Worker processes under Ray; only describes them, nothing is started or contacted.

        Args:
            hosts: worker processes, one a host on a real cluster.
            devices_per_host: JAX devices of each worker.
            address: of a running Ray; None: a local one is started at the first run.
            device: the preset whose figures hold for the devices and links.
        """
        preset = load_preset(device)
        levels = _host_levels(preset, hosts, devices_per_host)
        return cls(levels, preset.device, kind="ray", address=address)

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read "FILE.json | PRESET:HxD | local | local:N | ray:HxD | abstract:2x4".

        An abstract cluster read from text has the finite figures of the preset "abstract".

        Raises:
            ClusterError: if the text is none of these.
        """
        text = text.strip()
        if text.endswith(".json"):
            return cls.load(text)
        if text == "local":
            return cls.local()
        head, _, tail = text.partition(":")
        if not head or re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", tail) is None:
            known = head in (*CLUSTER_KINDS, *preset_names())
            why = "after the colon stand sizes from 1, such as 2x4" if known or not head else ""
            if not why:
                load_preset(head)
            raise ClusterError("not a cluster", got=repr(text), why=why, remedy=_FORMS)
        return cls._parse_sized(head, tuple(int(size) for size in tail.split("x")), text)

    @classmethod
    def _parse_sized(cls, head: str, sizes: tuple[int, ...], text: str) -> Cluster:
        if head == "abstract":
            return replace(cls.abstract(sizes), device=load_preset("abstract").device)
        if head == "local" and len(sizes) == 1:
            return cls.local(sizes[0])
        if head != "local" and len(sizes) <= 2:
            hosts, per_host = (1, *sizes)[-2:]
            if head == "ray":
                return cls.ray(hosts, per_host)
            return cls.preset(head, hosts=hosts, devices_per_host=per_host)
        raise ClusterError("too many sizes for a cluster", got=repr(text), remedy=_FORMS)

    def submesh(self, shape: Sequence[int]) -> Cluster:
        """The cluster of one submesh, for pricing: same links, fewer units on each level.

        Raises:
            ClusterError: if `shape` does not divide the levels.
        """
        fits = len(shape) == len(self.shape) and all(
            part >= 1 and whole % part == 0 for part, whole in zip(shape, self.shape, strict=True)
        )
        if not fits:
            raise ClusterError(
                "a submesh needs a divisor of each level",
                got=repr(tuple(shape)),
                remedy=f"divisors of {self.shape}",
            )
        levels = tuple(
            replace(level, size=size) for level, size in zip(self.levels, shape, strict=True)
        )
        return replace(self, levels=levels, device_ids=())

    def axis_costs(self, mesh: Mesh) -> tuple[tuple[Piece, ...], ...]:
        """For each axis of `mesh`, its pieces on the levels, innermost first.

        The mesh is laid row-major over the devices, outermost level first. On levels (2, 4) the
        one axis of a mesh (8,) has the pieces (level 1, size 4), (level 0, size 2); an axis of
        size 1 has none. An axis that straddles a level (3 over a level of 4) is priced as if all
        of it ran over the slowest level it crosses: one piece with the largest alpha and beta.

        Raises:
            ArgumentError: if the mesh has not as many devices as the cluster.
        """
        return tuple(self._pieces(split) for split in split_over_levels(mesh, self.shape))

    def _pieces(self, split: AxisSplit) -> tuple[Piece, ...]:
        if split.even:
            return tuple(
                Piece(i, size, self.levels[i].alpha, self.levels[i].beta, self.levels[i].links)
                for i, size in split.pieces
            )
        crossed = [self.levels[i] for i in split.crossed]
        slowest = max(split.crossed, key=lambda i: (self.levels[i].beta, self.levels[i].alpha, -i))
        alpha, beta = max(c.alpha for c in crossed), max(c.beta for c in crossed)
        size = math.prod(size for _, size in split.pieces)
        return (Piece(slowest, size, alpha, beta, self.levels[slowest].links),)

    def describe(self) -> str:
        """What the cluster is, one line a level and one for the device."""
        device = self.device
        lines = [
            f"{self.kind} cluster of {self.size} devices, {'x'.join(map(str, self.shape))}",
            *(
                f"  {level.name}: {level.size}, alpha {level.alpha:.3g} s, "
                f"{_rate(level.beta)}{f', {len(level.links)} measured' if level.links else ''}"
                for level in self.levels
            ),
            f"  device {device.name}: {device.memory_bytes:.4g} bytes at "
            f"{device.memory_bandwidth:.4g} bytes/s, "
            + ", ".join(f"{dtype} {peak:.4g} FLOP/s" for dtype, peak in device.peak_flops),
        ]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The cluster as a JSON object; infinity is null."""
        return {
            "autopar_cluster": CLUSTER_VERSION,
            "kind": self.kind,
            "address": self.address,
            "device_ids": list(self.device_ids),
            "levels": [level_to_json(level) for level in self.levels],
            "device": device_to_json(self.device),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, file: str = "cluster") -> Cluster:
        """Read what `to_json` wrote; errors name `file` and the key."""
        fields = Fields(data, file)
        if fields.integer("autopar_cluster") != CLUSTER_VERSION:
            raise fields.error("autopar_cluster", f"this is version {CLUSTER_VERSION}")
        fields.only("autopar_cluster", "kind", "address", "device_ids", "levels", "device")
        ids = data.get("device_ids", [])
        if not isinstance(ids, list) or any(type(number) is not int for number in ids):
            raise fields.error("device_ids", "it must be a list of whole numbers")
        address = None if data.get("address") is None else fields.text("address")
        return fields.build(
            cls,
            levels=tuple(level_from_json(level) for level in fields.children("levels")),
            device=device_from_json(fields.child("device")),
            kind=fields.text("kind"),
            address=address,
            device_ids=tuple(ids),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cluster to a JSON file, whole or not at all."""
        text = json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n"
        write_atomically(path, text, kind=ClusterError)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read a cluster file.

        Raises:
            ClusterError: if the file is missing or malformed; it names the file and the key.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ClusterError(
                "the cluster file cannot be read", where=str(path), why=str(error), remedy=_FORMS
            ) from error
        return cls.from_json(read_fields(text, str(path)).data, file=str(path))

    def __str__(self) -> str:
        return f"{self.kind}:{self.device.name}:{'x'.join(map(str, self.shape))}"


def _rate(beta: float) -> str:
    return f"{1 / beta:.4g} bytes/s" if beta else "free bytes"


def _first_devices(count: int | None) -> tuple[jax.Device, ...]:
    """The first `count` devices of this process, or all of them."""
    present = jax.local_devices()
    wanted = len(present) if count is None else count
    if not 1 <= wanted <= len(present):
        raise ClusterError(
            f"this process has not {wanted} devices",
            got=f"{len(present)} {present[0].platform} devices",
            remedy="XLA_FLAGS=--xla_force_host_platform_device_count=N before JAX starts "
            "gives N virtual CPU devices",
        )
    return tuple(present[:wanted])


def _host_levels(preset: Preset, hosts: int, devices_per_host: int) -> tuple[Level, Level]:
    return (
        replace(preset.network, size=hosts),
        replace(preset.host, size=devices_per_host),
    )


def _preset_of_kind(device_kind: str) -> tuple[Preset, Device]:
    """The preset of JAX's `device.device_kind`, or the generic figures under that name."""
    for name in preset_names():
        preset = load_preset(name)
        if device_kind in preset.device_kinds:
            return preset, preset.device
    generic = load_preset("cpu")
    source = f"no preset for this device, figures of a generic CPU: {generic.device.source}"
    return generic, replace(generic.device, name=device_kind, source=source)
