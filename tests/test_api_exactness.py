"""Corners in which a split program could quietly differ from the single device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autopar as ap

CHEAP = ap.Cluster.abstract(
    (8,), alpha=(1e-12,), beta=(1e-16,), peak_flops=1e10, memory_bandwidth=1e9, memory_bytes=1e12
)


def same(function: Callable[..., Any], *args: Any, **options: Any) -> ap.Plan:
    """Assert equality with plain jit, NaN for NaN; return the plan."""
    step = ap.parallelize(function, cluster=CHEAP, **options)
    found, wanted = step(*args), jax.jit(function)(*args)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        # Sums over blocks are added in another order: a few units in the last place.
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=3e-6, atol=1e-6)
    plan = step.plan(*args)
    assert plan.check().ok, plan.check().problems
    return plan


def test_reshape_with_an_order_of_dims() -> None:
    same(lambda a: jax.lax.reshape(a, (8, 3), (1, 0)), jnp.arange(24.0).reshape(4, 6))


@pytest.mark.parametrize("groups", [2, 8])
def test_gradients_of_a_grouped_convolution(groups: int) -> None:
    x = jax.random.normal(jax.random.key(0), (8, 8, 8, 8))
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 8 // groups, 8))

    def loss(x: Any, kernel: Any) -> Any:
        out = jax.lax.conv_general_dilated(
            x,
            kernel,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        return jnp.square(out).mean()

    same(jax.value_and_grad(loss, argnums=(0, 1)), x, kernel)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -0.0])
@pytest.mark.parametrize("reduce", [jnp.max, jnp.min])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32])
def test_extremes_over_a_split_dim(value: float, reduce: Any, dtype: Any) -> None:
    x = jnp.arange(64.0).reshape(8, 8).astype(dtype) - 20
    if jnp.issubdtype(dtype, jnp.floating):
        x = x.at[3, 0].set(value)
    method = ap.DataParallel()
    plan = same(lambda a: reduce(a), x, method=method, batch_argnums=(0,))
    assert [line.reduction for line in plan.collectives] == [reduce.__name__]


def test_plain_indexing_out_of_range_with_the_looked_up_dim_split() -> None:
    table = jnp.arange(32.0).reshape(16, 2) + 1
    method = ap.ManualParallel({"t": PartitionSpec("x", None)}, logical_mesh=(("x", 8),))
    plan = same(lambda t, i: t[i], table, jnp.array([20, -20, 3]), method=method)
    assert plan.collectives


def test_weak_types_and_types_of_static_values_are_told_apart() -> None:
    step = ap.parallelize(lambda a, b: a * b, cluster=CHEAP)
    x = jnp.ones(8, jnp.bfloat16)
    assert step(x, jnp.float32(2)).dtype == jnp.float32
    assert step(x, jnp.asarray(2.0)).dtype == jnp.bfloat16
    scaled = ap.parallelize(jax.jit(lambda a, n: a * n, static_argnums=1), cluster=CHEAP)
    ints = jnp.arange(8)
    assert scaled(ints, 1).dtype == jnp.int32
    assert scaled(ints, 1.0).dtype == jnp.float32


def test_a_roll_whose_parameters_are_numpy_numbers() -> None:
    same(lambda h: jnp.roll(h, 3, 0) * 2, jnp.arange(64.0).reshape(8, 8))


def test_narrow_integer_sums_do_not_wrap_inside_a_wider_contraction() -> None:
    a = jnp.full((8, 8), 11, jnp.int8)

    def twice(a: Any, w: Any) -> Any:
        first = jax.lax.dot(a.T, a)
        numbers = (((1,), (0,)), ((), ()))
        return jax.lax.dot_general(first, w, numbers, preferred_element_type=jnp.int32)

    same(twice, a, jnp.ones((8, 8), jnp.int8), method=ap.DataParallel(), batch_argnums=(0,))


def test_empty_arrays() -> None:
    same(lambda a, b: (a * 2, jnp.concatenate([b, a])), jnp.ones((0, 16)), jnp.ones((8, 16)))


def test_a_print_stays_and_is_noted(capfd: pytest.CaptureFixture[str]) -> None:
    def step(x: Any) -> Any:
        jax.debug.print("seen {}", x.shape[0])
        return x * 2

    parallel = ap.parallelize(step, cluster=CHEAP)
    parallel(jnp.ones(8))
    jax.effects_barrier()
    assert "seen 8" in capfd.readouterr().out
    assert any("runs once on every device" in n for n in parallel.plan(jnp.ones(8)).frozen.notes)


def test_a_parallelised_function_inside_another_is_refused() -> None:
    inner = ap.parallelize(lambda x: x * 2, cluster=CHEAP)
    with pytest.raises(ap.errors.TraceError, match="cannot be planned") as caught:
        ap.parallelize(lambda x: inner(x) + 1, cluster=CHEAP)(jnp.ones(8))
    assert "test_api_exactness.py" in caught.value.where


def test_named_state_survives_the_plan_file(tmp_path: Path) -> None:
    def step(a: Any, b: Any, c: Any) -> tuple[Any, Any]:
        return a + c.sum(0), b * 2

    args = (jnp.ones((8, 8)), jnp.ones((8, 8)), jnp.ones((8, 8)))
    plan = ap.make_plan(step, *args, cluster=CHEAP, state_argnums=(0,))
    plan.save(tmp_path / "plan.json")
    again = ap.load_plan(tmp_path / "plan.json").bind(step, *args)
    assert again.check().ok, again.check().problems
    assert [entry.tied for entry in again.frozen.inputs] == [0, -1, -1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "auto"}, "method= cannot be used"),
        ({"method": ap.Auto}, "method= cannot be used"),
        ({"plan": "plan.json"}, "plan= cannot be used"),
        ({"cluster": 5}, "cluster= cannot be used"),
        ({"batch_argnums": ("x",)}, "batch_argnums holds"),
        ({"batch_dims": -1}, "batch_dims holds"),
    ],
)
def test_options_of_another_kind_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ap.errors.ArgumentError, match=said):
        ap.parallelize(lambda x: x, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ap.ShardParallel(solver="foo"),
        lambda: ap.ShardParallel(logical_mesh="2x4"),  # type: ignore[arg-type]
        lambda: ap.DataParallel(time_limit=-1),
        lambda: ap.Auto(num_micro_batches=0),
    ],
)
def test_methods_refuse_what_they_cannot_do(make: Callable[[], Any]) -> None:
    with pytest.raises(ap.errors.ArgumentError):
        make()
