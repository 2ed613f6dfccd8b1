from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.ir.graph import Literal, OpGraph
from autopar.trace.build import BuiltGraph, build_graph, drop_dead
from autopar.trace.jaxpr import trace_function
from tests.oracles.rule_harness import as_array
from tests.oracles.simulated_mesh import Array, evaluate

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def built(function: Callable[..., Any], *args: Any, **kwargs: Any) -> BuiltGraph:
    return build_graph(trace_function(function, args, kwargs))


def ops(graph: OpGraph) -> list[str]:
    return [op.name for op in graph.ops]


def run(made: BuiltGraph, *args: Any) -> list[Array]:
    """Interpret the graph op by op."""
    graph = made.graph
    leaves = [np.asarray(a) for a in (*jax.tree.leaves(args), *made.hidden)]
    env = {entry.value: a for entry, a in zip(graph.inputs, leaves, strict=True)}
    for op in graph.ops:
        operands = [as_array(graph, o, env) for o in op.inputs]
        env.update(zip(op.outputs, evaluate(op.primitive, op.params, operands), strict=True))
    return [as_array(graph, o, env) for o in graph.outputs]


def assert_same(function: Callable[..., Any], *args: Any) -> BuiltGraph:
    """The graph computes what the function does."""
    made = built(function, *args)
    expected = jax.tree.leaves(jax.jit(function)(*args))
    for one, other in zip(run(made, *args), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    return made


def test_train_step_computes_the_same() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jax.nn.gelu(x @ w) ** 2)

    def step(w: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * gradient, value

    made = assert_same(step, X.T.copy(), X)
    assert made.graph.name == "step"
    assert made.graph.output_names == ("out/0", "out/1")
    assert [(e.name, e.tied_output) for e in made.graph.inputs] == [("w", 0), ("x", -1)]


def test_inner_jit_is_inlined_and_names_the_scope() -> None:
    @jax.jit
    def inner(x: Any) -> Any:
        return jnp.sin(x)

    def outer(x: Any) -> Any:
        with jax.named_scope("block"):
            return inner(x) * 2

    graph = assert_same(outer, X).graph
    assert ops(graph) == ["sin", "mul"]
    assert [op.scope for op in graph.ops] == ["block/inner", "block"]


def test_custom_derivatives_are_inlined() -> None:
    @jax.custom_jvp
    def twice(x: Any) -> Any:
        return x * 2

    twice.defjvp(lambda primals, tangents: (twice(primals[0]), tangents[0] * 2))

    @jax.custom_vjp
    def thrice(x: Any) -> Any:
        return x * 3

    thrice.defvjp(lambda x: (x * 3, None), lambda _, g: (g * 5,))

    graph = assert_same(lambda x: thrice(twice(x)), X).graph
    assert ops(graph) == ["mul", "mul"]
    gradient = assert_same(lambda x: jax.grad(lambda y: jnp.sum(thrice(twice(y))))(x), X)
    assert float(run(gradient, X)[0][0, 0]) == 10.0  # the user's rule, 5, not the true 3


def test_remat_keeps_the_recomputation_apart() -> None:
    @jax.checkpoint
    def block(w: Any, x: Any) -> Any:
        return jnp.sin(jnp.sin(x @ w))

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(block(w, x))

    forward = assert_same(loss, X.T.copy(), X).graph
    assert "optimization_barrier" not in ops(forward)
    backward = assert_same(jax.grad(loss), X.T.copy(), X).graph
    names = ops(backward)
    assert names.count("optimization_barrier") == 3  # one an operand
    # The forward's product is dead but for the recomputed one behind the barrier.
    behind = names[names.index("optimization_barrier") :]
    assert behind.count("dot_general") == 2
    plain = ops(assert_same(jax.grad(lambda w, x: jnp.sum(jnp.sin(jnp.sin(x @ w)))), X.T, X).graph)
    assert plain.count("dot_general") == 2
    barrier = backward.ops[names.index("optimization_barrier")]
    shapes = [backward.shape_of(o) for o in barrier.inputs]
    assert shapes == [backward.values[v].shape for v in barrier.outputs]


def test_remat_without_barrier_where_the_user_said_so() -> None:
    block = functools.partial(jax.checkpoint, prevent_cse=False)(lambda x: jnp.sin(jnp.sin(x)))
    graph = assert_same(jax.grad(lambda x: jnp.sum(block(x))), X).graph
    assert "optimization_barrier" not in ops(graph)


def test_closed_over_arrays_are_hidden_inputs() -> None:
    table = jnp.arange(12.0, dtype=jnp.float32).reshape(4, 3)
    mask = np.eye(3, dtype=np.float32)

    def step(x: Any) -> Any:
        return x * table + x @ mask + table

    made = assert_same(step, X)
    graph = made.graph
    assert graph.num_hidden == 2, "each array once, however often it is used"
    assert [e.name for e in graph.inputs] == ["x", "const/0", "const/1"]
    assert [np.shape(h) for h in made.hidden] == [(4, 3), (3, 3)]
    assert all(e.tied_output == -1 and not e.donated for e in graph.inputs[1:])


def test_closed_over_scalars_are_literals() -> None:
    rate = np.float32(0.5)
    made = assert_same(lambda x: x * rate + 1, X)
    assert made.graph.num_hidden == 0
    literals = [o for op in made.graph.ops for o in op.inputs if isinstance(o, Literal)]
    assert [float(o.value) for o in literals] == [0.5, 1.0]
    assert [o.shape for o in literals] == [(), ()]


def test_hidden_arrays_of_inner_calls() -> None:
    table = jnp.arange(12.0, dtype=jnp.float32).reshape(4, 3)

    @jax.jit
    def inner(x: Any) -> Any:
        return x + table

    made = assert_same(lambda x: inner(x) * table, X)
    assert made.graph.num_hidden == 1


def test_dead_ops_are_dropped_and_numbers_are_dense() -> None:
    def step(x: Any) -> Any:
        unused = jnp.exp(x)
        used = jnp.sin(x)
        del unused
        return used

    graph = assert_same(step, X).graph
    assert ops(graph) == ["sin"]
    assert [op.index for op in graph.ops] == [0]
    assert [v.id for v in graph.values] == list(range(len(graph.values)))
    assert drop_dead(graph) == graph


def test_unused_inputs_stay() -> None:
    graph = assert_same(lambda x, y: jnp.sin(x), X, X).graph
    assert [e.name for e in graph.inputs] == ["x", "y"]


def test_callbacks_are_not_dead() -> None:
    def step(x: Any) -> Any:
        jax.debug.callback(lambda _: None, x.sum())
        return x + 1

    names = ops(built(step, X).graph)
    assert "reduce_sum" in names
    assert any("callback" in name for name in names)


def test_results_that_are_inputs_or_constants() -> None:
    made = assert_same(lambda x: (x, 3.0, x + 1, x), X)
    graph = made.graph
    assert graph.outputs[0] == graph.outputs[3] == graph.inputs[0].value
    assert isinstance(graph.outputs[1], Literal)


def test_function_without_ops_or_arguments() -> None:
    assert assert_same(lambda: jnp.zeros((2, 2))).graph.inputs == ()
    assert assert_same(lambda x: x, X).graph.ops == ()


def test_sources_name_the_users_line() -> None:
    def step(x: Any) -> Any:
        y = jnp.where(x > 0, x, 0.0)
        return jax.nn.relu(y)

    first = inspect.getsourcelines(step)[1]
    graph = built(step, X).graph
    lines = {op.name: op.source for op in graph.ops}
    where = f"trace/test_build.py:{first + 1} ({step.__qualname__})"
    assert lines["gt"] == lines["select_n"] == where
    assert lines["max"] == f"trace/test_build.py:{first + 2} ({step.__qualname__})"


def test_donation_and_state_argnums_reach_the_graph() -> None:
    jitted = jax.jit(lambda p, s: (p + 1, s + 1), donate_argnums=(0,))
    traced = trace_function(jitted, (X, X), {})
    both = build_graph(traced).graph.inputs
    assert [(e.donated, e.tied_output) for e in both] == [(True, 0), (False, 1)]
    only = build_graph(traced, state_argnums=(1,)).graph.inputs
    assert [(e.donated, e.tied_output) for e in only] == [(True, -1), (False, 1)]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int8])
def test_literals_keep_their_dtype(dtype: Any) -> None:
    graph = built(lambda x: x * 2, jax.ShapeDtypeStruct((3,), dtype)).graph
    literal = graph.ops[0].inputs[1]
    assert isinstance(literal, Literal)
    assert literal.dtype == dtype
    assert np.asarray(literal.value, literal.dtype).dtype == dtype


def test_same_function_same_graph() -> None:
    def step(x: Any) -> Any:
        return jax.grad(lambda y: jnp.sum(jnp.tanh(y) ** 2))(x)

    one, other = built(step, X).graph, built(step, X).graph
    assert one.values == other.values
    assert one.inputs == other.inputs
    assert ops(one) == ops(other)
