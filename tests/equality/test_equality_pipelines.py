"""Scheduled steps equal the single device: models, schedules, stages and micro-batches."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest

import autopar as ap
from autopar.lower.instructions import Run, Send
from autopar.staged import StagedPlan
from tests.models.headed import headed_model
from tests.models.loss_variants import variants
from tests.models.small_models import SmallModel, small_model
from tests.oracles.single_device import differences, run_single

FULL = pytest.mark.full
SAMPLE = {
    ("mlp", "gpipe", 2),
    ("mlp", "1f1b", 3),
    ("gpt", "1f1b", 2),
    ("gpt", "gpipe", 4),
    ("headed", "1f1b", 4),
    ("headed", "gpipe", 3),
}
CASES = [
    pytest.param(*case, count, marks=() if case in SAMPLE else FULL)
    for stages, count in ((2, 4), (3, 6), (4, 8), (2, 1))
    for case in itertools.product(("mlp", "gpt", "headed"), ("gpipe", "1f1b"), (stages,))
]


def model_of(name: str) -> SmallModel:
    return headed_model() if name == "headed" else small_model(name)


def pipeline(model: SmallModel, schedule: str, stages: int, count: int) -> Any:
    """The model's step as a pipeline on devices of this process."""
    return ap.parallelize(
        jax.jit(model.step, donate_argnums=(0, 1)),
        cluster=ap.Cluster.local(stages * (8 // stages)),
        method=ap.PipeshardParallel(count, stages=ap.UniformStages(stages), schedule=schedule),
        batch_argnums=(2,),
    )


@pytest.mark.parametrize(("name", "schedule", "stages", "count"), CASES)
def test_two_scheduled_steps_equal_the_single_device(
    name: str, schedule: str, stages: int, count: int
) -> None:
    """The second step starts from the state that the first left on the stages' devices."""
    model = model_of(name)
    step = pipeline(model, schedule, stages, count)
    given: Any = jax.tree.map(np.asarray, model.args)
    arguments = given
    for _ in range(2):
        expected = run_single(model, given)
        results = step(*arguments)
        assert differences(model, given, expected, results) == []
        given = (*jax.tree.map(np.array, results[:2]), given[2])
        arguments = (*results[:2], given[2])
    step.close()


@pytest.mark.parametrize("name", ["mlp", "gpt", "headed"])
def test_sums_run_once_a_step(name: str) -> None:
    """Gradient reductions and tied sums are in tasks that run once, and so counted."""
    model = model_of(name)
    step = pipeline(model, "1f1b", 2, 4)
    plan = step.plan(*model.args)
    assert isinstance(plan, StagedPlan)
    lowered = plan.lower()
    parameters = {leaf.shape for leaf in jax.tree.leaves(model.args[0])}
    for stage, worker in zip(lowered.stages, lowered.step.workers, strict=True):
        runs = [item.task for item in worker.instructions if isinstance(item, Run)]
        for task in stage.tasks:
            assert runs.count(task.name) == task.times
            if task.name in ("F", "B"):
                reduced = [
                    task.program.graph.values[c.value].shape
                    for c in task.program.collectives
                    if c.kind in ("all-reduce", "reduce-scatter") and c.reduction == "sum"
                ]
                weights = {shape for shape in parameters if len(shape) > 1}
                assert not weights.intersection(reduced), (task.name, reduced)
        specs = dict(worker.buffers)
        sizes = [specs[i.buffer].shape for i in worker.instructions if isinstance(i, Send)]
        for shape in {shape for shape in parameters if len(shape) > 1}:
            assert sizes.count(shape) <= 1, shape


VARIANTS = sorted(variants((8, 8, 8)))
COUNTS = [
    pytest.param(name, count, marks=() if (number + count // 2) % 3 == 0 else FULL)
    for number, name in enumerate(VARIANTS)
    for count in (2, 4)
]


@pytest.mark.parametrize(("name", "count"), COUNTS)
def test_accumulated_gradients_equal_the_whole_batch(name: str, count: int) -> None:
    """`num_micro_batches` of one sharded stage, for every way in which a loss meets the batch."""
    variant = variants((8, 8, 8))[name]
    step = ap.parallelize(
        variant.step,
        cluster=ap.Cluster.local(2),
        method=ap.ShardParallel(num_micro_batches=count),
        batch_argnums=(len(variant.args) - 1,),
        batch_dims=variant.batch_dim,
    )
    wanted = jax.tree.leaves(jax.jit(variant.step)(*variant.args))
    for got, want in zip(jax.tree.leaves(step(*variant.args)), wanted, strict=True):
        scale = np.max(np.abs(np.asarray(want, np.float64)), initial=1e-30)
        error = np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64)) / scale
        assert error.max(initial=0.0) <= variant.tolerance
    step.close()
