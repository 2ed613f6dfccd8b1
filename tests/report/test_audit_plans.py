"""Plans of the examples, emitted and compiled in a child process, pass the audit."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.cluster import Cluster
from autopar.lower.from_plan import program_of
from autopar.methods import DataParallel, Method, ShardParallel, Zero3Parallel
from autopar.report.audit import AuditReport, audit_program
from autopar.report.check import check_plan
from autopar.rules.registry import rules_of
from autopar.solver.solve import program_of_decisions, solve
from autopar.trace.build import build_graph
from autopar.trace.jaxpr import trace_function
from tests.models.alpa_cases import MlpCase, build
from tests.models.small_models import small_model
from tests.oracles.random_plans import Case, intra_model, random_decisions, traced

SECONDS = 600.0
FLAGS = ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")


def fast_network(shape: tuple[int, ...]) -> Cluster:
    return Cluster.abstract(
        shape=shape,
        alpha=(1e-9,) * len(shape),
        beta=(1e-12,) * len(shape),
        peak_flops=1e11,
        memory_bandwidth=1e12,
    )


def audited(step: Any, args: tuple[Any, ...], cluster: Cluster, method: Method) -> AuditReport:
    graph = build_graph(trace_function(step, args, {})).graph
    rules = rules_of(graph)
    rows = [i for i, entry in enumerate(graph.inputs) if entry.name.startswith("batch")]
    plan = solve(graph, rules, cluster, method, batch=dict.fromkeys(rows, 0))
    assert check_plan(plan, graph, rules).ok
    program = program_of(plan, graph, rules)
    return audit_program(program, rules, timeout=SECONDS, xla_flags=FLAGS)


def line(size: int) -> ShardParallel:
    return ShardParallel(logical_mesh=(size,))


@pytest.mark.parametrize(
    ("name", "shape", "method"),
    [
        ("mlp", (2, 4), ShardParallel(logical_mesh=(2, 4))),
        ("gpt", (8,), Zero3Parallel()),
        pytest.param("mlp", (8,), line(8), marks=pytest.mark.full),
        pytest.param("mlp", (3,), line(3), marks=pytest.mark.full),
        pytest.param("convnet", (8,), line(8), marks=pytest.mark.full),
        pytest.param("convnet", (3,), DataParallel(), marks=pytest.mark.full),
        pytest.param("convnet", (2, 4), ShardParallel((2, 4)), marks=pytest.mark.full),
        pytest.param("gpt", (8,), line(8), marks=pytest.mark.full),
        pytest.param("gpt", (3,), line(3), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_plans_of_the_examples(name: str, shape: tuple[int, ...], method: Method) -> None:
    model = small_model(name)
    report = audited(model.step, model.args, fast_network(shape), method)
    assert report.ok, report.summary()
    assert report.planned > 0
    assert 0 < report.compiled <= report.planned
    assert report.memory is not None
    assert report.memory.argument_bytes > 0


@pytest.mark.parametrize(
    "hosts", [8, pytest.param(32, marks=pytest.mark.full)], ids=lambda hosts: f"{8 * hosts}"
)
def test_hardware_that_nobody_has_to_own(hosts: int) -> None:
    """As many devices as the preset has, in the child alone."""
    cluster = Cluster.preset("h100-80g", hosts=hosts, devices_per_host=8)
    step, args, _ = build(MlpCase(batch=256, width=32, layers=2))
    report = audited(step, args, cluster, DataParallel())
    assert report.ok, report.summary()
    # four gradients and the loss, which XLA may merge
    assert report.planned == 5
    assert 0 < report.compiled <= 5


@pytest.mark.full
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("shape", [(8,), (2, 4), (3,)], ids=str)
@pytest.mark.parametrize("name", ["mlp", "gpt", "convnet"])
def test_random_plans(name: str, shape: tuple[int, ...], number: int) -> None:
    case = Case(name, shape, str(number))
    program = program_of_decisions(intra_model(name, shape), random_decisions(case))
    report = audit_program(program, traced(name).rules, timeout=SECONDS, xla_flags=FLAGS)
    assert report.ok, report.summary()


def test_a_random_plan_of_the_smallest_model() -> None:
    case = Case("mlp", (2, 4), "0")
    program = program_of_decisions(intra_model("mlp", (2, 4)), random_decisions(case))
    report = audit_program(program, traced("mlp").rules, timeout=SECONDS, xla_flags=FLAGS)
    assert report.ok, report.summary()
    assert report.dropped or report.merged
