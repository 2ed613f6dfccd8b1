"""The checker agrees with the solver on sound plans, and finds what is changed in a plan."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autopar.cluster import Cluster
from autopar.ir.graph import OpGraph
from autopar.ir.reshard import Step
from autopar.ir.sharding import Sharding, parse_sharding, replicated
from autopar.methods import DataParallel, Method, ShardParallel, Zero2Parallel, Zero3Parallel
from autopar.plan.plan import FrozenPlan
from autopar.plan.serialize import plan_from_json, plan_to_json
from autopar.report.check import CheckReport, check_plan
from autopar.rules.registry import rules_of
from autopar.solver.solve import solve
from autopar.trace.build import build_graph
from autopar.trace.jaxpr import trace_function
from examples import convnet, gpt, mlp

MODELS: dict[str, Callable[[], Any]] = {"mlp": mlp.make, "gpt": gpt.make, "convnet": convnet.make}
Change = Callable[[FrozenPlan], FrozenPlan]


@functools.cache
def graph_of(model: str) -> tuple[OpGraph, frozenset[int]]:
    """The graph, and which arguments are the batch."""
    step, args, _ = MODELS[model]()
    graph = build_graph(trace_function(step, args, {})).graph
    rows = [i for i, entry in enumerate(graph.inputs) if entry.name.startswith("batch")]
    return graph, frozenset(rows)


def plan_of(model: str, shape: tuple[int, ...], method: Method) -> FrozenPlan:
    graph, rows = graph_of(model)
    cluster = Cluster.abstract(
        shape=shape,
        alpha=(1e-9,) * len(shape),
        beta=(1e-12,) * len(shape),
        peak_flops=1e11,
        memory_bandwidth=1e12,
    )
    return solve(graph, rules_of(graph), cluster, method, batch=dict.fromkeys(sorted(rows), 0))


def checked(plan: FrozenPlan, model: str) -> CheckReport:
    graph, _ = graph_of(model)
    return check_plan(plan, graph, rules_of(graph))


@pytest.mark.parametrize(
    ("model", "shape", "method"),
    [
        ("mlp", (8,), ShardParallel(logical_mesh=(8,))),
        ("mlp", (2, 4), ShardParallel(logical_mesh=(2, 4))),
        ("mlp", (3,), Zero2Parallel()),
        ("convnet", (8,), Zero3Parallel()),
        ("gpt", (8,), DataParallel()),
        pytest.param("gpt", (8,), ShardParallel(logical_mesh=(8,)), marks=pytest.mark.full),
        pytest.param("gpt", (3,), Zero3Parallel(), marks=pytest.mark.full),
        pytest.param("convnet", (2, 4), ShardParallel(logical_mesh=(2, 4)), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_examples(model: str, shape: tuple[int, ...], method: Method) -> None:
    plan = plan_of(model, shape, method)
    report = checked(plan, model)
    assert report.ok, report.summary()
    assert report.objective == pytest.approx(plan.solver.objective, rel=1e-9)
    assert report.peak_bytes == plan.cost.peak_bytes
    paid = report.objective - report.compute_seconds
    assert report.communication_seconds <= paid * (1 + 1e-9)
    assert report.summary().startswith("check ok: objective")


def test_axes_on_two_levels_of_the_cluster() -> None:
    graph, rows = graph_of("mlp")
    cluster = Cluster.preset("h100-80g", hosts=2, devices_per_host=4)
    for method in (ShardParallel(logical_mesh=(4, 2)), DataParallel()):
        plan = solve(graph, rules_of(graph), cluster, method, batch=dict.fromkeys(sorted(rows), 0))
        assert checked(plan, "mlp").ok, checked(plan, "mlp").summary()


@pytest.fixture(scope="module")
def plan() -> FrozenPlan:
    return plan_of("mlp", (2, 4), ShardParallel(logical_mesh=(2, 4)))


def test_a_plan_read_from_its_file(plan: FrozenPlan) -> None:
    assert checked(plan_from_json(plan_to_json(plan)), "mlp") == checked(plan, "mlp")
    assert plan.collectives


def _cost(plan: FrozenPlan) -> FrozenPlan:
    return replace(plan, cost=replace(plan.cost, communication_seconds=1.0))


def _compute(plan: FrozenPlan) -> FrozenPlan:
    return replace(plan, cost=replace(plan.cost, compute_seconds=plan.cost.compute_seconds * 1.01))


def _peak(plan: FrozenPlan) -> FrozenPlan:
    return replace(plan, cost=replace(plan.cost, peak_bytes=plan.cost.peak_bytes - 4))


def _objective(plan: FrozenPlan) -> FrozenPlan:
    wrong = plan.solver.objective * (1 + 1e-6)
    return replace(plan, solver=replace(plan.solver, objective=wrong))


def _bound(plan: FrozenPlan) -> FrozenPlan:
    return replace(plan, solver=replace(plan.solver, lower_bound=plan.solver.objective * 1.1))


def _drop_reshard(plan: FrozenPlan) -> FrozenPlan:
    return replace(plan, reshards=plan.reshards[1:])


def _add_reshard(plan: FrozenPlan) -> FrozenPlan:
    value, here, there = plan.reshards[0].value, parse_sharding("[x]"), parse_sharding("[-]")
    extra = replace(plan.reshards[0], value=value, source=here, target=there)
    return replace(plan, reshards=(*plan.reshards, extra))


def _price(plan: FrozenPlan) -> FrozenPlan:
    first = replace(plan.collectives[0], seconds=plan.collectives[0].seconds * 2)
    return replace(plan, collectives=(first, *plan.collectives[1:]))


def _times(plan: FrozenPlan) -> FrozenPlan:
    first = replace(plan.collectives[0], times=plan.collectives[0].times + 1)
    return replace(plan, collectives=(first, *plan.collectives[1:]))


def _line(plan: FrozenPlan) -> FrozenPlan:
    return replace(plan, collectives=plan.collectives[1:])


def _strategy(plan: FrozenPlan) -> FrozenPlan:
    at = next(i for i, text in enumerate(plan.strategies) if text != "-")
    return replace(plan, strategies=(*plan.strategies[:at], "-", *plan.strategies[at + 1 :]))


def _unknown_strategy(plan: FrozenPlan) -> FrozenPlan:
    return replace(plan, strategies=("x:nonsense", *plan.strategies[1:]))


def _shorter(plan: FrozenPlan) -> FrozenPlan:
    return replace(plan, strategies=plan.strategies[:-1])


def _input(plan: FrozenPlan, change: Callable[[Sharding], Sharding], *, tied: bool) -> FrozenPlan:
    at = next(
        i
        for i, entry in enumerate(plan.inputs)
        if (entry.tied >= 0) is tied and len(entry.shape) == 2
    )
    entry = replace(plan.inputs[at], sharding=change(plan.inputs[at].sharding))
    return replace(plan, inputs=(*plan.inputs[:at], entry, *plan.inputs[at + 1 :]))


def _swap(plan: FrozenPlan) -> FrozenPlan:
    def swapped(sharding: Sharding) -> Sharding:
        turned = Sharding(sharding.dims[::-1])
        return turned if turned != sharding else Sharding((("x",), ("y",)))

    return _input(plan, swapped, tied=False)


def _untied(plan: FrozenPlan) -> FrozenPlan:
    def other(sharding: Sharding) -> Sharding:
        whole = replicated(len(sharding.dims))
        return whole if sharding != whole else Sharding((("x",), ()))

    return _input(plan, other, tied=True)


def _pending(plan: FrozenPlan) -> FrozenPlan:
    return _input(plan, lambda s: Sharding(((),) * len(s.dims), ("x",)), tied=False)


def _unknown_axis(plan: FrozenPlan) -> FrozenPlan:
    return _input(plan, lambda s: Sharding((("q",), ())), tied=False)


def _wrong_step(plan: FrozenPlan) -> FrozenPlan:
    at = next(i for i, choice in enumerate(plan.reshards) if choice.steps)
    choice = replace(plan.reshards[at], steps=(Step("all-reduce", ("x", "y")),))
    return replace(plan, reshards=(*plan.reshards[:at], choice, *plan.reshards[at + 1 :]))


def _missing_step(plan: FrozenPlan) -> FrozenPlan:
    at = next(i for i, choice in enumerate(plan.reshards) if choice.steps)
    choice = replace(plan.reshards[at], steps=plan.reshards[at].steps[:-1])
    return replace(plan, reshards=(*plan.reshards[:at], choice, *plan.reshards[at + 1 :]))


def _settled(plan: FrozenPlan) -> FrozenPlan:
    return replace(plan, settled=((0, parse_sharding("[-]+x")),))


def _function(plan: FrozenPlan) -> FrozenPlan:
    return replace(plan, fingerprint="0" * 64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_cost, "communication_seconds is 1.0 in the plan"),
        (_compute, "compute_seconds is"),
        (_peak, "peak_bytes is"),
        (_objective, "objective is"),
        (_bound, "is above the objective"),
        (_drop_reshard, "no way for v"),
        (_add_reshard, "is never used"),
        (_price, "the plan says"),
        (_times, "the price list says"),
        (_line, "the price list says 0 x"),
        (_strategy, "no way for v"),
        (_unknown_strategy, "does not fit the rule"),
        (_shorter, "too few or too many entries"),
        (_swap, "no way for v"),
        (_untied, "but its next value"),
        (_pending, "which is pending"),
        (_unknown_axis, "axis 'q' is not on the mesh"),
        (_wrong_step, "step all-reduce(x.y)"),
        (_missing_step, "is brought to"),
        (_settled, "is settled, but no op makes it"),
        (_function, "is not for this function"),
    ],
)
def test_a_changed_plan_is_found(plan: FrozenPlan, change: Change, words: str) -> None:
    assert checked(plan, "mlp").ok
    report = checked(change(plan), "mlp")
    assert not report.ok
    assert words in report.summary(), report.summary()


def test_the_checker_loads_nothing_of_the_solver() -> None:
    code = (
        "import sys; sys.modules['autopar.solver'] = None; import autopar.report.check; "
        "print([m for m in sys.modules if m.startswith('autopar.solver.')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"
