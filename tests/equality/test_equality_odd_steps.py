"""Steps as people write them, in stages: what they return, take and contain beside the usual."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar as ap

RATE = 0.1
TOLERANCE = 2e-5
"""Of the largest entry: float32 sums in another order, through one update (Adam's division by a
small root is the worst)."""

RNG = np.random.default_rng(0)


def drawn(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.normal(size=shape).astype(np.float32)


PARAMS = {
    "a": {"w": drawn(16, 32), "b": drawn(32)},
    "b": {"w": drawn(32, 32), "b": drawn(32)},
    "c": {"w": drawn(32, 8), "b": drawn(8)},
}
BATCH = (drawn(24, 16), drawn(24, 8))


def forward(params: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ params["a"]["w"] + params["a"]["b"])
    hidden = jnp.tanh(hidden @ params["b"]["w"] + params["b"]["b"])
    return hidden @ params["c"]["w"] + params["c"]["b"]


def loss_of(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((forward(params, x) - y) ** 2)


def descended(params: Any, gradient: Any, rate: Any = RATE) -> Any:
    return jax.tree.map(lambda p, g: p - rate * g, params, gradient)


@dataclass(frozen=True)
class Case:
    """A step and how it is called."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    method: ap.PipeshardParallel = field(
        default_factory=lambda: ap.PipeshardParallel(2, stages=ap.UniformStages(2))
    )
    batch: tuple[int, ...] = (1,)
    names: tuple[str, ...] = ()
    tolerance: float = TOLERANCE


def keywords() -> Case:
    @functools.partial(jax.jit, static_argnames=("rate",))
    def step(params: Any, *, x: Any, y: Any, rate: float) -> Any:
        loss, gradient = jax.value_and_grad(loss_of)(params, x, y)
        return descended(params, gradient, rate), loss

    given = {"x": BATCH[0], "y": BATCH[1], "rate": 0.1}
    return Case(step, (PARAMS,), given, batch=(), names=("x", "y"))


def handed_on() -> Case:
    """Results that are arguments, constants, a closed-over array; an argument nobody reads."""
    table = jnp.asarray(drawn(4, 4))

    def step(params: Any, batch: Any, unread: Any, count: Any) -> Any:
        moving = {"a": params["a"], "c": params["c"]}
        loss, gradient = jax.value_and_grad(lambda m: loss_of({**params, **m}, *batch))(moving)
        updated = {**descended(moving, gradient), "b": params["b"]}
        return updated, loss, count + 1, jnp.zeros(3), batch[0], 5.0, table, unread

    return Case(step, (PARAMS, BATCH, drawn(3), np.int32(4)))


