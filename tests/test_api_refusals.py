"""What a parallelised function refuses, and what it says then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar as ap


def _loss(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(x))


def _step() -> ap.ParallelFunction:
    return ap.parallelize(_loss)


TRANSFORMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "grad": (jax.grad, "differentiation"),
    "value_and_grad": (jax.value_and_grad, "differentiation"),
    "jit of grad": (lambda f: jax.jit(jax.grad(f)), "differentiation"),
    "grad of jit": (lambda f: jax.grad(jax.jit(f)), "differentiation"),
    "jvp": (lambda f: lambda x: jax.jvp(f, (x,), (x,)), "differentiation"),
    "linearize": (lambda f: lambda x: jax.linearize(f, x), "differentiation"),
    "vmap": (jax.vmap, "jax.vmap"),
    "jit of vmap": (lambda f: jax.jit(jax.vmap(f)), "jax.vmap"),
    "vmap of jit": (lambda f: jax.vmap(jax.jit(f)), "jax.vmap"),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused_with_the_remedy(name: str) -> None:
    transform, said = TRANSFORMS[name]
    with pytest.raises(ap.errors.TransformError) as caught:
        transform(_step())(jnp.ones((8, 8)) if "vmap" in name else jnp.ones(8))
    error = caught.value
    assert error.what == f"{said} of the parallelised function '_loss' is refused"
    assert error.remedy.startswith("parallelise the function that calls jax.")
    assert "try: parallelise" in str(error)


def test_what_was_refused_still_works_when_called() -> None:
    step = _step()
    with pytest.raises(ap.errors.TransformError):
        jax.grad(step)(jnp.ones(8))
    assert step(jnp.ones(8)) == pytest.approx(float(_loss(jnp.ones(8))))


def test_the_gradient_taken_inside_is_fine() -> None:
    step = ap.parallelize(jax.grad(_loss))
    assert step(jnp.zeros(8)).tolist() == [1.0] * 8


def test_too_few_devices() -> None:
    step = ap.parallelize(_loss, cluster="abstract:4x4")
    plan = step.plan(jnp.ones(16))
    assert plan.mesh.size == 16
    with pytest.raises(ap.errors.ClusterError, match="needs 16 devices and this process has 8"):
        step(jnp.ones(16))


def test_a_function_that_jax_cannot_trace() -> None:
    def branchy(x: jax.Array) -> jax.Array:
        return x if x.sum() > 0 else -x

    with pytest.raises(ap.errors.TraceError, match="cannot trace branchy"):
        ap.parallelize(branchy)(jnp.ones(8))


@pytest.mark.parametrize("thing", [None, 3, "step"])
def test_only_functions(thing: Any) -> None:
    with pytest.raises(ap.errors.TraceError, match="only functions can be parallelised"):
        ap.parallelize(thing)


def test_batch_arguments_that_do_not_exist() -> None:
    step = ap.parallelize(_loss, method=ap.DataParallel(), batch_argnums=(3,))
    with pytest.raises(ap.errors.ArgumentError) as caught:
        step(jnp.ones(8))
    assert caught.value.got == "3"
    assert "batch_argnums" in caught.value.remedy


def test_a_batch_that_does_not_divide() -> None:
    step = ap.parallelize(_loss, method=ap.DataParallel(), batch_argnums=(0,))
    with pytest.raises(ap.errors.SolveError, match="does not divide over 8") as caught:
        step(jnp.ones((12, 4)))
    assert "a batch of 8" in caught.value.remedy


def test_a_plan_of_another_function_names_the_first_difference() -> None:
    plan = _step().plan(jnp.ones(8))
    other = ap.parallelize(lambda x: jnp.sum(jnp.cos(x)), plan=plan)
    with pytest.raises(ap.errors.PlanError) as caught:
        other(jnp.ones(8))
    assert "'_loss' is not for this function" in caught.value.what
    assert "cos" in caught.value.got
    assert "sin" in caught.value.got
    assert "test_api_refusals.py" in caught.value.where
    assert "make a new plan" in caught.value.remedy


def test_a_plan_of_other_shapes_names_the_argument() -> None:
    plan = _step().plan(jnp.ones(8))
    with pytest.raises(ap.errors.PlanError) as caught:
        ap.parallelize(_loss, plan=plan)(jnp.ones(16))
    assert "float32[16]" in caught.value.got
    assert "planned float32[8]" in caught.value.got


def test_one_program_over_several_workers_is_planned_for_and_not_run() -> None:
    step = ap.parallelize(lambda x: x * 2.0, cluster=ap.Cluster.ray(2, 4))
    plan = step.plan(jnp.ones(8))
    assert isinstance(plan, ap.Plan)
    assert plan.mesh.size == 8
    with pytest.raises(ap.errors.ClusterError, match="does not run on Ray workers yet") as caught:
        step(jnp.ones(8))
    assert "PipeshardParallel" in caught.value.remedy


def test_a_pipeline_is_not_part_of_another_program() -> None:
    step = ap.parallelize(
        jax.grad(lambda w, x: jnp.sum((x @ w) ** 2)),
        method=ap.ShardParallel(num_micro_batches=2),
        batch_argnums=(1,),
    )
    with pytest.raises(ap.errors.TransformError, match="called inside"):
        jax.jit(step)(jnp.ones((8, 8)), jnp.ones((8, 8)))


def test_micro_batches_need_a_batch() -> None:
    step = ap.parallelize(_loss, method=ap.ShardParallel(num_micro_batches=2))
    with pytest.raises(ap.errors.MicrobatchError) as caught:
        step(jnp.ones(8))
    assert "batch_argnums" in caught.value.remedy
