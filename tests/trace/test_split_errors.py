"""Steps that cannot be divided exactly end in an error that names the line and the ways out."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import MicrobatchError
from autopar.rules.registry import rules_of
from autopar.trace.backward import split_step
from autopar.trace.batch import LOOP, batch_values
from autopar.trace.build import build_graph
from autopar.trace.jaxpr import trace_function
from autopar.trace.microbatch import run_microbatched
from tests.models.loss_variants import REFUSED, Variant, refused_variants, train_step, variants


def refusal(variant: Variant, count: int = 2) -> MicrobatchError:
    traced = trace_function(variant.step, variant.args, {})
    graph = build_graph(traced).graph
    batch = batch_values(traced, graph, (len(variant.args) - 1,), batch_dims=variant.batch_dim)
    with pytest.raises(MicrobatchError) as caught:
        split_step(graph, rules_of(graph), batch, count)
    return caught.value


def line_of(function: Any, fragment: Any) -> Any:
    lines, start = inspect.getsourcelines(function)
    (offset,) = [n for n, line in enumerate(lines) if fragment in line]
    return f":{start + offset} "


@pytest.mark.parametrize(
    ("name", "fragment", "got", "why"),
    [
        ("batch_norm", "hidden.mean", "needs a finished sum over the batch", "dot_general"),
        ("contrast", "rows @ rows.T", "sets examples of the batch against each", "dot_general"),
        ("balance", "jax.nn.softmax", "it uses the reduce_sum over the batch", "dot_general"),
        ("partly_scaled", "jnp.sqrt", "only part of what it adds up is scaled", "dot_general"),
    ],
)
@pytest.mark.parametrize("sizes", [(8, 6, 10), (8, 8, 8)], ids=str)
def test_text(name: Any, fragment: Any, got: Any, why: Any, sizes: Any) -> None:
    error = refusal(refused_variants(sizes)[name])
    assert error.what == "step cannot be split into 2 micro-batches exactly"
    assert line_of(REFUSED[name], fragment) in error.where
    assert got in error.got
    assert why in error.why
    assert "num_micro_batches=1" in error.remedy
    assert "per example" in error.remedy


def test_the_statistic_is_named_by_its_line() -> None:
    error = refusal(refused_variants()["balance"])
    assert line_of(REFUSED["balance"], "chosen.mean") in error.got


def test_one_micro_batch_is_always_exact() -> None:
    for variant in refused_variants().values():
        traced = trace_function(variant.step, variant.args, {})
        built = build_graph(traced)
        graph = built.graph
        batch = batch_values(traced, graph, (1,))
        split = split_step(graph, rules_of(graph), batch, 1)
        assert any(placed.runs == LOOP for placed in split.placed)
        wanted = jax.tree.leaves(jax.jit(variant.step)(*variant.args))
        given = [*jax.tree.leaves(variant.args), *built.hidden]
        found = jax.jit(lambda given, split=split: run_microbatched(split, given))(given)
        for got, want in zip(found, wanted, strict=True):
            # The same equations; only what XLA fuses may differ.
            np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)


def test_a_batch_that_does_not_divide() -> None:
    error = refusal(variants((8, 6, 10))["mean"], 3)
    assert error.what == "the batch does not divide into 3 micro-batches"
    assert error.where == "batch/m"
    assert error.remedy == "a number of micro-batches that divides 8"


def test_a_loop_without_a_rule() -> None:
    def loss(params: Any, batch: Any) -> Any:
        def body(state: Any) -> Any:
            return state[0] + 1, jnp.tanh(state[1] @ params["w1"])

        _, out = jax.lax.while_loop(lambda state: state[0] < 3, body, (0, batch["x"]))
        return jnp.mean(out)

    args = variants()["mean"].args

    def step(params: Any, batch: Any) -> Any:
        return loss(params, batch), params

    error = refusal(Variant(step, args))
    assert "no rule for primitive 'while'" in error.got
    assert line_of(loss, "while_loop") in error.where
    assert "operations that have a rule" in error.remedy


def test_a_scan_over_the_examples() -> None:
    def loss(params: Any, batch: Any) -> Any:
        def cell(total: Any, row: Any) -> Any:
            return jnp.tanh(total + (row @ params["w1"]).sum()), None

        total, _ = jax.lax.scan(cell, 0.0, batch["x"])
        return total

    error = refusal(Variant(train_step(loss), variants()["mean"].args))
    assert "runs over the batch, example after example" in error.got


def test_a_batch_statistic_in_the_body_of_a_scan() -> None:
    def loss(params: Any, batch: Any) -> Any:
        def cell(rows: Any, _: Any) -> Any:
            rows = rows @ params["w1"]
            return rows - rows.mean(0), None

        rows, _ = jax.lax.scan(cell, batch["x"][:, 0], None, length=3)
        return jnp.mean(rows**2)

    error = refusal(Variant(train_step(loss), variants()["mean"].args))
    assert "in its body, sub" in error.got
    assert line_of(loss, "rows.mean(0)").strip() in error.got