def keys() -> Case:
    def step(state: Any, batch: Any) -> Any:
        params, key = state
        key, used = jax.random.split(key)

        def loss(params: Any) -> Any:
            hidden = jnp.tanh(batch[0] @ params["a"]["w"])
            hidden = hidden * jax.random.bernoulli(used, 0.8, hidden.shape)
            hidden = jnp.tanh(hidden @ params["b"]["w"])
            return jnp.mean((hidden @ params["c"]["w"] - batch[1]) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        return (descended(params, gradient), key), value

    return Case(step, ((PARAMS, jax.random.key(3)), BATCH))


def scanned() -> Case:
    params = {"w": drawn(4, 32, 32) * 0.2, "in": drawn(16, 32), "out": drawn(32, 8)}

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            layer = jax.checkpoint(lambda hidden, w: (jnp.tanh(hidden @ w) + hidden, None))
            hidden, _ = jax.lax.scan(layer, batch[0] @ params["in"], params["w"])
            return jnp.mean((hidden @ params["out"] - batch[1]) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        return descended(params, gradient), value

    return Case(step, (params, BATCH))


def equilibrium() -> Case:
    """A loop over one weight: its backward reads what an earlier stage made."""
    widths = {"z": (16, 16), "w": (16, 16), "i": (16, 16), "o": (16, 8)}
    params = {name: drawn(*shape) * 0.3 for name, shape in widths.items()}

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            x = jnp.tanh(jnp.tanh(batch[0] @ params["z"]) @ params["z"])
            body = lambda _, hidden: jnp.tanh(hidden @ params["w"] + x @ params["i"])  # noqa: E731
            hidden = jax.lax.fori_loop(0, 5, body, jnp.zeros_like(x))
            return jnp.mean((hidden @ params["o"] - batch[1]) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        return descended(params, gradient), value

    return Case(step, (params, BATCH), method=ap.PipeshardParallel(2, stages=ap.UniformStages(4)))


def mixed() -> Case:
    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
            found = forward(low, batch[0].astype(jnp.bfloat16))
            return jnp.mean((found.astype(jnp.float32) - batch[1]) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        return descended(params, gradient), value

    # Eight bits of mantissa, and sums over the batch that are cut in two.
    return Case(step, (PARAMS, BATCH), tolerance=2e-2)


def inference() -> Case:
    def step(params: Any, x: Any) -> Any:
        found = forward(params, x)
        return found, found.argmax(-1)

    method = ap.PipeshardParallel(4, stages=ap.UniformStages(2), schedule="inference")
    return Case(step, (PARAMS, BATCH[0]), method=method)


def scheduled_rate(stages: int) -> Case:
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(optax.cosine_decay_schedule(1e-2, 100))
    )

    def step(state: Any, batch: Any) -> Any:
        params, memory = state
        loss, gradient = jax.value_and_grad(loss_of)(params, *batch)
        updates, memory = optimizer.update(gradient, memory, params)
        return (optax.apply_updates(params, updates), memory), loss

    method = ap.PipeshardParallel(3, stages=ap.UniformStages(stages), schedule="gpipe")
    return Case(step, ((PARAMS, optimizer.init(PARAMS)), BATCH), method=method)


def own_gradient() -> Case:
    @jax.custom_vjp
    def bend(x: Any) -> Any:
        return jnp.tanh(x)

    bend.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),))

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            hidden = bend(bend(batch[0] @ params["a"]["w"]) @ params["b"]["w"])
            return jnp.mean((hidden @ params["c"]["w"] - batch[1]) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        return descended(params, gradient), value

    return Case(step, (PARAMS, BATCH))


def branching() -> Case:
    def step(params: Any, batch: Any, number: Any) -> Any:
        loss, gradient = jax.value_and_grad(loss_of)(params, *batch)
        rate = jax.lax.cond(number > 3, lambda: 0.1, lambda: 0.01)
        return descended(params, gradient, rate), loss, number + 1

    return Case(step, (PARAMS, BATCH, np.int32(5)))


def averaged() -> Case:
    """A moving average of the parameters; metrics: a share, a maximum, one per example."""

    def step(state: Any, batch: Any) -> Any:
        params, average = state

        def loss(params: Any) -> Any:
            found = forward(params, batch[0])
            right = jnp.mean((found > 0) == (batch[1] > 0))
            metrics = (right, jnp.max(jnp.abs(found)), found.argmax(-1))
            return jnp.mean((found - batch[1]) ** 2), metrics

        (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        params = descended(params, gradient)
        average = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, average, params)
        return (params, average), value, metrics

    return Case(step, ((PARAMS, PARAMS), BATCH))


def penalised() -> Case:
    """A gradient inside the loss."""

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            slope = jax.vmap(jax.grad(lambda x: forward(params, x).sum()))(batch[0])
            return loss_of(params, *batch) + 1e-2 * jnp.mean(jnp.sum(slope**2, -1))

        value, gradient = jax.value_and_grad(loss)(params)
        return descended(params, gradient), value

    return Case(step, (PARAMS, BATCH))


def by_hand() -> Case:
    """No autodiff at all, and parameters that are not trained."""

    def step(params: Any, batch: Any) -> Any:
        first, last = params["a"]["w"], params["c"]["w"]
        hidden = jnp.tanh(batch[0] @ first)
        error = hidden @ last - batch[1]
        slope = 2 * error / error.size
        new_last = last - RATE * hidden.T @ slope
        new_first = first - RATE * batch[0].T @ ((slope @ last.T) * (1 - hidden**2))
        updated = {**params, "a": {**params["a"], "w": new_first}}
        return {**updated, "c": {**params["c"], "w": new_last}}, jnp.mean(error**2)

    return Case(step, (PARAMS, BATCH))


def nested() -> Case:
    def step(params: Any, batch: Any) -> Any:
        loss, gradient = jax.jit(jax.value_and_grad(loss_of))(params, *batch)
        return jax.jit(descended)(params, gradient), loss

    return Case(step, (PARAMS, BATCH))


SAMPLE = (handed_on, keys, by_hand, keywords, equilibrium)
CASES = (
    *SAMPLE,
    *(scanned, mixed, inference, own_gradient, branching, averaged, penalised, nested),
    functools.partial(scheduled_rate, 2),
    functools.partial(scheduled_rate, 4),
)


def _named(make: Any) -> str:
    return make.__name__ if hasattr(make, "__name__") else f"scheduled_rate-{make.args[0]}"


def alone(case: Case) -> Callable[..., Any]:
    """The step on one device."""
    return case.step if hasattr(case.step, "lower") else jax.jit(case.step)


def numbers(leaf: Any) -> np.ndarray[Any, Any]:
    if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def differing(found: Any, wanted: Any, tolerance: float) -> list[str]:
    """Leaves of another dtype or shape, or that are farther off than the tolerance."""
    bad = []
    pairs = zip(jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found), strict=True)
    for (path, want), got in pairs:
        name, one, other = jax.tree_util.keystr(path), numbers(want), numbers(got)
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            bad.append(f"{name}: {other.dtype}{other.shape}, not {one.dtype}{one.shape}")
            continue
        scale = np.abs(one.astype(np.float64)).max(initial=1e-30)
        error = np.abs(one.astype(np.float64) - other.astype(np.float64)).max(initial=0) / scale
        if not error <= tolerance:
            bad.append(f"{name}: {error:.3g}")
    return bad


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=_named(make), marks=() if make in SAMPLE else pytest.mark.full)
        for make in CASES
    ],
)
def test_a_step_in_stages_equals_the_step(make: Callable[[], Case]) -> None:
    case = make()
    step = ap.parallelize(
        case.step,
        cluster=ap.Cluster.local(4),
        method=case.method,
        batch_argnums=case.batch,
        batch_argnames=case.names,
    )
    wanted = alone(case)(*case.args, **case.kwargs)
    assert differing(step(*case.args, **case.kwargs), wanted, case.tolerance) == []
    step.close()


