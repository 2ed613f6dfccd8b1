"""What the paired benchmark compares: both contenders on a small model, and their facts."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar as ap
from benchmarks.paired import (
    Facts,
    by_hand,
    differences,
    facts_of,
    passes,
    planned,
    split_state,
)
from benchmarks.pairs import Contender, Interval
from examples import mlp

SMALL = mlp.Config(batch=16, widths=(24, 16, 16))
SAME = Facts({"all-reduce": 1}, {"all-reduce": 1000}, 500.0, 100, 80, 60, 80)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((16, 24), P(None, "x")),
        ((24, 24), P("x", None)),
        ((9, 16), P(None, "x")),
        ((32, 8, 4), P("x", None, None)),
        ((9, 7), P()),
        ((), P()),
        ((0, 8), P(None, "x")),
    ],
)
def test_a_leaf_is_split_along_its_largest_dim_that_divides(
    shape: tuple[int, ...], spec: P
) -> None:
    assert split_state(jax.ShapeDtypeStruct(shape, "float32")) == spec


@pytest.mark.parametrize("question", ["data-parallel", "zero3"])
def test_both_contenders_do_the_same_steps(question: str) -> None:
    step, args, _ = mlp.make(SMALL)
    losses = []
    for setup in (
        planned(question, step.__wrapped__, args),
        by_hand(question, step.__wrapped__, args),
    ):
        runner = Contender(setup.step, setup.args[:2], setup.args[2])
        runner.run(3)
        losses.append(float(runner.loss))
    state = args[:2]
    for _ in range(3):
        *state, expected = step(*state, args[2])
    np.testing.assert_allclose(losses, float(expected), rtol=1e-5)


def test_data_parallel_by_plan_and_by_hand_are_the_same_program() -> None:
    step, args, _ = mlp.make(SMALL)
    ours, theirs = (
        facts_of(make("data-parallel", step.__wrapped__, args).compiled)
        for make in (planned, by_hand)
    )
    gradients = sum(leaf.size for leaf in jax.tree.leaves(args[0]))
    assert ours.elements == {"all-reduce": gradients + 1}
    assert [d for d in differences(ours, theirs) if d.name != "bytes in all"] == []


def test_zero3_starts_from_the_layout_of_the_hand_written_step() -> None:
    step, args, _ = mlp.make(SMALL)
    plan = ap.make_plan(
        step, *args, cluster=ap.Cluster.local(8), method=ap.Zero3Parallel(), batch_argnums=(2,)
    )
    specs, _ = plan.partition_specs()
    leaves = jax.tree.leaves(args[:2])
    kernels = [
        (specs[name], split_state(leaf))
        for name, leaf in zip(specs, leaves, strict=False)
        if leaf.ndim > 1
    ]
    assert kernels
    assert all(ours == theirs for ours, theirs in kernels)


def test_differences_beyond_a_hundredth_are_named_with_their_sign() -> None:
    assert differences(SAME, SAME) == ()
    close = dataclasses.replace(SAME, elements={"all-reduce": 1009}, flops=504.0)
    assert differences(close, SAME) == ()
    other = dataclasses.replace(SAME, elements={"all-reduce": 900, "all-gather": 7}, flops=550.0)
    assert [str(difference) for difference in differences(other, SAME)] == [
        "more all-gather elements: 7 against 0",
        "less all-reduce elements: 900 against 1,000",
        "more dot FLOPs: 550 against 500",
    ]


@pytest.mark.parametrize(
    ("question", "low", "high", "flops", "verdict"),
    [
        ("data-parallel", 1.02, 1.09, 500.0, "passed"),
        ("data-parallel", 1.04, 1.09, 500.0, "failed"),
        ("data-parallel", 0.90, 0.95, 400.0, "passed"),
        ("data-parallel", 0.90, 0.95, 600.0, "failed"),
        ("zero3", 0.90, 0.99, 600.0, "passed"),
        ("zero3", 0.90, 1.00, 500.0, "failed"),
    ],
)
def test_the_verdict(question: str, low: float, high: float, flops: float, verdict: str) -> None:
    differ = differences(dataclasses.replace(SAME, flops=flops), SAME)
    found = passes(question, Interval((low + high) / 2, low, high, 200), differ)
    assert found is (verdict == "passed")
