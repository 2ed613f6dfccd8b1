"""A step in stages, run by a plain interpreter, is the step."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from autopar.ir.graph import Literal
from autopar.layers.divide import Staged, divide_step, into_stages
from autopar.layers.grouping import group
from autopar.rules.registry import rules_of
from autopar.trace.batch import batch_values
from autopar.trace.build import build_graph
from autopar.trace.jaxpr import trace_function
from tests.models.headed import headed_model
from tests.models.loss_variants import variants
from tests.models.small_models import SmallModel, small_model
from tests.oracles.plain_stages import run_stages
from tests.oracles.single_device import differences, run_single

VARIANTS = sorted(variants((8, 8, 8)))


def staged_step(
    step: Any, args: Any, count: int, stages: int, *, batch_dim: int = 0
) -> tuple[Staged, list[Any]]:
    """The step (its last argument is the batch) in stages, and its inputs."""
    traced = trace_function(step, args, {})
    built = build_graph(traced)
    rules = rules_of(built.graph)
    batch = batch_values(traced, built.graph, (len(args) - 1,), batch_dims=batch_dim)
    divided = divide_step(built.graph, rules, batch, count)
    starts = group(divided.line.work, divided.line.cuts, stages)
    return into_stages(divided, starts), [*jax.tree.leaves(args), *built.hidden]


def model_of(name: str) -> SmallModel:
    return headed_model() if name == "headed" else small_model(name)


@pytest.mark.parametrize(("stages", "count"), [(1, 4), (2, 4), (3, 6), (4, 8)])
@pytest.mark.parametrize("name", ["mlp", "gpt", "headed"])
def test_stages_compute_the_step(name: str, stages: int, count: int) -> None:
    model = model_of(name)
    staged, inputs = staged_step(model.step, model.args, count, stages)
    expected = run_single(model, model.args)
    results = jax.tree.unflatten(jax.tree.structure(expected), run_stages(staged, inputs))
    assert differences(model, model.args, expected, results) == []


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_losses_compute_the_step(name: str, count: int) -> None:
    """Micro-batches and two stages, for every way in which a loss meets the batch."""
    variant = variants((8, 8, 8))[name]
    staged, inputs = staged_step(variant.step, variant.args, count, 2, batch_dim=variant.batch_dim)
    wanted = jax.tree.leaves(jax.jit(variant.step)(*variant.args))
    for got, want in zip(run_stages(staged, inputs), wanted, strict=True):
        scale = np.max(np.abs(np.asarray(want, np.float64)), initial=1e-30)
        error = np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64)) / scale
        assert error.max(initial=0.0) <= variant.tolerance


def test_little_crosses_between_stages() -> None:
    """Per micro-batch one activation forward and one cotangent back; weights' sums after it."""
    model = small_model("gpt")
    staged, _ = staged_step(model.step, model.args, 4, 2)
    micro = staged.divided.micro.graph
    activation = (6, 12, 48)
    assert [micro.values[v].shape for v in _sent(staged, 0, "F")] == [activation]
    assert [micro.values[v].shape for v in _sent(staged, 1, "B")] == [activation]
    # The tied embedding: its gradient of the last stage comes once, after the micro-batches.
    shapes = [micro.values[v].shape for v in _sent(staged, 1, "U0")]
    assert shapes.count((48, 48)) + shapes.count((48, 48)[::-1]) >= 1


def _sent(staged: Staged, stage: int, task: str) -> list[int]:
    graph = staged.graphs[stage]
    made = {v: t for op, t in zip(graph.graph.ops, graph.tasks, strict=True) for v in op.outputs}
    return [
        exit_.target
        for exit_, operand in zip(graph.exits, graph.graph.outputs, strict=True)
        if exit_.kind != "result" and not isinstance(operand, Literal) and made.get(operand) == task
    ]


def test_the_same_stages_every_time() -> None:
    model = small_model("gpt")
    one, _ = staged_step(model.step, model.args, 4, 3)
    other, _ = staged_step(model.step, model.args, 4, 3)
    for a, b in zip(one.graphs, other.graphs, strict=True):
        assert (a.tasks, a.ports, a.exits, a.gathered) == (b.tasks, b.ports, b.exits, b.gathered)
