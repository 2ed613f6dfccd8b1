"""What goes over a socket: frames of known layout, and a handshake over a shared secret.

    frame = prefix [PREFIX.size bytes], shape [ndim x 8 bytes], body [nbytes bytes]

| kind      | meaning                                                      | body           |
|-----------|--------------------------------------------------------------|----------------|
| `MESSAGE` | an array under a tag                                         | its bytes      |
| `PLACED`  | an array under a tag, whose bytes lie in shared memory       | none           |
| `ARENA`   | new shared memory; its file descriptor comes with the prefix | none           |
| `ABORT`   | everything ends                                              | the reason     |

All integers are little-endian, and so are the array bytes. Sizes are checked before anything is
allocated; nothing is ever unpickled or evaluated.

The handshake lets each side prove that it knows the secret without telling it (HMAC-SHA256 over
both ranks and a fresh nonce of each side):

    acceptor -> dialer: CHALLENGE  magic, rank, nonce
    dialer -> acceptor: HELLO      magic, rank, nonce, proof
    acceptor -> dialer: ANSWER     accepted or not, proof

It keeps strangers and other runs out. What follows is neither encrypted nor signed.
"""

from __future__ import annotations

import hmac
import math
import struct
import sys
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from autopar.errors import TransportError
from autopar.runtime.transport.base import ArraySpec

Array = np.ndarray[Any, Any]

_NUMPY = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 "
    "float16 float32 float64 complex64 complex128"
)
_EXTENSIONS = (
    "bfloat16 float4_e2m1fn float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int2 int4 uint2 uint4"
)

DTYPES = MappingProxyType(
    {name: np.dtype(name) for name in _NUMPY.split()}
    | {name: np.dtype(getattr(ml_dtypes, name)) for name in _EXTENSIONS.split()}
)
"""All dtypes that can travel, by name."""

NAMES = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})
"""The name of each dtype that can travel; `dtype.name` takes ten times as long."""

MAX_DIMS = 64
"""Of an array; numpy allows no more."""

MAX_MESSAGE_BYTES = 1 << 36
"""Bytes of one array, 64 GiB: more than any device holds, so a larger size is a broken frame."""

MAX_REASON_BYTES = 4096
"""Bytes of the reason of an abort."""

PREFIX = struct.Struct("<BBxxIqQQ24s")
NONCE_BYTES = 32
PROOF_BYTES = 32
MIN_SECRET_BYTES = 16
MAGIC = b"autopar\x01"
CHALLENGE = struct.Struct(f"<8si{NONCE_BYTES}s")
HELLO = struct.Struct(f"<8si{NONCE_BYTES}s{PROOF_BYTES}s")
ANSWER = struct.Struct(f"<B{PROOF_BYTES}s")


class Kind(IntEnum):
    """Of a frame."""

    MESSAGE = 1
    PLACED = 2
    ARENA = 3
    ABORT = 4


_NO_SPEC = ArraySpec((), "")
_KINDS = frozenset(kind.value for kind in Kind)


@dataclass(frozen=True, slots=True)
class Header:
    """Everything of a frame but its body.

    Attributes:
        kind: of the frame.
        tag: of a message.
        nbytes: of the array, the reason, or the new shared memory.
        spec: of a message.
        arena, offset: where in shared memory a message lies; `arena` alone names new memory.
    """

    kind: Kind
    tag: int = 0
    nbytes: int = 0
    spec: ArraySpec = _NO_SPEC
    arena: int = 0
    offset: int = 0

    @property
    def has_body(self) -> bool:
        """Whether `nbytes` bytes follow the header."""
        return self.kind in (Kind.MESSAGE, Kind.ABORT)


def encode(header: Header) -> bytes:
    """The bytes of a header."""
    shape = header.spec.shape
    prefix = PREFIX.pack(
        header.kind,
        len(shape),
        header.arena,
        header.tag,
        header.nbytes,
        header.offset,
        header.spec.dtype.encode("ascii"),
    )
    return prefix + struct.pack(f"<{len(shape)}Q", *shape)


def header_size(prefix: bytes | bytearray) -> int:
    """Bytes of the whole header, of which `prefix` is the beginning.

    Raises:
        TransportError: it is not the beginning of a frame.
    """
    kind, dims = prefix[0], prefix[1]
    if kind not in _KINDS or dims > MAX_DIMS:
        raise _broken(f"kind {kind}, {dims} dims")
    return PREFIX.size + 8 * dims


