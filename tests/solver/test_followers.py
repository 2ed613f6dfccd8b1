"""Which ops need no decision of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar as ap
from autopar.rules.registry import rules_of
from autopar.solver.assemble import IntraModel, assemble, roots_of
from autopar.solver.followers import independent, whole_operands
from autopar.solver.intra.solve import solve_problem
from autopar.trace.build import build_graph
from autopar.trace.jaxpr import trace_function

CLUSTER = ap.Cluster.abstract(
    (4,), alpha=(1e-6,), beta=(1e-10,), peak_flops=1e12, memory_bandwidth=1e11, memory_bytes=1e11
)


def model(function: Any, *args: Any, **options: Any) -> IntraModel:
    graph = build_graph(trace_function(function, args, {})).graph
    return assemble(graph, rules_of(graph), CLUSTER, ap.Mesh.of(4), **options)


def norm(x: Any, scale: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5) * scale


X, SCALE = jnp.ones((8, 16)), jnp.ones(16)


def test_a_layer_norm_follows_its_input_not_its_scale() -> None:
    made = model(norm, X, SCALE)
    scale = next(n for n, entry in enumerate(made.graph.inputs) if entry.name == "scale")
    for op in made.graph.ops:
        group = made.groups[made.nodes.op_node(op.index)]
        if group.root == scale:
            # Only what has no index but the scale's own.
            assert made.graph.values[op.outputs[0]].size == 16


def test_whole_operands_hold_every_index() -> None:
    made = model(lambda a, b: a * b[None, :], X, SCALE)
    product = made.graph.ops[-1]
    assert whole_operands(made.rules[product.index]) == (0,)


def test_every_choice_of_a_root_is_a_legal_choice_of_its_followers() -> None:
    made = model(norm, X, SCALE)
    sizes = made.nodes.sizes
    for node, group in enumerate(made.groups):
        assert len(group.mapping) == sizes[group.root]
        assert group.mapping.min() >= 0
        assert group.mapping.max() < sizes[node]
    assert len(roots_of(made.groups)) < len(made.groups)


def test_followers_cost_nothing_where_the_full_space_can_be_solved() -> None:
    def step(w: Any, x: Any) -> Any:
        grad = jax.grad(lambda w: jnp.square(jnp.tanh(norm(x, SCALE) @ w)).mean())(w)
        return w - 0.1 * grad

    args = jnp.ones((16, 32)), jnp.ones((64, 16))
    merged = solve_problem(model(step, *args).problem, solver="elimination")
    whole = solve_problem(model(step, *args, follow=independent).problem, solver="elimination")
    assert whole.objective <= merged.objective * (1 + 1e-12)
    np.testing.assert_allclose(merged.objective, whole.objective, rtol=1e-9)
