from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import TraceError
from autopar.trace.jaxpr import TracedFunction, ensure_jitted, trace_function

ARRAY = jax.ShapeDtypeStruct((4, 3), jnp.float32)
VECTOR = jax.ShapeDtypeStruct((3,), jnp.int32)


class State(NamedTuple):
    weights: Any
    count: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pair:
    left: Any
    right: Any


def names(traced: TracedFunction) -> tuple[list[str], list[str]]:
    return [leaf.name for leaf in traced.inputs], [leaf.name for leaf in traced.outputs]


def test_leaves_are_named_by_argument_and_path() -> None:
    def step(params: Any, state: Any, *rest: Any) -> Any:
        total = params["layers"][0] + params["layers"][1] + state.weights + rest[0].left
        return {"total": total, "pair": Pair(total, state.count)}, total

    params = {"layers": [ARRAY, ARRAY]}
    traced = trace_function(step, (params, State(ARRAY, VECTOR), Pair(ARRAY, ARRAY)), {})
    inputs, outputs = names(traced)
    assert inputs == [
        "params/layers/0",
        "params/layers/1",
        "state/weights",
        "state/count",
        "arg2/left",
        "arg2/right",
    ]
    assert outputs == ["out/0/pair/left", "out/0/pair/right", "out/0/total", "out/1"]
    assert [leaf.argument for leaf in traced.inputs] == [0, 0, 1, 1, 2, 2]
    assert [leaf.path for leaf in traced.inputs][:3] == ["layers/0", "layers/1", "weights"]
    assert [leaf.argument for leaf in traced.outputs] == [0, 0, 0, 1]
    assert traced.name == "step"


def test_keyword_arguments() -> None:
    def step(x: Any, *, batch: Any, scale: Any) -> Any:
        return x * scale + batch["a"]

    scale = np.float32(2)
    traced = trace_function(step, (ARRAY,), {"scale": scale, "batch": {"a": ARRAY}})
    assert names(traced) == (["x", "batch/a", "scale"], ["out"])
    assert [leaf.argument for leaf in traced.inputs] == [0, "batch", "scale"]
    assert len(traced.jaxpr.jaxpr.invars) == 3


def test_trees_rebuild_arguments_and_results() -> None:
    def step(params: Any, batch: Any) -> Any:
        return {"b": params["w"], "a": batch + 1}

    args = ({"w": np.ones(3, np.float32)}, np.ones(3, np.float32))
    traced = trace_function(step, args, {})
    flat = jax.tree_util.tree_leaves((args, {}))
    rebuilt = jax.tree_util.tree_unflatten(traced.in_tree, flat)
    assert str(jax.tree_util.tree_structure(rebuilt)) == str(traced.in_tree)
    assert rebuilt[0][0]["w"] is args[0]["w"]
    assert set(jax.tree_util.tree_unflatten(traced.out_tree, [1, 2])) == {"a", "b"}


def test_static_arguments_are_kept_out_and_positions_hold() -> None:
    @functools.partial(jax.jit, static_argnums=(0, 2), static_argnames=("twice",))
    def step(mode: str, x: Any, depth: int, y: Any, *, twice: bool = False) -> Any:
        assert mode == "train"
        for _ in range(depth):
            x = jnp.sin(x)
        return x * 2 + y if twice else x + y

    traced = trace_function(step, ("train", ARRAY, 3, ARRAY), {"twice": True})
    assert [leaf.name for leaf in traced.inputs] == ["x", "y"]
    assert [leaf.argument for leaf in traced.inputs] == [1, 3]
    ops = [eqn.primitive.name for eqn in traced.jaxpr.jaxpr.eqns]
    assert ops == ["sin", "sin", "sin", "mul", "add"]


def test_static_pytree_beside_an_argument_of_the_same_structure() -> None:
    """A static leaf looks like an array leaf in the argument list; only jit knows which it is."""

    @functools.partial(jax.jit, static_argnums=(0,))
    def step(size: int, x: Any) -> Any:
        return x + size

    traced = trace_function(step, (3, ARRAY), {})
    assert [(leaf.name, leaf.argument) for leaf in traced.inputs] == [("x", 1)]


@pytest.mark.parametrize("static", [-1, 2])
def test_static_argument_counted_from_the_end(static: int) -> None:
    step = jax.jit(lambda x, y, power: x**power + y, static_argnums=(static,))
    traced = trace_function(step, (ARRAY, ARRAY, 2), {})
    assert [leaf.argument for leaf in traced.inputs] == [0, 1]


