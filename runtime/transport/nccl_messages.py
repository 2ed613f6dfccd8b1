"""What is pure in a transfer by NCCL: its dtypes, the headers beside it, and what is refused.

NCCL has no tags: the n-th send of a directed pair of ranks meets its n-th receive. The header of a
message tells its number in the pair, its tag, its dtype and its shape, so that a receiver finds out
when the two ranks did not post in one order, also where the sizes happen to agree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar.errors import TransportError
from autopar.runtime.transport.base import ArraySpec
from autopar.runtime.transport.matching import shown

HEADER_BYTES = 256

HANGING_VERSIONS = {23007: "2.31.2"}
"""Versions of NCCL whose point-to-point transfers hang, and the one to use instead."""


@dataclass(frozen=True, slots=True)
class Element:
    """How NCCL carries one element of an array.

    Attributes:
        kind: NCCL's datatype: the names of `ncclDataType_t` in lower case, without `nccl`.
        number: values of that datatype in one element.
    """

    kind: str
    number: int = 1


ELEMENTS = {
    "int8": Element("int8"),
    "uint8": Element("uint8"),
    "int32": Element("int32"),
    "uint32": Element("uint32"),
    "int64": Element("int64"),
    "uint64": Element("uint64"),
    "float16": Element("float16"),
    "bfloat16": Element("bfloat16"),
    "float32": Element("float32"),
    "float64": Element("float64"),
    "complex64": Element("float32", 2),
    "complex128": Element("float64", 2),
    # NCCL has no such types, or has them only from some version on; nothing is reduced here.
    "bool": Element("uint8"),
    "int16": Element("uint8", 2),
    "uint16": Element("uint8", 2),
    "float8_e3m4": Element("uint8"),
    "float8_e4m3": Element("uint8"),
    "float8_e4m3b11fnuz": Element("uint8"),
    "float8_e4m3fn": Element("uint8"),
    "float8_e4m3fnuz": Element("uint8"),
    "float8_e5m2": Element("uint8"),
    "float8_e5m2fnuz": Element("uint8"),
    "float8_e8m0fnu": Element("uint8"),
}
"""By dtype name. Sub-byte dtypes are not here: their packing in device memory is XLA's own."""

KIND_BYTES = {
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
"""Size of one value of each of NCCL's datatypes."""


@dataclass(frozen=True, slots=True)
class Payload:
    """Memory as NCCL is told of it.

    Attributes:
        pointer: address on the device.
        count: values of `kind`; 0 is never given to NCCL.
        kind: as in `Element`.
    """

    pointer: int
    count: int
    kind: str

    @property
    def nbytes(self) -> int:
        """Size of the memory."""
        return self.count * KIND_BYTES[self.kind]


def payload(pointer: int, spec: ArraySpec) -> Payload:
    """An array as NCCL is told of it.

    Raises:
        TransportError: NCCL cannot carry the dtype.
    """
    element = element_of(spec)
    return Payload(pointer, math.prod(spec.shape) * element.number, element.kind)


def element_of(spec: ArraySpec) -> Element:
    """How NCCL carries an array's elements.

    Raises:
        TransportError: it cannot.
    """
    found = ELEMENTS.get(spec.dtype)
    if found is None:
        raise TransportError(
            "this dtype cannot travel by NCCL",
            got=shown(spec),
            remedy=f"one of {', '.join(ELEMENTS)}",
        )
    return found


def spec_of(array: Any) -> ArraySpec:
    """Shape and dtype of an array."""
    return ArraySpec(tuple(map(int, array.shape)), jnp.dtype(array.dtype).name)


def header_spec() -> ArraySpec:
    """What a header is for the bootstrap."""
    return ArraySpec((HEADER_BYTES,), "uint8")


def header(number: int, tag: int, spec: ArraySpec) -> np.ndarray[Any, Any]:
    """The header of the `number`-th message of a directed pair.

    Raises:
        TransportError: the array has too many dims.
    """
    text = json.dumps([number, tag, spec.dtype, *spec.shape]).encode()
    if len(text) > HEADER_BYTES:
        raise TransportError("an array has too many dims to travel", got=shown(spec))
    return np.frombuffer(text.ljust(HEADER_BYTES), np.uint8).copy()


def check_header(
    data: Any, *, ranks: tuple[int, int], number: int, tag: int, spec: ArraySpec
) -> None:
    """Hold a header against what was expected.

    Args:
        data: the header.
        ranks: of the sender and of the receiver.
        number, tag, spec: what the receiver expects.

    Raises:
        TransportError: it is of another message; both sides are named.
    """
    sent, tag_sent, dtype, *shape = json.loads(bytes(np.asarray(data)))
    came = ArraySpec(tuple(shape), dtype)
    sender, receiver = ranks
    if (came, tag_sent) != (spec, tag):
        raise TransportError(
            f"rank {receiver} did not expect what came from rank {sender} under tag {tag}",
            got=f"rank {sender} sent {shown(came)} under tag {tag_sent}",
            why=f"rank {receiver} expected {shown(spec)}",
        )
    if sent != number:
        raise TransportError(
            f"rank {sender} and rank {receiver} did not post their messages in one order",
            got=f"tag {tag} is message {sent} of rank {sender}, and message {number} for rank "
            f"{receiver}",
            why="NCCL has no tags: it matches sends and receives of a pair by order",
        )


def check_version(version: int) -> None:
    """Refuse a version of NCCL, such as 23007 for 2.30.7.

    Raises:
        TransportError: with the remedy.
    """
    if version in HANGING_VERSIONS:
        major, minor, patch = version // 10000, version // 100 % 100, version % 100
        raise TransportError(
            f"NCCL {major}.{minor}.{patch} hangs in point-to-point transfers",
            remedy=f"pip install nvidia-nccl-cu12=={HANGING_VERSIONS[version]}",
        )


def loaded_nccl(maps: Iterable[str]) -> tuple[str, ...]:
    """Paths of the NCCL libraries in the lines of a /proc/PID/maps."""
    paths = (line.split(maxsplit=5)[-1].strip() for line in maps if "libnccl" in line)
    return tuple(sorted({path for path in paths if "libnccl.so" in path}))


def check_libraries(maps: Iterable[str]) -> None:
    """Refuse a process with several builds of NCCL.

    Raises:
        TransportError: naming them.
    """
    found = loaded_nccl(maps)
    if len(found) > 1:
        raise TransportError(
            "several builds of NCCL are loaded in this process",
            got=", ".join(found),
            why="their symbols get mixed up, and the process crashes",
            remedy="install jax[cuda12] and cupy-cuda12x over one nvidia-nccl-cu12",
        )
