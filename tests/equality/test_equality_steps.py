"""Several steps under the solver's plan, the state given away and fed back each time."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from autopar.lower.from_plan import program_of
from autopar.methods import ShardParallel
from autopar.rules.registry import rules_of
from autopar.runtime.local import LocalProgram, local_devices
from autopar.solver.solve import solve
from autopar.trace.build import build_graph
from autopar.trace.jaxpr import trace_function
from tests.models.small_models import NAMES, small_model
from tests.oracles.random_plans import cheap_network
from tests.oracles.single_device import differences, run_single

STEPS = 3


@pytest.mark.parametrize("name", NAMES)
def test_three_donated_steps_equal_the_single_device(name: str) -> None:
    """Each step starts where the step before it ended, on the devices and on the single one.

    The single device goes on from the devices' state, so that each step is held to one step's
    tolerance.
    """
    model, shape = small_model(name), (2, 4)
    donating = jax.jit(model.step, donate_argnums=(0, 1))
    function = trace_function(donating, model.args, {})
    built = build_graph(function)
    rules = rules_of(built.graph)
    plan = solve(built.graph, rules, cheap_network(shape), ShardParallel(logical_mesh=shape))
    program = program_of(plan, built.graph, rules)
    local = LocalProgram(program, rules, local_devices(8), built.hidden)
    donated = sum(entry.donated for entry in built.graph.inputs)
    given: Any = jax.tree.map(np.asarray, model.args)
    leaves = local.place(jax.tree.leaves(given))
    losses = []
    for _ in range(STEPS):
        expected = run_single(model, given)
        results = jax.tree.unflatten(function.out_tree, local.run(leaves))
        assert all(leaf.is_deleted() for leaf in leaves[:donated])
        assert differences(model, given, expected, results) == []
        given = (*jax.tree.map(np.array, results[:2]), given[2])
        state = jax.tree.leaves(results[:2])
        assert len(state) == donated
        leaves = local.place([*state, *jax.tree.leaves(given[2])])
        # the state comes out where the next step wants it: nothing is moved
        assert all(one is other for one, other in zip(state, leaves, strict=False))
        losses.append(float(results[2]))
    assert losses[-1] < losses[0]
