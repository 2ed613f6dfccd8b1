from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import TransportError
from autopar.runtime.transport.base import ArraySpec
from autopar.runtime.transport.wire import (
    DTYPES,
    PREFIX,
    Handshake,
    Header,
    Kind,
    check_spec,
    decode,
    encode,
    header_size,
    sendable,
)

SECRET = bytes(range(32))


@pytest.mark.parametrize("name", DTYPES)
def test_the_dtype_table_is_that_of_jax(name: str) -> None:
    assert DTYPES[name] == jnp.dtype(name)
    assert DTYPES[name].name == name


@pytest.mark.parametrize(
    "header",
    [
        Header(Kind.MESSAGE, 7, 24, ArraySpec((2, 3), "float32")),
        Header(Kind.MESSAGE, -5, 0, ArraySpec((0, 1 << 40), "float8_e4m3b11fnuz")),
        Header(Kind.MESSAGE, (1 << 63) - 1, 8, ArraySpec((), "complex64")),
        Header(Kind.MESSAGE, 0, 1, ArraySpec((1,) * 64, "bool")),
        Header(Kind.PLACED, 1, 2, ArraySpec((1,), "bfloat16"), arena=9, offset=1 << 40),
        Header(Kind.ARENA, nbytes=1 << 40, arena=(1 << 32) - 1),
        Header(Kind.ABORT, nbytes=4096),
    ],
)
def test_headers_survive(header: Header) -> None:
    data = encode(header)
    assert header_size(data[: PREFIX.size]) == len(data)
    assert decode(data) == header
    assert header.has_body == (header.kind in (Kind.MESSAGE, Kind.ABORT))


def test_headers_that_are_none() -> None:
    good = Header(Kind.MESSAGE, 1, 8, ArraySpec((2,), "int32"))
    for broken in (
        dataclasses.replace(good, nbytes=7),
        dataclasses.replace(good, spec=ArraySpec((3,), "int32")),
        dataclasses.replace(good, spec=ArraySpec((2,), "O")),
        dataclasses.replace(good, nbytes=1 << 50, spec=ArraySpec((1 << 48,), "int32")),
        Header(Kind.ABORT, nbytes=4097),
    ):
        with pytest.raises(TransportError, match="cannot be read"):
            decode(encode(broken))
    for prefix in (b"\0" * PREFIX.size, b"\5" + encode(good)[1:], b"\1\x41" + encode(good)[2:]):
        with pytest.raises(TransportError, match="cannot be read"):
            header_size(prefix)


def test_what_can_be_sent() -> None:
    array = np.zeros((2, 3), np.float32)
    assert sendable(array, 1, 2) == ArraySpec((2, 3), "float32")
    assert sendable(array[:1], 1, 2) == ArraySpec((1, 3), "float32")  # rows are contiguous
    array.setflags(write=False)
    assert sendable(array, 1, 2) == ArraySpec((2, 3), "float32")
    for wrong in ([1.0], 1.0, np.float32(1), None):
        with pytest.raises(TransportError, match="only numpy arrays"):
            sendable(wrong, 1, 2)


def test_a_spec_gets_plain_integers() -> None:
    spec = check_spec(ArraySpec((np.int64(2), np.int32(3)), "bfloat16"))  # type: ignore[arg-type]
    assert spec == ArraySpec((2, 3), "bfloat16")
    assert all(type(size) is int for size in spec.shape)


def test_a_proof_binds_side_ranks_nonces_and_secret() -> None:
    shake = Handshake(2, 1, b"d" * 32, b"a" * 32)
    proof = shake.proof(SECRET, side=b"dialer")
    assert shake.proven(SECRET, proof, side=b"dialer")
    others = [
        (shake, SECRET, b"acceptor"),
        (shake, SECRET[:-1] + b"\0", b"dialer"),
        (dataclasses.replace(shake, dialer=3), SECRET, b"dialer"),
        (dataclasses.replace(shake, acceptor=0), SECRET, b"dialer"),
        (dataclasses.replace(shake, dialer_nonce=b"x" * 32), SECRET, b"dialer"),
        (dataclasses.replace(shake, acceptor_nonce=b"x" * 32), SECRET, b"dialer"),
    ]
    assert not any(other.proven(secret, proof, side=side) for other, secret, side in others)
    assert not shake.proven(SECRET, b"", side=b"dialer")
