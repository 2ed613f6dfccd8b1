from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.trace.jaxpr import trace_function
from autopar.trace.ties import tie_state


def leaf(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


PARAMS = {"b": leaf(3), "w": leaf(3, 3)}
STATE = {"mu": {"b": leaf(3), "w": leaf(3, 3)}, "step": leaf(dtype=jnp.int32)}
BATCH = {"x": leaf(4, 3)}


def ties(
    function: Callable[..., Any], *args: Any, state_argnums: tuple[int, ...] | None = None
) -> dict[str, str]:
    """Which input leaf is tied to which output leaf, by name."""
    traced = trace_function(function, args, {})
    tied = tie_state(traced.inputs, traced.outputs, state_argnums)
    assert len(tied) == len(traced.inputs)
    pairs = zip(traced.inputs, tied, strict=True)
    return {i.name: traced.outputs[o].name for i, o in pairs if o >= 0}


def _updated(params: Any, batch: Any) -> tuple[Any, Any]:
    loss = jnp.mean(batch["x"] @ params["w"] + params["b"])
    return jax.tree.map(lambda p: p - loss, params), loss


def test_step_of_params_state_and_loss() -> None:
    def step(params: Any, state: Any, batch: Any) -> Any:
        new, loss = _updated(params, batch)
        mu = jax.tree.map(jnp.add, state["mu"], new)
        return new, {"mu": mu, "step": state["step"] + 1}, loss

    assert ties(step, PARAMS, STATE, BATCH) == {
        "params/b": "out/0/b",
        "params/w": "out/0/w",
        "state/mu/b": "out/1/mu/b",
        "state/mu/w": "out/1/mu/w",
        "state/step": "out/1/step",
    }


def test_loss_first() -> None:
    def step(params: Any, batch: Any) -> Any:
        new, loss = _updated(params, batch)
        return loss, new

    assert ties(step, PARAMS, BATCH) == {"params/b": "out/1/b", "params/w": "out/1/w"}


def test_single_result() -> None:
    assert ties(lambda params, batch: _updated(params, batch)[0], PARAMS, BATCH) == {
        "params/b": "out/b",
        "params/w": "out/w",
    }


def test_loss_alone_ties_nothing() -> None:
    assert ties(lambda params, batch: _updated(params, batch)[1], PARAMS, BATCH) == {}


def test_another_shape_or_dtype_is_no_tie() -> None:
    def step(params: Any, batch: Any) -> Any:
        new, loss = _updated(params, batch)
        return {"b": new["b"].astype(jnp.bfloat16), "w": new["w"][:2]}, loss

    assert ties(step, PARAMS, BATCH) == {}


def test_each_output_is_tied_once() -> None:
    """Two states of one structure come back in order; a copy does not steal the first's."""

    def step(params: Any, average: Any, batch: Any) -> Any:
        new, loss = _updated(params, batch)
        return loss, new, jax.tree.map(jnp.add, average, new)

    assert ties(step, PARAMS, PARAMS, BATCH) == {
        "params/b": "out/1/b",
        "params/w": "out/1/w",
        "average/b": "out/2/b",
        "average/w": "out/2/w",
    }


def test_bare_arrays_are_tied_by_position_only() -> None:
    def step(weights: Any, batch: Any) -> Any:
        return weights - 1, batch["x"].sum()

    assert ties(step, leaf(4, 3), BATCH) == {"weights": "out/0"}

    def loss_first(weights: Any, batch: Any) -> Any:
        return batch["x"].sum(), weights - 1

    assert ties(loss_first, leaf(4, 3), BATCH) == {}
    assert ties(loss_first, leaf(4, 3), BATCH, state_argnums=(0,)) == {"weights": "out/1"}


@pytest.mark.parametrize(
    ("state_argnums", "tied"),
    [((), set()), ((1,), {"state"}), ((0,), {"params"}), ((0, 1), {"params", "state"})],
)
def test_state_argnums_limit_the_ties(state_argnums: tuple[int, ...], tied: set[str]) -> None:
    def step(params: Any, state: Any, batch: Any) -> Any:
        new, loss = _updated(params, batch)
        return new, jax.tree.map(jnp.negative, state), loss

    found = ties(step, PARAMS, STATE, BATCH, state_argnums=state_argnums)
    assert {name.split("/")[0] for name in found} == tied


def test_batch_of_the_same_shape_is_not_state() -> None:
    """A result that merely looks like the batch has another path."""

    def step(params: Any, batch: Any) -> Any:
        return params, {"prediction": batch["x"] * 2}

    assert ties(step, {"w": leaf(2)}, BATCH) == {"params/w": "out/0/w"}
