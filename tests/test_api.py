"""Calls of parallelised functions, in every form: the results of the function itself."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar as ap

BATCH, WIDTH = 48, 24


class State(NamedTuple):
    params: Any
    momentum: Any


def _state() -> State:
    params = {"w": jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)), "b": jnp.ones(WIDTH)}
    return State(params, jax.tree.map(jnp.zeros_like, params))


def _batch(rows: int = BATCH) -> dict[str, jax.Array]:
    x = jax.random.normal(jax.random.key(1), (rows, WIDTH))
    return {"x": x, "y": jnp.tanh(x)}


def train_step(state: State, batch: Any, rate: Any = 0.1) -> tuple[State, dict[str, Any]]:
    def loss_of(params: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state.momentum, grads)
    params = jax.tree.map(lambda p, m: p - rate * m, state.params, momentum)
    return State(params, momentum), {"loss": loss}


def _eager_network() -> ap.Cluster:
    """Eight devices whose network is cheap: plans divide the work."""
    return ap.Cluster.abstract(
        shape=(8,),
        alpha=(1e-9,),
        beta=(1e-12,),
        peak_flops=1e12,
        memory_bandwidth=1e12,
        memory_bytes=8e10,
    )


def _parallel(function: Any, **options: Any) -> ap.ParallelFunction:
    return ap.parallelize(function, cluster=_eager_network(), **options)


def _assert_equal(found: Any, expected: Any) -> None:
    def compare(one: Any, other: Any) -> None:
        assert one.dtype == other.dtype
        largest = float(jnp.max(jnp.abs(other)))
        np.testing.assert_allclose(one, other, rtol=0, atol=5e-6 * max(largest, 1e-3))

    jax.tree.map(compare, found, expected)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jitted"])
def test_a_step_gives_what_the_function_gives(wrap: Any) -> None:
    step = _parallel(wrap(train_step))
    found = step(_state(), _batch())
    _assert_equal(found, train_step(_state(), _batch()))
    assert len(found[0].params["w"].sharding.device_set) == 8
    plan = step.plan(_state(), _batch()).frozen
    assert plan.collectives
    assert sum(text != "-" for text in plan.strategies) > len(plan.strategies) / 2


def test_the_default_cluster_is_this_process() -> None:
    step = ap.parallelize(train_step)
    _assert_equal(step(_state(), _batch()), train_step(_state(), _batch()))
    assert step.plan(_state(), _batch()).frozen.cluster.kind == "local"


def test_results_are_fed_back() -> None:
    step = _parallel(train_step)
    mine = plain = _state()
    for _ in range(3):
        mine, metrics = step(mine, _batch())
        plain, expected = train_step(plain, _batch())
        _assert_equal(metrics, expected)
    _assert_equal(mine, plain)


def test_donated_arguments_are_given_away_and_others_are_not() -> None:
    step = _parallel(jax.jit(train_step, donate_argnums=0))
    placed, batch = step.place(_state(), _batch())
    after, _ = step(placed, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(placed))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(batch))
    _assert_equal(after, train_step(_state(), _batch())[0])


def test_numpy_arrays_and_python_numbers_are_arguments() -> None:
    step = _parallel(train_step)
    state, batch = jax.tree.map(np.asarray, (_state(), _batch()))
    _assert_equal(step(state, batch, 0.5), train_step(_state(), _batch(), 0.5))
    _assert_equal(step(state, batch, 0.25), train_step(_state(), _batch(), 0.25))
    assert state.params["w"].shape == (WIDTH, WIDTH)


def test_keyword_arguments() -> None:
    step = _parallel(train_step)
    _assert_equal(
        step(_state(), rate=0.5, batch=_batch()), train_step(_state(), _batch(), rate=0.5)
    )


def test_closed_over_arrays_are_placed_once_and_never_baked_in() -> None:
    table = jax.random.normal(jax.random.key(3), (WIDTH, 3 * WIDTH))
    step = _parallel(lambda x: jnp.tanh(x @ table))
    x = _batch()["x"]
    _assert_equal(step(x), jnp.tanh(x @ table))
    plan = step.plan(x)
    assert plan.frozen.num_hidden == 1
    assert plan.frozen.inputs[-1].shape == table.shape


@pytest.mark.parametrize(
    "static", [{"static_argnums": 1}, {"static_argnames": "power"}], ids=["number", "name"]
)
def test_static_arguments_make_plans_of_their_own(static: Any) -> None:
    @partial(jax.jit, **static)
    def raised(x: jax.Array, power: int) -> jax.Array:
        assert isinstance(power, int)
        return x**power

    step, x = _parallel(raised), _batch()["x"]
    for power in (2, 3, 2):
        _assert_equal(step(x, power), x**power)
    placed, power = step.place(x, 3)
    assert power == 3
    _assert_equal(step(placed, power), x**3)


def test_static_arguments_by_name_and_by_position_in_turn() -> None:
    step = _parallel(jax.jit(lambda power, x: x**power, static_argnames="power"))
    x = _batch()["x"]
    for power in (2, 3):
        _assert_equal(step(power=power, x=x), x**power)
        _assert_equal(step(power, x), x**power)
        _assert_equal(step(power, x=x), x**power)


def test_place_puts_arguments_where_the_step_wants_them() -> None:
    step = _parallel(train_step)
    state, batch = step.place(_state(), _batch())
    _assert_equal((state, batch), (_state(), _batch()))
    again = step.place(state, batch)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves((state, batch)), strict=True):
        assert one is other
    args, kwargs = step.place(_state(), batch=_batch())
    assert set(kwargs) == {"batch"}
    _assert_equal(step(*args, **kwargs), train_step(_state(), _batch()))


def test_other_shapes_and_dtypes_make_another_plan_and_known_ones_do_not_trace_again() -> None:
    traces = []

    def loss(x: jax.Array) -> jax.Array:
        traces.append(x.shape)
        return jnp.mean(x * x, axis=0)

    step = _parallel(loss)
    for rows in (48, 24, 48, 24):
        x = _batch(rows)["x"]
        _assert_equal(step(x), jnp.mean(x * x, axis=0))
    assert traces == [(48, WIDTH), (24, WIDTH)]
    half = _batch()["x"].astype(jnp.bfloat16)
    assert step(half).dtype == jnp.bfloat16
    assert len(traces) == 3
    plans = [step.plan(_batch(rows)["x"]) for rows in (48, 24)]
    assert [plan.frozen.inputs[0].shape[0] for plan in plans] == [48, 24]
    assert step.plan(_batch()["x"]).frozen is plans[0].frozen


def test_a_plan_of_shapes_runs_nothing() -> None:
    ran = []

    def noisy(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: ran.append(1))
        return jnp.mean(x * x, axis=0)

    shape = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    step = _parallel(noisy)
    plan = step.plan(shape)
    jax.effects_barrier()
    assert ran == []
    assert plan.mesh.size == 8
    assert ap.make_plan(noisy, shape, cluster=_eager_network()).collectives == plan.collectives
    assert step.plan(_batch()["x"]).frozen is plan.frozen


def test_inside_jit_the_step_is_part_of_the_program() -> None:
    step = _parallel(train_step)

    @jax.jit
    def twice(state: State, batch: Any) -> Any:
        state, _ = step(state, batch)
        return step(state, batch)

    expected = train_step(train_step(_state(), _batch())[0], _batch())
    _assert_equal(twice(_state(), _batch()), expected)
    _assert_equal(step(_state(), _batch()), train_step(_state(), _batch()))


def test_inside_scan_the_step_is_the_body() -> None:
    step, batch = _parallel(train_step), _batch()
    looped = jax.jit(lambda s: jax.lax.scan(lambda c, _: step(c, batch), s, length=3))
    state, metrics = looped(_state())
    plain = _state()
    for number in range(3):
        plain, expected = train_step(plain, batch)
        _assert_equal(metrics["loss"][number], expected["loss"])
    _assert_equal(state, plain)


def test_first_traced_inside_jit_then_called() -> None:
    table = jax.random.normal(jax.random.key(3), (WIDTH, WIDTH))
    step = _parallel(lambda x: x @ table)
    x = _batch()["x"]
    _assert_equal(jax.jit(step)(x), x @ table)
    _assert_equal(step(x), x @ table)
