"""Micro-batched steps against the whole-batch step on one device."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar.rules.registry import rules_of
from autopar.trace.backward import (
    BACKWARD,
    FORWARD,
    PROLOGUE,
    UPDATE,
    outermost_transform,
    split_step,
)
from autopar.trace.batch import AFTER, BEFORE, LOOP, batch_values
from autopar.trace.build import build_graph
from autopar.trace.jaxpr import trace_function
from autopar.trace.microbatch import run_microbatched
from tests.models.loss_variants import (
    LOSSES,
    mean_loss,
    predict,
    root_loss,
    scan_loss,
    squares,
    train_step,
    variants,
)

NAMES = [*LOSSES, "dropout", "equal_sizes", "batch_dim_1", "clipped"]
COUNTS = {(8, 8, 8): (2, 4), (8, 6, 10): (1, 2, 8), (12, 1, 3): (3,)}
SIZES = [
    (8, 8, 8),
    pytest.param((8, 6, 10), marks=pytest.mark.full),
    pytest.param((12, 1, 3), marks=pytest.mark.full),
]


def divide(step: Any, args: Any, count: Any, *, batch_dim: Any = 0, state: Any = 0) -> Any:
    """The step in micro-batches (its last argument is the batch), and its inputs."""
    traced = trace_function(step, args, {})
    built = build_graph(traced, state_argnums=(state,))
    batch = batch_values(traced, built.graph, (len(args) - 1,), batch_dims=batch_dim)
    split = split_step(built.graph, rules_of(built.graph), batch, count)
    return split, [*jax.tree.leaves(args), *built.hidden]


def check(step: Any, args: Any, count: Any, *, batch_dim: Any = 0, tolerance: Any = 2e-5) -> Any:
    """Micro-batched results equal plain ones, relative to the largest magnitude of each."""
    split, inputs = divide(step, args, count, batch_dim=batch_dim)
    wanted = jax.tree.leaves(jax.jit(step)(*args))
    results = jax.jit(lambda given: run_microbatched(split, given))(inputs)
    for got, other in zip(results, wanted, strict=True):
        assert got.shape == other.shape
        assert got.dtype == other.dtype
        scale = np.max(np.abs(np.asarray(other, np.float64)), initial=1e-30)
        np.testing.assert_allclose(
            np.asarray(got, np.float64) / scale,
            np.asarray(other, np.float64) / scale,
            atol=tolerance,
            rtol=0,
        )
    return split


def batch_of(rows: Any = 8, length: Any = 6, width: Any = 10) -> Any:
    return variants((rows, length, width))["mean"].args


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_whole_batch(name: Any, sizes: Any) -> None:
    variant = variants(sizes, seed=sizes[1])[name]
    for count in COUNTS[sizes]:
        split = check(
            variant.step,
            variant.args,
            count,
            batch_dim=variant.batch_dim,
            tolerance=variant.tolerance,
        )
        runs = Counter(placed.runs for placed in split.placed)
        assert runs[LOOP] > 0


@pytest.mark.parametrize("name", ["mean", "weighted", "root_of_mean", "reshaped", "checkpoint"])
def test_nothing_as_large_as_an_activation_is_made_whole(name: Any) -> None:
    # Batch dims that are born from scalars must be found, or cotangents and masks are made whole.
    variant = variants((12, 7, 2), seed=1)[name]
    split, _ = divide(variant.step, variant.args, 4)
    rows = 12 * 7
    for op, placed in zip(split.graph.ops, split.placed, strict=True):
        sizes = [split.graph.values[value].size for value in op.outputs]
        assert placed.runs == LOOP or max(sizes) < rows, (op.name, op.source, placed)
    assert all(split.graph.values[value].size < rows for value in split.crossing)


def test_regions_of_a_masked_step() -> None:
    variant = variants()["masked"]
    split, _ = divide(variant.step, variant.args, 2)
    named = list(zip(split.graph.ops, split.placed, strict=True))
    # The mask count is the prologue: a sum over the whole batch that needs no parameter.
    assert [op.name for op, p in named if p.region == PROLOGUE] == ["reduce_sum", "max", "div"]
    assert {p.runs for _, p in named if p.region == PROLOGUE} == {BEFORE}
    assert {op.name for op, p in named if p.region == UPDATE} == {"mul", "sub"}
    assert {p.runs for _, p in named if p.region == UPDATE} == {AFTER}
    forward = [outermost_transform(op.scope) for op, p in named if p.region == FORWARD]
    backward = [outermost_transform(op.scope) for op, p in named if p.region == BACKWARD]
    assert "transpose" not in forward
    assert set(backward) == {"transpose"}


def test_the_outermost_transform_counts() -> None:
    assert outermost_transform("step/jvp(transpose(jvp(f)))") == "jvp"
    assert outermost_transform("transpose(jvp())/jvp()") == "transpose"
    assert outermost_transform("layer/mlp") == ""


def test_a_gradient_inside_the_forward_is_forward() -> None:
    variant = variants()["inner_gradient"]
    split, _ = divide(variant.step, variant.args, 2)
    inner = [
        placed.region
        for op, placed in zip(split.graph.ops, split.placed, strict=True)
        if op.scope.startswith("jvp(transpose(")
    ]
    assert inner
    assert set(inner) == {FORWARD}


def test_dropout_masks_and_positions_are_bit_equal() -> None:
    def step(params: Any, key: Any, batch: Any) -> Any:
        keep = jax.random.bernoulli(key, 0.5, batch["x"].shape)
        place = jnp.arange(batch["x"].shape[0])[:, None] + jnp.arange(batch["x"].shape[1])
        noise = jax.random.normal(key, batch["x"].shape)
        out = jnp.where(keep, batch["x"] @ params["w1"], noise) * place[..., None]
        return out.sum(), keep, place + batch["t"], noise * batch["m"][..., None]

    params, batch = batch_of()
    args = (params, jax.random.key(3), batch)
    split, inputs = divide(step, args, 4)
    got = run_microbatched(split, inputs)
    for one, other in zip(got[1:], jax.jit(step)(*args)[1:], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_scan_over_layers_with_checkpoint_and_a_root(count: Any) -> None:
    def loss(params: Any, batch: Any) -> Any:
        def layer(rows: Any, weights: Any) -> Any:
            rows = rows + jnp.tanh(rows @ weights["a"] + weights["b"]) @ weights["c"]
            return rows, rows.mean(-1)

        rows, means = jax.lax.scan(jax.checkpoint(layer), batch["x"], params)
        return jnp.sqrt(jnp.mean((rows - batch["y"]) ** 2)), means

    def step(params: Any, batch: Any) -> Any:
        (value, means), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        return jax.tree.map(lambda p, g: p - 100 * g, params, grads), value, means

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "a": jax.random.normal(keys[0], (8, 8, 8)) / 3,
        "b": jax.random.normal(keys[1], (8, 8)) / 3,
        "c": jax.random.normal(keys[2], (8, 8, 8)) / 3,
    }
    batch = {name: batch_of(8, 8, 8)[1][name] for name in ("x", "y")}
    check(step, (params, batch), count)


def test_a_whole_batch_scalar_goes_through_a_scan() -> None:
    check(train_step(lambda p, b: jnp.log1p(scan_loss(p, b))), batch_of(8, 8, 8), 4)


def test_a_scan_over_tokens_without_parameters_is_prologue() -> None:
    def loss(params: Any, batch: Any) -> Any:
        def count(total: Any, row: Any) -> Any:
            return total + row.sum(), None

        total, _ = jax.lax.scan(count, 0.0, batch["m"])
        return jnp.sum(squares(params, batch) * batch["m"]) / (1.0 + total)

    split = check(train_step(loss), batch_of(), 4)
    regions = {
        op.name: placed.region for op, placed in zip(split.graph.ops, split.placed, strict=True)
    }
    assert regions["scan"] == PROLOGUE


def test_contrast_against_targets_without_parameters_is_exact() -> None:
    def loss(params: Any, batch: Any) -> Any:
        rows = batch["x"][:, 0] @ params["w1"]
        scores = rows @ batch["y"][:, 0].T
        own = jnp.arange(scores.shape[0])[:, None]
        picked = jnp.take_along_axis(jax.nn.log_softmax(scores), own, 1)
        return -picked.mean()

    check(train_step(loss), batch_of(), 4)


def test_inputs_standardised_by_the_batch_are_prologue_and_their_use_is_in_the_loop() -> None:
    def loss(params: Any, batch: Any) -> Any:
        x = (batch["x"] - batch["x"].mean(0)) / (1.0 + batch["x"].std(0))
        return mean_loss(params, {**batch, "x": x})

    split = check(train_step(loss), batch_of(), 4)
    named = list(zip(split.graph.ops, split.placed, strict=True))
    assert {"reduce_sum", "sqrt"} <= {op.name for op, p in named if p.region == PROLOGUE}
    assert {p.runs for op, p in named if op.name == "dot_general"} == {LOOP}


def test_weight_decay_and_adam_with_clipping() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1))

    def loss(params: Any, batch: Any) -> Any:
        decay = sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
        return root_loss(params, batch) + 0.01 * decay

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params, batch = batch_of()
    args = (params, optimizer.init(params), batch)
    # Adam divides by the root of a gradient's square: the error of small gradients is magnified.
    split = check(step, args, 4, tolerance=2e-4)
    state = {entry.name.split("/")[0] for entry in split.graph.inputs if entry.tied_output >= 0}
    assert state == {"params"}


def test_per_example_results_come_back_in_order_and_may_be_sorted_after_the_loop() -> None:
    def step(params: Any, batch: Any) -> Any:
        each = squares(params, batch).mean(-1)
        normal = (each - each.mean()) / each.std()
        right = jnp.argmax(predict(params, batch), -1) == batch["t"]
        return each, jnp.median(each), normal, right, right.sum()

    check(step, batch_of(), 4)


def test_half_precision_gradients_are_summed_in_single_precision() -> None:
    def loss(params: Any, batch: Any) -> Any:
        low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
        return jnp.mean((batch["x"] @ low["w1"] - batch["y"]) ** 2)

    check(train_step(loss), batch_of(), 4)

    def direct(params: Any, batch: Any) -> Any:
        return jax.grad(lambda p: jnp.sum(batch["x"].astype(jnp.bfloat16) @ p))(params)

    params, batch = batch_of()
    check(direct, (params["w1"].astype(jnp.bfloat16), batch), 8, tolerance=1e-2)


def test_same_division_in_every_run() -> None:
    variant = variants()["weighted"]
    first, _ = divide(variant.step, variant.args, 2)
    second, _ = divide(variant.step, variant.args, 2)
    assert [(p.region, p.runs, p.uses, p.outs) for p in first.placed] == [
        (p.region, p.runs, p.uses, p.outs) for p in second.placed
    ]
