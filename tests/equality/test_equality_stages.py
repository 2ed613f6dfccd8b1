"""Stages that nobody would choose equal the single device too.

Stages begin anywhere on the forward line, on submeshes of any of the allowed shapes, and inside
each of them every op is laid out at random. The hand-made stages of `ManualStages` come besides.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar as ap
from autopar.cluster import Cluster
from autopar.errors import ArgumentError, ClusterError, MicrobatchError
from autopar.lower.instructions import Run
from autopar.solver.inter import pipeline as pipelines
from autopar.solver.inter import stage_plan
from autopar.solver.inter.cuts import Cut, lay
from autopar.solver.inter.shapes import allowed_shapes
from autopar.solver.intra.problem import Problem, Solution, evaluate
from autopar.staged import StagedPlan
from tests.models.headed import headed_model
from tests.models.small_models import SmallModel, small_model
from tests.oracles.single_device import differences, run_single

SEEDS = 12
SAMPLE = {("mlp", 0), ("mlp", 1), ("headed", 0), ("gpt", 0)}
CASES = [
    pytest.param(name, seed, marks=() if (name, seed) in SAMPLE else pytest.mark.full)
    for name in ("mlp", "headed", "gpt")
    for seed in range(SEEDS)
]


def model_of(name: str) -> SmallModel:
    return headed_model() if name == "headed" else small_model(name)


def random_solver(rng: np.random.Generator) -> Any:
    """In place of a solver: any choice for every node, none of them impossible."""

    def solve(problem: Problem, **options: Any) -> Solution:
        choices = tuple(
            int(rng.choice(np.flatnonzero(np.isfinite(costs)))) for costs in problem.node_costs
        )
        objective = evaluate(problem, choices)
        assert math.isfinite(objective), "some pairs of choices are impossible"
        return Solution(choices, objective, 0.0, 1.0, "random", 0.0)

    return solve


def random_shapes(rng: np.random.Generator, cluster: Cluster, count: int) -> list[tuple[int, int]]:
    """Submeshes of that many stages which tile the cluster, in any order."""
    while True:
        shapes = [
            allowed_shapes(cluster)[n]
            for n in rng.integers(len(allowed_shapes(cluster)), size=count)
        ]
        if sum(map(math.prod, shapes)) == cluster.size:
            try:
                lay(cluster, shapes)
            except ClusterError:
                continue
            return shapes


def random_cut(rng: np.random.Generator, stages: int) -> Any:
    """In place of the choice of stages."""

    def cut(divided: Any, cluster: Cluster, *rest: Any) -> Cut:
        positions = rng.choice(np.arange(1, len(divided.line.ops)), stages - 1, replace=False)
        starts = (0, *sorted(map(int, positions)))
        return Cut(starts, lay(cluster, random_shapes(rng, cluster, stages)), "random")

    return cut


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_random_stages_equal_the_single_device(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng((seed, len(name)))
    stages = int(rng.integers(2, 5))
    model = model_of(name)
    monkeypatch.setattr(pipelines, "_cut", random_cut(rng, stages))
    monkeypatch.setattr(stage_plan, "solve_problem", random_solver(rng))
    step = ap.parallelize(
        jax.jit(model.step, donate_argnums=(0, 1)),
        cluster=ap.Cluster.local(8),
        method=ap.PipeshardParallel(
            int(rng.choice((1, 2, 4))),
            stages=ap.UniformStages(stages),
            schedule=str(rng.choice(("gpipe", "1f1b"))),
        ),
        batch_argnums=(2,),
    )
    given: Any = jax.tree.map(np.asarray, model.args)
    arguments = given
    for _ in range(2):
        expected = run_single(model, given)
        results = step(*arguments)
        assert differences(model, given, expected, results) == []
        given = (*jax.tree.map(np.array, results[:2]), given[2])
        arguments = (*results[:2], given[2])
    step.close()
    jax.clear_caches()


def sharpness_aware(params: Any, batch: Any) -> tuple[Any, Any]:
    """Batch norm, and a second gradient at parameters that the first has moved (SAM)."""

    def loss(params: Any) -> jax.Array:
        x, y = batch
        hidden = x @ params["first"]
        hidden = (hidden - hidden.mean(0)) / jnp.sqrt(hidden.var(0) + 1e-3)
        return jnp.mean((jnp.tanh(hidden) @ params["second"] - y) ** 2)

    gradient = jax.grad(loss)(params)
    norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))
    moved = jax.tree.map(lambda p, g: p + 0.05 * g / norm, params, gradient)
    value, sharp = jax.value_and_grad(loss)(moved)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, sharp), value


def test_one_micro_batch_is_exact_for_what_cannot_be_divided() -> None:
    rng = np.random.default_rng(0)
    params = {
        "first": rng.normal(size=(16, 32)).astype(np.float32),
        "second": rng.normal(size=(32, 8)).astype(np.float32),
    }
    batch = tuple(rng.normal(size=(24, width)).astype(np.float32) for width in (16, 8))

    def step_of(count: int) -> Any:
        return ap.parallelize(
            sharpness_aware,
            cluster=ap.Cluster.local(4),
            method=ap.PipeshardParallel(count, stages=ap.UniformStages(2)),
            batch_argnums=(1,),
        )

    with pytest.raises(MicrobatchError, match=r"num_micro_batches=1"):
        step_of(2).plan(params, batch)
    step = step_of(1)
    assert len(step.plan(params, batch).stages) == 2
    found, value = step(params, batch)
    expected, wanted = jax.jit(sharpness_aware)(params, batch)
    # Float32 sums in another order, twice through a normalisation: a few units in the last place
    # of the largest entry.
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for name in params:
        scale = np.abs(expected[name]).max()
        assert np.abs(np.asarray(found[name]) - expected[name]).max() <= 1e-5 * scale
    step.close()


def manual(model: SmallModel, *starts: str, devices: tuple[int, ...] | None = None) -> Any:
    return ap.parallelize(
        model.step,
        cluster=ap.Cluster.local(4),
        method=ap.PipeshardParallel(2, stages=ap.ManualStages(starts, devices)),
        batch_argnums=(2,),
    )


@pytest.mark.parametrize("devices", [None, (1, 1, 2)], ids=["equal", "unequal"])
def test_stages_by_hand_start_where_they_say(devices: tuple[int, ...] | None) -> None:
    model = small_model("gpt")
    starts = ("params/layers/1",) if devices is None else ("params/layers/1", "params/final_norm")
    step = manual(model, *starts, devices=devices)
    plan = step.plan(*model.args)
    assert isinstance(plan, StagedPlan)
    assert [len(stage.devices) for stage in plan.stages] == list(devices or (2, 2))
    for number, prefix in enumerate(starts, 1):
        names = [
            {entry.name for entry in stage.plan.inputs if entry.name.startswith(prefix)}
            for stage in plan.stages
        ]
        assert names[number]
        assert not any(names[:number])
    runs = [
        {item.task for item in worker.instructions if isinstance(item, Run)}
        for worker in plan.lower().step.workers
    ]
    assert all(tasks >= {"F", "B"} for tasks in runs)
    expected = run_single(model, model.args)
    assert differences(model, model.args, expected, step(*model.args)) == []
    step.close()


@pytest.mark.parametrize(
    ("starts", "devices", "message"),
    [
        (("params/layer/1",), None, r"(?s)names no parameter.*near to it are params/layers/1"),
        (("params/layers/1", "params/layers/0"), (1, 1, 2), "not in the order of the forward"),
        (("params/layers/1",), (1, 2), "do not tile the cluster"),
        (("params/layers/1",), (3, 1), "no submesh of 3 devices"),
        (("params/layers/1",), (1, 1, 2), "one number of devices for each stage"),
    ],
)
def test_stages_by_hand_that_cannot_be(
    starts: tuple[str, ...], devices: tuple[int, ...] | None, message: str
) -> None:
    model = small_model("gpt")
    with pytest.raises((ArgumentError, ClusterError), match=message):
        manual(model, *starts, devices=devices).plan(*model.args)