def decode(data: bytes | bytearray) -> Header:
    """The header of `header_size` bytes.

    Raises:
        TransportError: its parts do not fit each other, or exceed the limits.
    """
    kind, dims, arena, tag, nbytes, offset, name = PREFIX.unpack_from(data)
    shape = struct.unpack_from(f"<{dims}Q", data, PREFIX.size)
    dtype = name.rstrip(b"\0").decode("ascii", errors="replace")
    header = Header(Kind(kind), tag, nbytes, ArraySpec(shape, dtype), arena, offset)
    if header.kind in (Kind.MESSAGE, Kind.PLACED):
        if dtype not in DTYPES:
            raise _broken(f"dtype {dtype!r}")
        if nbytes != math.prod(shape) * DTYPES[dtype].itemsize or nbytes > MAX_MESSAGE_BYTES:
            raise _broken(f"{nbytes} bytes for {dtype}{list(shape)}")
    elif header.kind is Kind.ABORT and nbytes > MAX_REASON_BYTES:
        raise _broken(f"a reason of {nbytes} bytes")
    return header


def _broken(got: str) -> TransportError:
    return TransportError("a frame cannot be read", got=got, why="the peer is of another version")


def check_spec(spec: ArraySpec) -> ArraySpec:
    """A spec that may be expected, with plain integers.

    Raises:
        TransportError: no array of its dtype can travel.
    """
    if spec.dtype not in DTYPES:
        raise TransportError(
            "this dtype cannot travel", got=spec.dtype, remedy=f"one of {', '.join(DTYPES)}"
        )
    if all(type(size) is int for size in spec.shape):
        return spec
    return ArraySpec(tuple(map(int, spec.shape)), spec.dtype)


def sendable(array: Any, peer: int, tag: int) -> ArraySpec:
    """What it is that is to be sent.

    Raises:
        TransportError: it is no numpy array, not C-contiguous, too large, or its dtype cannot
            travel.
    """
    if not isinstance(array, np.ndarray):
        raise _unsendable("only numpy arrays can be sent", peer, tag, str(type(array)))
    name = NAMES.get(array.dtype)
    if name is None:
        remedy = f"one of {', '.join(DTYPES)}, of this machine's byte order"
        raise _unsendable("this dtype cannot travel", peer, tag, str(array.dtype), remedy)
    if not array.flags.c_contiguous:
        got = f"{name}{list(array.shape)} with strides {array.strides}"
        remedy = "numpy.ascontiguousarray"
        raise _unsendable("the array to send is not C-contiguous", peer, tag, got, remedy)
    if array.nbytes > MAX_MESSAGE_BYTES:
        raise _unsendable("the array to send is too large", peer, tag, f"{array.nbytes} bytes")
    return ArraySpec(array.shape, name)


def _unsendable(what: str, peer: int, tag: int, got: str, remedy: str = "") -> TransportError:
    return TransportError(what, where=f"to rank {peer}: tag {tag}", got=got, remedy=remedy)


def check_secret(secret: bytes) -> bytes:
    """A secret that is long enough, on a machine whose arrays can travel.

    Raises:
        TransportError: it is too short, or the machine is big-endian.
    """
    if len(secret) < MIN_SECRET_BYTES:
        raise TransportError(
            "the secret of the run is too short",
            got=f"{len(secret)} bytes",
            why=f"at least {MIN_SECRET_BYTES} are needed",
            remedy="secrets.token_bytes(32), the same for all ranks of a run",
        )
    if sys.byteorder != "little":
        raise TransportError("arrays travel between little-endian machines only")
    return secret


@dataclass(frozen=True, slots=True)
class Handshake:
    """What both sides of a new connection know after the hello.

    Attributes:
        dialer, acceptor: ranks.
        dialer_nonce, acceptor_nonce: fresh random bytes.
    """

    dialer: int
    acceptor: int
    dialer_nonce: bytes
    acceptor_nonce: bytes

    def proof(self, secret: bytes, *, side: bytes) -> bytes:
        """What only somebody with the secret can say; `side` is b"dialer" or b"acceptor"."""
        ranks = struct.pack("<ii", self.dialer, self.acceptor)
        text = MAGIC + side + b"\0" + ranks + self.dialer_nonce + self.acceptor_nonce
        return hmac.digest(secret, text, "sha256")

    def proven(self, secret: bytes, proof: bytes, *, side: bytes) -> bool:
        """Whether a proof is right; takes the same time whatever it is."""
        return hmac.compare_digest(self.proof(secret, side=side), proof)
