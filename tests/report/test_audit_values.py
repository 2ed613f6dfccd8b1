"""Value numbering: what XLA may leave out since it is one number everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.report.audit_values import Numbering


def is_one_number(function: Callable[..., Any], *args: Any) -> bool:
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    numbering = Numbering()
    for eqn in jaxpr.eqns:
        numbering.equation(eqn)
    return numbering.of(jaxpr.outvars[0]) in numbering.constant


def part(array: Any, place: Any) -> Any:
    """As a device cuts its block: at an index that differs from device to device."""
    return lax.dynamic_slice(array, (place,), (2,))


TWOS = (8,), 2.0


@pytest.mark.parametrize(
    ("function", "one"),
    [
        (lambda i: part(lax.full(*TWOS), i), True),
        (lambda i: part(lax.square(lax.full(*TWOS)), i), True),
        (lambda i: part(lax.mul(lax.full(*TWOS), lax.full(*TWOS)), i), True),
        (lambda i: part(lax.square(lax.iota(jnp.float32, 8)), i), False),
        (lambda i: part(lax.add(lax.full(*TWOS), lax.iota(jnp.float32, 8)), i), False),
        (lambda i: lax.square(i), False),
    ],
)
def test_arithmetic_on_one_number_gives_one_number(
    function: Callable[..., Any],
    one: bool,  # noqa: FBT001 - the case
) -> None:
    assert is_one_number(function, jnp.int32(0)) == one


def test_equal_arithmetic_is_equal() -> None:
    jaxpr = jax.make_jaxpr(
        lambda: (lax.square(lax.full(*TWOS)), lax.square(lax.full(*TWOS)), lax.exp(lax.full(*TWOS)))
    )().jaxpr
    numbering = Numbering()
    for eqn in jaxpr.eqns:
        numbering.equation(eqn)
    first, second, other = map(numbering.of, jaxpr.outvars)
    assert first == second != other
