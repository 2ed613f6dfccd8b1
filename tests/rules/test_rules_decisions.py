"""What rules decide, told by their text; and that the property tests can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.errors import RuleError
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import Step
from autopar.ir.sharding import Sharding
from autopar.rules.registry import rule_of
from autopar.rules.rule import Eqn, Factor, Rule, make_rule, summed
from autopar.rules.strategy import Assignment, resolve
from tests.oracles.rule_harness import (
    Instance,
    check_instance,
    check_results,
    instances,
)
from tests.oracles.simulated_mesh import apply_reshard_step, random_array, run_rule, scatter

MESH = Mesh.of(2, 2)


def instance_of(primitive: str, function: Callable[..., Any], *args: Any) -> Instance:
    return instances(function, args, primitive)[0]


def rule_for(primitive: str, function: Callable[..., Any], *args: Any) -> Rule:
    return instance_of(primitive, function, *args).rule


def kinds(rule: Rule) -> dict[str, str]:
    return {f.name: f.kind for f in rule.factors if f.kind != "pass"}


def ones(*shape: int, dtype: Any = jnp.float32) -> np.ndarray[Any, Any]:
    return np.ones(shape, dtype)


SPECS: dict[str, tuple[str, Callable[..., Any], tuple[Any, ...], str]] = {
    "matmul": ("dot_general", jnp.matmul, (ones(2, 3), ones(3, 4)), "i0 k0, k0 j0 -> i0 j0"),
    "batched": (
        "dot_general",
        lambda x, y: jnp.einsum("btk,bks->bts", x, y),
        (ones(2, 4, 3), ones(2, 3, 6)),
        "b0 i0 k0, b0 k0 j0 -> b0 i0 j0",
    ),
    "bias": ("add", lax.add, (ones(2, 3), ones(1, 3)), "d0 d1, . d1 -> d0 d1"),
    "heads": (
        "reshape",
        lambda x: jnp.reshape(x, (2, 3, 2, 4)),
        (ones(2, 3, 8),),
        "d0 d1 (d2 d3) -> d0 d1 d2 d3",
    ),
    "tokens": (
        "reshape",
        lambda x: jnp.reshape(x, (6, 8)),
        (ones(2, 3, 8),),
        "d0 d1 d2 -> (d0 d1) d2",
    ),
    "unrelated": (
        "reshape",
        lambda x: jnp.reshape(x, (2, 3, 8)),
        (ones(2, 4, 6),),
        "d0 . . -> d0 . .",
    ),
    "embedding": (
        "gather",
        lambda t, i: t.at[i].get(mode="clip"),
        (ones(12, 4), ones(2, 3, dtype=jnp.int32)),
        "v0 w1, i0 i1 . -> i0 i1 w1",
    ),
    "flags": (
        "gather",
        lambda t, i: t.at[i].get(mode="clip"),
        (ones(12, 4, dtype=jnp.bool_), ones(3, dtype=jnp.int32)),
        ". w1, i0 . -> i0 w1",
    ),
    "update": (
        "scatter",
        lambda x, i, u: x.at[i].set(u),
        (ones(12, 4), ones(3, dtype=jnp.int32), ones(3, 4)),
        "v0 w1, . ., . w1 -> v0 w1",
    ),
    "depthwise": (
        "conv_general_dilated",
        lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=4),
        (ones(2, 4, 6, 6), ones(8, 1, 3, 3)),
        "b (g k) . ., (g j) k . . -> b (g j) . .",
    ),
    "pointwise": (
        "conv_general_dilated",
        lambda x, w: lax.conv(x, w, (1, 2), "VALID"),
        (ones(2, 4, 6, 6), ones(8, 4, 1, 1)),
        "b k s0 ., j k . . -> b j s0 .",
    ),
    "patches": (
        "conv_general_dilated",
        lambda x, w: lax.conv(x, w, (1, 1), "VALID"),
        (ones(2, 4, 6, 3), ones(8, 4, 6, 2)),
        "b k s0 ., j k s0 . -> b j . .",
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_spec(name: str) -> None:
    primitive, function, args, spec = SPECS[name]
    assert rule_for(primitive, function, *args).spec == spec


@pytest.mark.parametrize(
    ("function", "dtype", "stays_partial"),
    [
        (lambda x: lax.div(x, x), jnp.float32, True),
        (lambda x: lax.div(x, x), jnp.int32, False),
        (lambda x: x.astype(jnp.float32), jnp.bfloat16, True),
        (lambda x: x.astype(jnp.bfloat16), jnp.float32, False),
        (lambda x: x.astype(jnp.bfloat16), jnp.float16, False),
        (lambda x: x.astype(jnp.float16), jnp.bfloat16, False),
        (lambda x: x.astype(jnp.complex64), jnp.float32, True),
        (lambda x: x.astype(jnp.int32), jnp.int8, False),
        (lambda x: x.astype(jnp.int8), jnp.int32, True),
        (lambda x: x.astype(jnp.float32), jnp.int32, False),
        (lambda x: x.astype(jnp.float32), jnp.bool_, False),
        (lambda x: jnp.broadcast_to(x, (2, 3)), jnp.bool_, False),
        (lambda x: jnp.broadcast_to(x, (2, 3)), jnp.int32, True),
        (lambda x: x * 2, jnp.uint32, True),
        (jnp.exp, jnp.float32, False),
    ],
)
def test_sums_stay_pending_only_where_nothing_is_lost(
    function: Callable[[Any], Any],
    dtype: Any,
    stays_partial: bool,  # noqa: FBT001
) -> None:
    graph_ops = instances(function, (ones(3, dtype=dtype),), _only_primitive(function, dtype))
    assert ("linear" in kinds(graph_ops[0].rule).values()) == stays_partial


def _only_primitive(function: Callable[[Any], Any], dtype: Any) -> str:
    eqns = jax.make_jaxpr(function)(ones(3, dtype=dtype)).jaxpr.eqns
    assert len(eqns) == 1
    return str(eqns[0].primitive.name)


def test_bitwise_reductions_of_integers_stay_whole() -> None:
    assert kinds(
        rule_for("reduce_and", lambda x: lax.reduce_and(x, (0,)), ones(4, dtype=bool))
    ) == {"d0": "and"}
    rule = rule_for("reduce_and", lambda x: lax.reduce_and(x, (0,)), ones(4, dtype=jnp.int32))
    assert rule.spec == ". -> "


def test_unknown_primitive_is_replicated_and_says_so() -> None:
    instance = instance_of("cholesky", lax.linalg.cholesky, np.eye(4, dtype=np.float32))
    assert instance.rule.reason == "no rule for primitive 'cholesky'"
    assert instance.rule.factors == ()
    check_instance(instance, (-1, -1), MESH, np.random.default_rng(0), 0.0)


def test_flops() -> None:
    assert rule_for("dot_general", jnp.matmul, ones(2, 3), ones(3, 4)).flops == 2 * 2 * 3 * 4
    _, function, args, _ = SPECS["depthwise"]
    window, depth = 9, 1
    expected = 2 * (2 * 8 * 6 * 6) * window * depth
    assert rule_for("conv_general_dilated", function, *args).flops == expected


def test_malformed_rules_are_refused() -> None:
    eqn = Eqn("made_up", {}, ((4, 2),), ((4,),), (np.float32,), (np.float32,))
    with pytest.raises(RuleError, match=r"2 dim names for shape \(4,\)"):
        make_rule(eqn, [["a", "b"]], [["a", "b"]])
    with pytest.raises(RuleError, match=r"'b' has two sizes(.|\n)*got: 2, 4"):
        make_rule(eqn, [["a", "b"]], [["b"]])
    with pytest.raises(RuleError, match=r"\['c', 'd'\] do not make 4"):
        make_rule(eqn, [["c d", "d"]], [["c"]])
    with pytest.raises(RuleError, match="factor 'f' has no size"):
        make_rule(eqn, [["e f", "e"]], [["."]])


def factor(rule: Rule, name: str) -> int:
    return [f.name for f in rule.factors].index(name)


def test_partial_plus_replicated_needs_the_mask() -> None:
    """The mask makes a replicated operand partial; without it, it would count once a device."""
    rng = np.random.default_rng(0)
    x, y = random_array(rng, (4, 6), jnp.float32), 1.0 + random_array(rng, (4, 6), jnp.float32)
    instance = instance_of("add", lax.add, x, y)
    assignment = (factor(instance.rule, "+0"), factor(instance.rule, "d0"))
    strategy = resolve(instance.rule, assignment, MESH)
    assert strategy is not None
    assert [str(s) for s in (*strategy.ins, *strategy.outs)] == ["[y,-]+x"] * 3
    partial = scatter(x, strategy.ins[0], MESH, rng)
    whole = scatter(y, Sharding((("y",), ())), MESH, rng)
    masked = apply_reshard_step(whole, Step("mask", ("x",)), MESH)
    made = run_rule(instance.rule, instance.computation, strategy, [partial, masked], MESH)
    check_results(instance, strategy, made, MESH, 0.0)
    wrong = run_rule(instance.rule, instance.computation, strategy, [partial, whole], MESH)
    with pytest.raises(AssertionError, match="Mismatched"):
        check_results(instance, strategy, wrong, MESH, 0.0)


def _along(name: str) -> Callable[[Instance], Rule]:
    """A rule that wrongly lets every dim pass."""

    def wrong(instance: Instance) -> Rule:
        dims = [f"d{d}" for d in range(len(instance.computation.in_shapes[0]))]
        return make_rule(_eqn(instance), [dims], [dims])

    return wrong


def _eqn(instance: Instance) -> Eqn:
    return Eqn(
        instance.op.name,
        instance.op.params,
        instance.computation.in_shapes,
        instance.computation.out_shapes,
        tuple(o.dtype for o in instance.operands),
        tuple(o.dtype for o in instance.expected),
    )


def _summed_maximum(instance: Instance) -> Rule:
    return make_rule(_eqn(instance), [["k", "a"]], [["a"]], factors={"k": summed()})


def _unfinished_maximum(instance: Instance) -> Rule:
    rule = make_rule(_eqn(instance), [["k", "a"]], [["a"]])
    return replace(rule, outs=(((1,),),))


def _linear_exponential(instance: Instance) -> Rule:
    return make_rule(_eqn(instance), [["a", "b"]], [["a", "b"]], linear=[(0,)])


WRONG: dict[str, tuple[str, Callable[..., Any], Callable[[Instance], Rule], Assignment]] = {
    "cumsum-split": ("cumsum", lambda x: lax.cumsum(x, 0), _along("cumsum"), (0, -1)),
    "rev-split": ("rev", lambda x: lax.rev(x, (0,)), _along("rev"), (-1, 0)),
    "max-summed": ("reduce_max", lambda x: jnp.max(x, 0), _summed_maximum, (0, 1)),
    "max-unfinished": ("reduce_max", lambda x: jnp.max(x, 0), _unfinished_maximum, (0, 1)),
    "exp-linear": ("exp", jnp.exp, _linear_exponential, (2, 0)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_caught(name: str) -> None:
    primitive, function, wrong, assignment = WRONG[name]
    instance = instance_of(primitive, function, np.arange(24, dtype=np.float32).reshape(4, 6) / 8)
    bad = replace(instance, rule=wrong(instance))
    with pytest.raises(AssertionError):
        check_instance(bad, assignment, MESH, np.random.default_rng(1), 1e-6)


def test_table_can_be_extended() -> None:
    """A primitive of the user's own gets a rule by one entry."""
    eqn = Eqn("mine", {}, ((4,),), ((4,),), (np.float32,), (np.float32,))
    rule = rule_of(eqn, {"mine": lambda e: make_rule(e, [["a"]], [["a"]])})
    assert (rule.spec, rule.factors) == ("a -> a", (Factor("a", 4),))


def test_literals_become_scalars_of_their_dtype() -> None:
    instance = instance_of("mul", lambda x: x * 2.5, ones(3, dtype=jnp.bfloat16))
    assert [o.dtype for o in instance.operands] == [jnp.bfloat16, jnp.bfloat16]
    assert instance.operands[1].shape == ()
