"""The batch factor in single ops."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import MicrobatchError
from autopar.rules.registry import rules_of
from autopar.trace.batch import (
    ONCE,
    SAME,
    SPLIT,
    SUM,
    Looped,
    Position,
    Refused,
    State,
    View,
    batch_values,
    factor_at,
    position_in,
    try_in_loop,
)
from autopar.trace.build import build_graph
from autopar.trace.jaxpr import trace_function
from autopar.trace.microbatch import micro_join, micro_slice

COUNT = 2


def view_of(function: Any, args: Any, states: Any) -> Any:
    """The view of the only op of `function`."""
    graph = build_graph(trace_function(function, args, {})).graph
    (op,) = graph.ops
    known = dict(zip((entry.value for entry in graph.inputs), states, strict=True))
    return View(
        rules_of(graph)[0],
        tuple(o for o in op.inputs if isinstance(o, int)),
        tuple(graph.shape_of(o) for o in op.inputs),
        tuple(graph.values[v].shape for v in op.outputs),
        tuple(known[o] for o in op.inputs if isinstance(o, int)),
        (None,) * len(op.outputs),
        COUNT,
    )


def outcome(function: Any, args: Any, *states: Any) -> Any:
    return try_in_loop(view_of(function, args, states))


SQUARE = jnp.zeros((4, 4))
ROWS = State(SPLIT, Position(0, 2))
COLUMNS = State(SPLIT, Position(1, 2))


@pytest.mark.parametrize(
    ("function", "args", "states", "wanted"),
    [
        (jnp.add, (SQUARE, SQUARE), (ROWS, State(ONCE)), "split@0"),
        (jnp.matmul, (SQUARE, SQUARE), (ROWS, State(ONCE)), "split@0"),
        (jnp.matmul, (SQUARE, SQUARE), (State(ONCE), COLUMNS), "split@1"),
        (jnp.matmul, (SQUARE, SQUARE), (COLUMNS, State(ONCE)), "sum"),
        (jnp.matmul, (SQUARE, SQUARE), (State(SUM), State(ONCE)), "sum"),
        (jnp.matmul, (SQUARE, SQUARE), (State(SUM, scale=(9,)), State(SAME)), "sum*"),
        (lambda x: x.T, (SQUARE,), (ROWS,), "split@1"),
        (lambda x: jnp.sum(x, 0), (SQUARE,), (ROWS,), "sum"),
        (lambda x: jnp.sum(x, 1), (SQUARE,), (ROWS,), "split@0"),
        (jnp.add, (SQUARE, SQUARE), (State(SUM), State(SUM)), "sum"),
    ],
)
def test_state_of_the_result(function: Any, args: Any, states: Any, wanted: Any) -> None:
    found = outcome(function, args, *states)
    assert isinstance(found, Looped)
    assert str(found.outs[0]) == wanted


@pytest.mark.parametrize(
    ("function", "args", "states", "why"),
    [
        (lambda x, y: x @ y.T, (SQUARE, SQUARE), (ROWS, ROWS), None),
        (jnp.add, (SQUARE, SQUARE), (ROWS, COLUMNS), "against each other"),
        (jnp.subtract, (SQUARE, SQUARE), (ROWS, State(SUM)), "finished sum"),
        (jnp.add, (SQUARE, SQUARE), (State(SUM), State(ONCE)), "adds something"),
        (jnp.multiply, (SQUARE, SQUARE), (State(SUM), State(SUM)), "finished sum"),
        (jnp.sin, (SQUARE,), (State(SUM),), "not linear"),
        (jnp.sin, (SQUARE,), (State(SPLIT, Position(0, 2), (9,)),), "whole-batch scalar"),
        (
            jnp.add,
            (SQUARE, SQUARE),
            (State(SPLIT, Position(0, 2), (9,)), ROWS),
            "only part",
        ),
        (lambda x: jnp.max(x, 0), (SQUARE,), (ROWS,), "max over the batch"),
        (lambda x: jnp.sort(x, 0), (SQUARE,), (ROWS,), "whole batch"),
    ],
)
def test_what_is_refused(function: Any, args: Any, states: Any, why: Any) -> None:
    if why is None:
        why = "against each other"
        function = lambda x, y: jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())))  # noqa: E731
    found = outcome(function, args, *states)
    assert isinstance(found, Refused)
    assert why in found.why


def test_whole_operands_are_sliced_and_constants_added_once() -> None:
    added = outcome(jnp.add, (SQUARE, SQUARE), ROWS, State(ONCE))
    assert [use.kind for use in added.uses] == ["as-is", "slice"]
    assert added.uses[1].position == Position(0, 2)

    def scatter(table: Any, rows: Any, indices: Any) -> Any:
        return table.at[indices].add(rows)

    graph = build_graph(
        trace_function(scatter, (SQUARE, SQUARE, jnp.zeros(4, jnp.int32)), {})
    ).graph
    op = graph.ops[-1]
    assert op.name == "scatter-add"
    view = View(
        rules_of(graph)[-1],
        tuple(o for o in op.inputs if isinstance(o, int)),
        tuple(graph.shape_of(o) for o in op.inputs),
        ((4, 4),),
        (State(ONCE), ROWS, ROWS),
        (None,),
        COUNT,
    )
    found = try_in_loop(view)
    assert isinstance(found, Looped)
    assert [use.kind for use in found.uses] == ["mask", "as-is", "as-is"]
    assert str(found.outs[0]) == "sum"


@pytest.mark.parametrize(
    ("shape", "target", "at", "wanted"),
    [
        ((4, 6), (24,), Position(0, 2), Position(0, 12)),
        ((6, 4), (24,), Position(1, 2), Position(0, 2)),
        ((24,), (4, 6), Position(0, 12), Position(0, 2)),
        ((8, 3), (2, 4, 3), Position(0, 4), Position(0, 1)),
        ((3, 4, 6), (12, 6), Position(1, 2), Position(0, 2)),
    ],
)
def test_position_through_a_reshape(shape: Any, target: Any, at: Any, wanted: Any) -> None:
    array = jnp.arange(np.prod(shape)).reshape(shape)
    graph = build_graph(trace_function(lambda x: x.reshape(target), (array,), {})).graph
    (rule,) = rules_of(graph)
    slot = factor_at(rule, rule.ins[0], at, COUNT)
    assert slot is not None
    assert position_in(rule, rule.outs[0], slot) == wanted
    for index in range(COUNT):
        first = micro_slice(array, at, COUNT, index).reshape(-1)
        second = micro_slice(array.reshape(target), wanted, COUNT, index).reshape(-1)
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("position", [Position(0, 6), Position(0, 2), Position(1, 1)])
def test_joining_slices_gives_the_whole(position: Any) -> None:
    array = np.arange(48).reshape(12, 4)
    parts = [micro_slice(array, position, COUNT, index) for index in range(COUNT)]
    assert parts[0].size == array.size // COUNT
    np.testing.assert_array_equal(micro_join(jnp.stack(parts), position), array)


def test_batch_arguments_are_found_by_number_and_name() -> None:
    def step(params: Any, batch: Any, *, extra: Any) -> Any:
        return params + batch["x"].sum() + extra.sum(), batch["n"]

    args = (jnp.ones(3), {"n": jnp.ones(()), "x": jnp.ones((2, 5))})
    traced = trace_function(step, args, {"extra": jnp.ones((4, 2))})
    graph = build_graph(traced).graph
    found = batch_values(
        traced, graph, (1,), batch_argnames=("extra",), batch_dims={1: 0, "extra": -1}
    )
    assert [(graph.values[v].name, dim) for v, dim in found] == [("batch/x", 0), ("extra", 1)]
    with pytest.raises(MicrobatchError, match="no argument is the batch"):
        batch_values(traced, graph, (7,))
    with pytest.raises(MicrobatchError, match=r"batch/x has no dim 2[\s\S]*shape \(2, 5\)"):
        batch_values(traced, graph, (1,), batch_dims=2)
