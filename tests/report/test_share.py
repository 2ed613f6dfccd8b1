"""The parallel share: 1 where every contraction is divided, 1/n where none is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autopar.cluster import Cluster
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import replicated
from autopar.lower.from_plan import program_of
from autopar.lower.program import Decisions, Program, write_program
from autopar.methods import ManualParallel
from autopar.report.share import parallel_share
from autopar.rules.registry import rules_of
from autopar.rules.rule import Rule
from autopar.rules.strategy import resolve
from autopar.solver.solve import solve
from autopar.trace.build import build_graph
from autopar.trace.jaxpr import TracedFunction, trace_function

DEVICES = 4
FLAGS = ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")


def products(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.tanh(a @ b) @ b


@pytest.fixture(scope="module")
def traced() -> TracedFunction:
    shape = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    return trace_function(products, (shape, shape), {})


def whole(traced: TracedFunction) -> tuple[Program, tuple[Rule, ...]]:
    """Every op on every device."""
    graph = build_graph(traced).graph
    rules, mesh = rules_of(graph), Mesh.of(DEVICES)
    strategies = [resolve(rule, (-1,), mesh) for rule in rules]
    decisions = Decisions(
        tuple(replicated(len(graph.values[entry.value].shape)) for entry in graph.inputs),
        tuple(strategy for strategy in strategies if strategy is not None),
        (),
        tuple(replicated(len(graph.shape_of(operand))) for operand in graph.outputs),
    )
    return write_program(graph, mesh, decisions, lambda value, source, target: ()), rules


def split(traced: TracedFunction) -> tuple[Program, tuple[Rule, ...]]:
    """Rows of `a` over all devices."""
    graph = build_graph(traced).graph
    rules = rules_of(graph)
    cluster = Cluster.abstract(
        shape=(DEVICES,), alpha=(1e-9,), beta=(1e-12,), peak_flops=1e9, memory_bandwidth=1e12
    )
    method = ManualParallel({"a": P("x"), "b": P()}, (("x", DEVICES),))
    return program_of(solve(graph, rules, cluster, method), graph, rules), rules


def test_everything_replicated(traced: TracedFunction) -> None:
    program, rules = whole(traced)
    share = parallel_share(program, rules, traced.jaxpr, timeout=120, xla_flags=FLAGS)
    assert share == 1 / DEVICES


def test_everything_divided(traced: TracedFunction) -> None:
    program, rules = split(traced)
    share = parallel_share(program, rules, traced.jaxpr, timeout=120, xla_flags=FLAGS)
    assert share == 1.0