def test_what_is_handed_on_is_the_callers_and_the_results() -> None:
    """A copy where the argument stays the caller's, the array itself where it is given away."""
    case = handed_on()
    for donate in ((), (0,)):
        step = ap.parallelize(
            jax.jit(case.step, donate_argnums=donate),
            cluster=ap.Cluster.local(4),
            method=case.method,
            batch_argnums=(1,),
        )
        args = step.place(*jax.tree.map(jnp.asarray, case.args))
        wanted = alone(case)(*case.args)
        results = step(*args)
        assert differing(results, wanted, TOLERANCE) == []
        assert (results[0]["b"]["w"] is args[0]["b"]["w"]) == bool(donate)
        assert not args[0]["b"]["w"].is_deleted()
        again = step(results[0], *args[1:])
        assert differing(again, alone(case)(wanted[0], *case.args[1:]), 2 * TOLERANCE) == []
        if not donate:
            assert differing(results, wanted, TOLERANCE) == []
        step.close()


@pytest.mark.parametrize("count", [1, 2])
def test_a_callback_sees_the_whole_batch(count: int) -> None:
    """Also inside the loss, where only a micro-batch is at hand."""
    seen: list[list[np.ndarray[Any, Any]]] = []

    def note(*values: Any) -> None:
        seen.append([np.asarray(value) for value in values])

    def step_fun(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            found = forward(params, batch[0])
            jax.debug.callback(note, found, batch[1], params["a"]["b"])
            return jnp.mean((found - batch[1]) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        jax.debug.callback(note, gradient["c"]["b"], value, batch[0])
        return descended(params, gradient), value

    jax.jit(step_fun)(PARAMS, BATCH)
    jax.effects_barrier()
    wanted = list(seen)
    seen.clear()
    step = ap.parallelize(
        step_fun,
        cluster=ap.Cluster.local(4),
        method=ap.PipeshardParallel(count, stages=ap.UniformStages(2)),
        batch_argnums=(1,),
    )
    step(PARAMS, BATCH)
    jax.effects_barrier()
    step.close()
    kinds = {row[0].ndim for row in seen}
    assert kinds == {row[0].ndim for row in wanted} == {1, 2}
    for row in seen:
        (expected,) = (other for other in wanted if other[0].ndim == row[0].ndim)
        assert differing(row, expected, TOLERANCE) == []


def test_a_callback_is_not_sent_to_workers() -> None:
    def step_fun(params: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss_of)(params, *batch)
        jax.debug.print("loss {}", value)
        return descended(params, gradient), value

    step = ap.parallelize(
        step_fun,
        cluster=ap.Cluster.ray(2, 2),
        method=ap.PipeshardParallel(2, stages=ap.UniformStages(2)),
        batch_argnums=(1,),
    )
    with pytest.raises(ap.errors.PlanError, match=r"(?s)cannot be sent to a worker.*odd_steps"):
        step(PARAMS, BATCH)