def test_static_argument_named_but_passed_by_position() -> None:
    step = jax.jit(lambda power, x: x**power, static_argnames=("power",))
    traced = trace_function(step, (2, ARRAY), {})
    assert [(leaf.name, leaf.argument) for leaf in traced.inputs] == [("x", 1)]


def test_static_arguments_of_a_jit_object_that_hides_them() -> None:
    """Then the shapes tell, as far as they can."""

    class Hidden:
        def __init__(self, jitted: Any) -> None:
            self.trace, self.lower = jitted.trace, jitted.lower

        def __call__(self, *args: Any) -> Any:
            raise NotImplementedError

    step = jax.jit(lambda mode, n, x, y: x * n + y, static_argnums=(0, 1))
    traced = trace_function(Hidden(step), ("train", 3, ARRAY, ARRAY), {})
    assert [leaf.argument for leaf in traced.inputs] == [2, 3]


def test_donation_is_read_from_jit() -> None:
    def step(params: Any, batch: Any) -> Any:
        return jax.tree.map(lambda p: p + batch, params)

    jitted = jax.jit(step, donate_argnums=(0,))
    traced = trace_function(jitted, ({"a": ARRAY, "b": ARRAY}, ARRAY), {})
    assert [leaf.donated for leaf in traced.inputs] == [True, True, False]
    plain = trace_function(step, ({"a": ARRAY, "b": ARRAY}, ARRAY), {})
    assert not any(leaf.donated for leaf in plain.inputs)


def test_arrays_and_their_shapes_trace_alike() -> None:
    def step(x: Any) -> Any:
        return jnp.dot(x, x.T)

    one = trace_function(step, (np.ones((4, 3), np.float32),), {})
    other = trace_function(step, (ARRAY,), {})
    assert str(one.jaxpr) == str(other.jaxpr)
    assert one.inputs == other.inputs
    assert one.outputs[0].aval == jax.ShapeDtypeStruct((4, 4), jnp.float32)


def test_tracing_runs_nothing() -> None:
    calls = []

    def step(x: Any) -> Any:
        calls.append(type(x).__name__)
        return x + 1

    trace_function(step, (ARRAY,), {})
    assert len(calls) == 1
    assert "Tracer" in calls[0]


def test_jitted_functions_are_used_as_they_are() -> None:
    jitted = jax.jit(jnp.sin)
    assert ensure_jitted(jitted) is jitted
    assert hasattr(ensure_jitted(lambda x: x), "trace")


def test_what_is_not_callable_is_refused() -> None:
    with pytest.raises(TraceError, match="only functions can be parallelised") as caught:
        trace_function({"w": 1}, (), {})  # type: ignore[arg-type]
    assert caught.value.got == "{'w': 1}"
    assert "jax.jit" in caught.value.remedy


@pytest.mark.parametrize("library", ["flax", "equinox"])
def test_other_jit_wrappers_are_refused(library: str) -> None:
    class JitWrapped:
        def __call__(self, x: Any) -> Any:
            return x

    JitWrapped.__module__ = f"{library}.nnx.transforms.compilation"
    with pytest.raises(TraceError, match=f"a {library} jit wrapper") as caught:
        trace_function(JitWrapped(), (ARRAY,), {})
    assert "JitWrapped" in caught.value.got
    assert "pure function" in caught.value.remedy


def _concrete(x: Any) -> Any:
    return x if float(x[0, 0]) > 0 else -x


def _wrong_shapes(x: Any) -> Any:
    return x @ x


def _not_an_array(x: Any) -> Any:
    return "text"


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (_concrete, "concrete value"),
        (_wrong_shapes, "contracting"),
        (_not_an_array, "str"),
    ],
)
def test_untraceable_functions(function: Callable[[Any], Any], why: str) -> None:
    with pytest.raises(TraceError, match=f"cannot trace {function.__name__}") as caught:
        trace_function(function, (ARRAY,), {})
    assert why in str(caught.value)
    assert caught.value.__cause__ is not None
    assert "one device" in caught.value.remedy


def test_wrong_number_of_arguments_is_a_trace_error() -> None:
    with pytest.raises(TraceError, match="cannot trace"):
        trace_function(lambda x, y: x, (ARRAY,), {})
