"""Named methods are restrictions of one space: what they allow, refuse, and cost."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import autopar as ap
from examples import mlp

CLUSTER = ap.Cluster.abstract(
    (8,), alpha=(1e-7,), beta=(1e-11,), peak_flops=1e13, memory_bandwidth=1e12, memory_bytes=1e11
)
MODEL = mlp.Config(batch=48, widths=(96, 192, 96))


@functools.cache
def plan(method: Any) -> ap.Plan:
    step, args, _ = mlp.make(MODEL)
    return ap.make_plan(step, *args, cluster=CLUSTER, method=method, batch_argnums=(2,))


def kinds(made: ap.Plan) -> set[str]:
    return {line.kind for line in made.collectives}


def test_data_parallelism_only_all_reduces_and_replicates_the_state() -> None:
    made = plan(ap.DataParallel())
    assert kinds(made) == {"all-reduce"}
    for leaf in made.frozen.inputs:
        split = leaf.sharding.split_axes
        assert split == (("x",) if leaf.name.startswith("batch/") else ()), leaf.name


@pytest.mark.parametrize("method", [ap.Zero2Parallel(), ap.Zero3Parallel()])
def test_zero_gathers_and_scatters_state_not_activations(method: Any) -> None:
    made = plan(method)
    leaves = {leaf.name: leaf.shape for leaf in made.frozen.inputs if "params" in leaf.name}
    largest = max(shape[0] * shape[-1] for shape in leaves.values() if len(shape) == 2)
    moved = [line for line in made.collectives if line.kind in ("all-gather", "reduce-scatter")]
    assert {line.kind for line in moved} == {"all-gather", "reduce-scatter"}
    assert all(line.elements <= largest for line in moved)
    assert all("params" in line.name for line in moved)


@pytest.mark.parametrize("method", [ap.DataParallel(), ap.Zero2Parallel(), ap.Zero3Parallel()])
def test_the_whole_space_is_no_dearer_than_a_part_of_it(method: Any) -> None:
    whole = plan(ap.ShardParallel(logical_mesh=(8,))).solver
    assert whole.gap == 0
    assert whole.objective <= plan(method).solver.objective * (1 + 1e-12)


def test_a_batch_that_does_not_divide_is_refused_with_sizes_that_do() -> None:
    step, args, _ = mlp.make(mlp.Config(batch=20, widths=(96, 96)))
    with pytest.raises(ap.errors.SolveError, match="does not divide over 8") as caught:
        ap.make_plan(step, *args, cluster=CLUSTER, method=ap.DataParallel(), batch_argnums=(2,))
    assert "a batch of 16" in caught.value.remedy


def test_batch_dims_choose_the_dim_that_is_split() -> None:
    made = ap.make_plan(
        lambda w, x: (w - x.mean(), x.sum(0)),
        jnp.ones(()),
        jnp.ones((3, 8)),
        cluster=CLUSTER,
        method=ap.DataParallel(),
        batch_argnums=(1,),
        batch_dims=1,
    )
    assert str(made.frozen.inputs[1].sharding) == "[-,x]"


def test_manual_layouts_hold_and_bad_ones_are_refused() -> None:
    step, args, _ = mlp.make(MODEL)
    kernel = "params/0/kernel"
    method = ap.ManualParallel({kernel: PartitionSpec(None, "x")}, logical_mesh=(("x", 8),))
    made = ap.make_plan(step, *args, cluster=CLUSTER, method=method)
    assert made.partition_specs()[0][kernel] == PartitionSpec(None, "x")
    assert made.check().ok
    for specs, said in (
        ({"params/9": PartitionSpec("x")}, "matches no argument"),
        ({kernel: PartitionSpec("q")}, "does not fit"),
        ({kernel: PartitionSpec(None, None, "x")}, "more entries than dims"),
    ):
        bad = ap.ManualParallel(specs, logical_mesh=(("x", 8),))
        with pytest.raises(ap.errors.ArgumentError, match=said):
            ap.make_plan(step, *args, cluster=CLUSTER, method=bad)


def test_a_memory_limit_refuses_with_the_bytes() -> None:
    step, args, _ = mlp.make(MODEL)
    method = ap.ShardParallel(logical_mesh=(8,), memory_bytes=1000)
    with pytest.raises(ap.errors.SolveError, match="does not fit in memory") as caught:
        ap.make_plan(step, *args, cluster=CLUSTER, method=method)
    assert "over memory_bytes" in caught.value.got


def test_a_mesh_of_another_size_is_refused() -> None:
    step, args, _ = mlp.make(MODEL)
    with pytest.raises(ap.errors.ArgumentError, match="another number of devices"):
        ap.make_plan(step, *args, cluster=CLUSTER, method=ap.ShardParallel(logical_mesh=(3, 2)))


def test_a_shared_gradient_is_reduced_once() -> None:
    def step(w: Any, x: Any) -> Any:
        grad = jax.grad(lambda w: jnp.square(x @ w).mean())(w)
        # Used by the norm and by the update: one reduction for both.
        return w - grad / jnp.sqrt(jnp.square(grad).sum() + 1.0)

    shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((512, 64), "float32")
    made = ap.make_plan(
        step, *shapes, cluster=CLUSTER, method=ap.DataParallel(), batch_argnums=(1,)
    )
    assert [(line.elements, line.times) for line in made.collectives] == [(64 * 64, 1)]
