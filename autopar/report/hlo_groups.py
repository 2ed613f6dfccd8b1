"""Replica groups of HLO collectives: three printed forms, and the mesh axes they span.

``{{0,1},{2,3}}`` lists the groups. ``[2,4]<=[4,2]T(1,0)`` numbers the devices over ``[4,2]``,
transposes, and cuts the result into 2 groups of 4. ``mesh['a'=2,'b'=4] {'b'}`` groups the devices
that differ along ``'b'`` only; a ``device_ids`` list may reorder the mesh, and ``'b':(2)2`` names
the part of size 2 of the axis ``b`` that lies below a part of size 2.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autopar.errors import AuditError

_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_GROUPS = re.compile(
    r"replica_groups=(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|mesh\[[^\]]*\](?:,\s*device_ids=\((?:[^()]|\([^()]*\))*\))?\s*\{[^}]*\})"
)
_MESH = re.compile(r"mesh\[([^\]]*)\](?:,\s*device_ids=\((.*)\))?\s*\{([^}]*)\}$")
_MESH_AXIS = re.compile(r"'([^']*)'=(\d+)")
_AXIS_REF = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}|source_target_pairs=\{\}")

Groups = tuple[tuple[int, ...], ...]


def parse_groups(attributes: str, devices: int) -> Groups:
    """The replica groups among an instruction's attributes, as device numbers.

    An empty or absent list means one group of all ``devices``. Raises AuditError when the
    attribute is there in a form that is not known.
    """
    found = _GROUPS.search(attributes)
    if found is None and "replica_groups=" in attributes:
        raise AuditError(
            "the replica groups of a collective could not be read",
            got=attributes[attributes.find("replica_groups=") :][:120],
            why="this version of XLA prints them in a form that is not known",
        )
    text = found.group(1) if found else "{}"
    if text == "{}":
        return (tuple(range(devices)),)
    if text.startswith("{{"):
        return _listed(text)
    return _rows(_iota(text)) if text.startswith("[") else _mesh_groups(text)


def parse_pairs(attributes: str) -> Groups:
    """The (source, target) pairs of a collective-permute."""
    found = _PAIRS.search(attributes)
    return _listed(found.group(1) or "") if found else ()


def axes_of_groups(
    groups: Groups, names: Sequence[str], sizes: Sequence[int]
) -> tuple[str, ...] | None:
    """The mesh axes a set of replica groups spans, in mesh order; None if no axes match.

    Devices are numbered row-major over (``names``, ``sizes``). Axes of size 1 are never named: to
    span them or not is the same. Groups of one device each span no axis, ``()``. The order of the
    devices in a group is not looked at.
    """
    wanted = sorted(sorted(group) for group in groups)
    numbers = np.arange(math.prod(sizes)).reshape(tuple(sizes))
    positions = [position for position, size in enumerate(sizes) if size > 1]
    for count in range(len(positions) + 1):
        for chosen in itertools.combinations(positions, count):
            if sorted(sorted(group) for group in _split(numbers, chosen)) == wanted:
                return tuple(names[position] for position in chosen)
    return None


def axes_of_pairs(
    pairs: Groups, names: Sequence[str], sizes: Sequence[int]
) -> tuple[str, ...] | None:
    """The mesh axes along which a permutation moves data, in mesh order.

    None when a pair names a device that the mesh does not have.
    """
    if any(number >= math.prod(sizes) for pair in pairs for number in pair):
        return None
    moved = [
        (here, there)
        for source, target in pairs
        for here, there in (
            (np.unravel_index(source, tuple(sizes)), np.unravel_index(target, tuple(sizes))),
        )
    ]
    return tuple(
        name
        for position, name in enumerate(names)
        if any(here[position] != there[position] for here, there in moved)
    )


def _listed(text: str) -> Groups:
    return tuple(
        tuple(int(number) for number in group.split(","))
        for group in re.findall(r"\{?([\d,]+)\}?", text.replace(" ", ""))
        if group.strip(",")
    )


def _iota(text: str) -> npt.NDArray[np.int64]:
    """An iota list ``[shape]<=[numbered]T(permutation)``; without ``<=`` shape is numbered."""
    found = _IOTA.fullmatch(text.strip())
    if found is None:
        raise AuditError("a device list in HLO text could not be read", got=text[:120])
    shape, numbered, permutation = (
        tuple(int(number) for number in part.split(",")) if part else () for part in found.groups()
    )
    source = numbered or shape
    array = np.arange(math.prod(source)).reshape(source)
    array = array.transpose(permutation) if permutation else array
    return array.reshape(shape) if numbered else array


def _mesh_groups(text: str) -> Groups:
    found = _MESH.match(text)
    assert found is not None, text
    mesh, device_ids, refs = found.groups()
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(mesh)}
    parts = {name: [size] for name, size in sizes.items()}
    chosen: list[tuple[str, int]] = []
    for name, before, size in _AXIS_REF.findall(refs):
        if size:
            parts[name] = [int(before), int(size), sizes[name] // int(before) // int(size)]
        chosen.append((name, 1 if size else 0))
    keys = [(name, index) for name, split in parts.items() for index in range(len(split))]
    shape = [size for split in parts.values() for size in split]
    ids = _device_ids(device_ids, math.prod(shape)).reshape(shape)
    return _split(ids, tuple(keys.index(key) for key in chosen))


def _device_ids(text: str | None, devices: int) -> npt.NDArray[np.int64]:
    if not text:
        return np.arange(devices)
    if text.startswith("["):
        return _iota(text).reshape(-1)
    return np.array([int(number) for number in text.split(",")])


def _split(numbers: npt.NDArray[np.int64], chosen: tuple[int, ...]) -> Groups:
    """Groups of the devices that differ along the ``chosen`` dims only."""
    others = tuple(dim for dim in range(numbers.ndim) if dim not in chosen)
    width = math.prod(numbers.shape[dim] for dim in chosen)
    return _rows(numbers.transpose(others + chosen).reshape(-1, width))


def _rows(array: npt.NDArray[np.int64]) -> Groups:
    return tuple(tuple(int(number) for number in row) for row in array)
