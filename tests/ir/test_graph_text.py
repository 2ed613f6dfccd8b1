from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.errors import VerifyError
from autopar.ir.graph import Literal, OpGraph, Value
from autopar.ir.text import graph_text, params_text, short_type, signature
from autopar.ir.verify import verify_graph
from autopar.trace.build import build_graph
from autopar.trace.jaxpr import trace_function

F32 = jax.ShapeDtypeStruct((4, 3), jnp.float32)


def mlp_step(params: dict[str, Any], batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """One step of gradient descent on a two-layer network."""

    def loss(p: dict[str, Any]) -> Any:
        hidden = jnp.sin(batch["x"] @ p["w1"] + p["b1"])
        return jnp.mean((hidden @ p["w2"] - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def mlp_graph() -> OpGraph:
    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"w1": leaf(3, 8), "b1": leaf(8), "w2": leaf(8, 2)}
    batch = {"x": leaf(4, 3), "y": leaf(4, 2)}
    step = jax.jit(mlp_step, donate_argnums=0)
    return build_graph(trace_function(step, (params, batch), {})).graph


def small_graph() -> OpGraph:
    return build_graph(trace_function(lambda x: jnp.exp(x) + 2.0, (F32,), {})).graph


def test_golden_text_of_a_train_step(golden: Callable[[str, str], None]) -> None:
    golden("mlp_step.graph.txt", graph_text(mlp_graph()))


def test_sources_are_printed_where_asked() -> None:
    graph = small_graph()
    sources = {op.source: "the one line" for op in graph.ops}
    text = graph_text(graph, sources=sources)
    assert text.count("  # the one line\n") == len(graph.ops)
    assert "  # " not in graph_text(graph)


def test_text_is_stable() -> None:
    assert graph_text(mlp_graph()) == graph_text(mlp_graph())


@pytest.mark.parametrize(
    ("dtype", "shape", "text"),
    [
        (jnp.float32, (2, 3), "f32[2,3]"),
        (jnp.bfloat16, (), "bf16[]"),
        (jnp.float16, (1,), "f16[1]"),
        (jnp.int8, (0,), "i8[0]"),
        (jnp.uint32, (4,), "u32[4]"),
        (jnp.complex64, (), "c64[]"),
        (jnp.bool_, (), "bool[]"),
        (jnp.float8_e4m3fn, (), "f8_e4m3fn[]"),
    ],
)
def test_short_type(dtype: Any, shape: tuple[int, ...], text: str) -> None:
    assert short_type(shape, jnp.dtype(dtype)) == text


def test_params_text_holds_no_addresses() -> None:
    class Thing:
        pass

    text = params_text({"b": Thing(), "a": max, "none": None, "empty": (), "sharding": 1})
    assert text.startswith("a=max b=<")
    assert "0x" not in text
    assert "\n" not in params_text({"a": "one\n  two"})


def test_signature_forgets_which_values() -> None:
    graph = build_graph(trace_function(lambda x, y: (x + 2.0, y + 2.0), (F32, F32), {})).graph
    one, other = (signature(graph, op) for op in graph.ops)
    assert one == other == "add f32[4,3] 2.0:f32[] -> f32[4,3]"


def broken(change: Callable[[OpGraph], OpGraph]) -> OpGraph:
    return change(small_graph())


def _swap_ops(graph: OpGraph) -> OpGraph:
    first, second = graph.ops
    return replace(graph, ops=(replace(second, index=0), replace(first, index=1)))


def _make_twice(graph: OpGraph) -> OpGraph:
    again = replace(graph.ops[1], outputs=graph.ops[0].outputs)
    return replace(graph, ops=(graph.ops[0], again))


def _value_out_of_place(graph: OpGraph) -> OpGraph:
    return replace(graph, values=(*graph.values[:-1], Value(7, (4, 3), graph.values[0].dtype)))


def _tie_wrong_shape(graph: OpGraph) -> OpGraph:
    scalar = Literal(1.0, (), graph.values[0].dtype)
    return replace(graph, inputs=(replace(graph.inputs[0], tied_output=0),), outputs=(scalar,))


def _tie_twice(graph: OpGraph) -> OpGraph:
    tied = replace(graph.inputs[0], tied_output=0)
    return replace(graph, inputs=(tied, replace(tied, value=1)))


BROKEN: dict[str, tuple[Callable[[OpGraph], OpGraph], str]] = {
    "order": (_swap_ops, r"op 0 \(add\) uses v\d before it is made"),
    "twice": (_make_twice, r"op 1 \(add\) makes v\d a second time"),
    "id": (_value_out_of_place, "value 7 stands at position 2"),
    "index": (lambda g: replace(g, ops=g.ops[1:]), "op 1 stands at position 0"),
    "output": (lambda g: replace(g, outputs=(99,)), "output v99 is never made"),
    "input": (lambda g: replace(g, inputs=g.inputs * 2), "enters twice"),
    "tie-shape": (_tie_wrong_shape, "tied to an output of another shape"),
    "tie-twice": (_tie_twice, "output 0 is tied to two inputs"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_verifier_finds(name: str) -> None:
    change, message = BROKEN[name]
    verify_graph(small_graph())
    with pytest.raises(VerifyError, match=message):
        verify_graph(broken(change))


def test_value_sizes() -> None:
    value = Value(0, (4, 3), jnp.dtype(jnp.bfloat16))
    assert (value.size, value.nbytes, value.summable) == (12, 24, True)
    assert not Value(0, (), jnp.dtype(bool)).summable
    assert not Value(0, (), jax.eval_shape(lambda: jax.random.key(0)).dtype).summable
    assert not Value(0, (), jax.dtypes.float0).summable
    assert Value(0, (0, 3), jnp.dtype(jnp.int32)).nbytes == 0
