"""Faults planted in the emitted and in the compiled program: each is found, with its line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar.lower.spmd as spmd
from autopar.cluster import Cluster
from autopar.ir.reshard import Step
from autopar.lower.collectives import run_step
from autopar.lower.from_plan import program_of
from autopar.lower.program import Program
from autopar.methods import ManualParallel
from autopar.report.audit import AuditReport, audit, emitted_of, wanted_of
from autopar.report.compile import boundary_avals
from autopar.report.hlo import HloProgram, read_hlo
from autopar.rules.registry import rules_of
from autopar.rules.rule import Rule
from autopar.solver.solve import solve
from autopar.trace.build import build_graph
from autopar.trace.jaxpr import trace_function

MESH = (("x", 2), ("y", 4))
HERE = "report/test_audit_faults.py:"
RunStep = Callable[..., Any]


def two_layers(w: dict[str, jax.Array], batch: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    def loss_of(w: dict[str, jax.Array]) -> jax.Array:
        hidden = jnp.tanh(batch @ w["a"])
        return jnp.mean(jnp.square(jnp.tanh(hidden @ w["b"])))

    loss, grads = jax.value_and_grad(loss_of)(w)
    return {name: w[name] - 0.1 * grads[name] for name in w}, loss


@pytest.fixture(scope="module")
def planned() -> tuple[Program, tuple[Rule, ...]]:
    """Batch over x, weights over y: gathers over y, all-reduces over x."""
    kernels = {"a": jax.ShapeDtypeStruct((16, 32), "float32")}
    kernels["b"] = jax.ShapeDtypeStruct((32, 8), "float32")
    args = (kernels, jax.ShapeDtypeStruct((64, 16), "float32"))
    graph = build_graph(trace_function(two_layers, args, {})).graph
    rules = rules_of(graph)
    cluster = Cluster.abstract(
        shape=(2, 4),
        alpha=(1e-9, 1e-9),
        beta=(1e-12, 1e-12),
        peak_flops=1e11,
        memory_bandwidth=1e12,
    )
    method = ManualParallel({"w": P("y"), "batch": P("x")}, MESH)
    return program_of(solve(graph, rules, cluster, method), graph, rules), rules


def compiled(program: Program, rules: tuple[Rule, ...]) -> HloProgram:
    mesh = spmd.jax_mesh(program.mesh, jax.devices()[: program.mesh.size])
    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in boundary_avals(program)]
    lowered = spmd.jit_program(program, rules, mesh).lower(*avals)
    return read_hlo(lowered.compile().as_text() or "")


def audited(program: Program, rules: tuple[Rule, ...]) -> AuditReport:
    hlo = compiled(program, rules)
    return audit(wanted_of(program), emitted_of(program, rules), hlo, program)


def number_of(program: Program, kind: str, axis: str) -> int:
    return next(c.number for c in program.collectives if (c.kind, c.axes) == (kind, (axis,)))


def plant(monkeypatch: pytest.MonkeyPatch, tag: str, fault: RunStep) -> None:
    def faulty(value: Any, step: Step, mesh: Any, mine: str) -> Any:
        return (fault if mine == tag else run_step)(value, step, mesh, mine)

    monkeypatch.setattr(spmd, "run_step", faulty)


def test_a_sound_program_passes(planned: tuple[Program, tuple[Rule, ...]]) -> None:
    report = audited(*planned)
    kinds = {c.kind for c in planned[0].collectives}
    assert {"all-gather", "all-reduce"} <= kinds
    assert report.ok, report.summary()
    assert not report.missing
    assert not report.extra
    assert report.planned == len(planned[0].collectives)
    assert report.summary().startswith("audit ok:")


def test_a_dropped_psum(
    planned: tuple[Program, tuple[Rule, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, rules = planned
    tag = f"ap{number_of(program, 'all-reduce', 'x')}"
    plant(monkeypatch, tag, lambda value, step, mesh, mine: value)
    report = audited(program, rules)
    assert not report.ok
    assert [finding.wanted and finding.wanted.tag for finding in report.missing] == [tag]
    assert not report.extra
    assert HERE in report.missing[0].source
    assert tag in report.lines()[0]
    assert "missing: the program does not ask for it" in report.summary()


def test_a_swapped_axis(
    planned: tuple[Program, tuple[Rule, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, rules = planned
    number = number_of(program, "all-reduce", "x")
    plant(
        monkeypatch,
        f"ap{number}",
        lambda value, step, mesh, mine: run_step(value, replace(step, axes=("y",)), mesh, mine),
    )
    report = audited(program, rules)
    assert not report.ok
    assert "all-reduce over y" in report.missing[0].text
    assert "all-reduce over y" in report.extra[0].text
    assert len(report.missing) == len(report.extra) == 1
    assert HERE in report.missing[0].source
    assert HERE in report.extra[0].source


def test_a_doubled_gather(
    planned: tuple[Program, tuple[Rule, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, rules = planned
    number = number_of(program, "all-gather", "y")

    def twice(value: Any, step: Step, mesh: Any, mine: str) -> Any:
        first = run_step(value, step, mesh, mine)
        return (first + run_step(jnp.sin(value), step, mesh, mine)) / 2

    plant(monkeypatch, f"ap{number}", twice)
    report = audited(program, rules)
    assert not report.ok
    assert not report.missing
    assert len(report.extra) == 1
    assert report.extra[0].source
    assert report.extra[0].saved_elements == -program.collectives[number].elements
    assert "all-gather over y" in report.extra[0].text


def test_faults_of_the_compiler_alone(planned: tuple[Program, tuple[Rule, ...]]) -> None:
    """The emitted program is right, the HLO is not: absent, doubled, over other devices."""
    program, rules = planned
    hlo = compiled(program, rules)
    wanted, emitted = wanted_of(program), emitted_of(program, rules)
    gather = next(item for item in hlo.collectives if item.kind == "all-gather")
    rest = tuple(item for item in hlo.collectives if item is not gather)

    absent = audit(wanted, emitted, replace(hlo, collectives=rest), program)
    assert [finding.what for finding in (*absent.missing, *absent.extra)] == ["missing"]
    assert absent.missing[0].wanted is not None
    assert absent.missing[0].wanted.tag in gather.op_name
    assert absent.missing[0].source

    doubled = replace(hlo, collectives=(*hlo.collectives, gather))
    report = audit(wanted, emitted, doubled, program)
    assert [finding.what for finding in (*report.missing, *report.extra)] == ["extra"]
    assert report.extra[0].source

    other = replace(gather, groups=((0, 4), (1, 5), (2, 6), (3, 7)))
    report = audit(wanted, emitted, replace(hlo, collectives=(*rest, other)), program)
    assert [finding.what for finding in (*report.missing, *report.extra)] == ["missing", "extra"]

    reordered = replace(gather, groups=tuple(tuple(reversed(group)) for group in gather.groups))
    report = audit(wanted, emitted, replace(hlo, collectives=(*rest, reordered)), program)
    assert not report.ok


def test_a_lost_tag_is_matched_by_size(planned: tuple[Program, tuple[Rule, ...]]) -> None:
    program, rules = planned
    hlo = compiled(program, rules)
    nameless = tuple(
        replace(c, op_name="", members=tuple(replace(m, op_name="") for m in c.members))
        for c in hlo.collectives
    )
    report = audit(
        wanted_of(program), emitted_of(program, rules), replace(hlo, collectives=nameless), program
    )
    assert report.ok, report.summary()


def test_a_value_that_is_not_planned_at_all(planned: tuple[Program, tuple[Rule, ...]]) -> None:
    program, rules = planned
    hlo = compiled(program, rules)
    gather = next(item for item in hlo.collectives if item.kind == "all-gather")
    members = (replace(gather.members[0], elements=7, op_name="jit(f)/mul"),)
    stranger = replace(gather, members=members, op_name="jit(f)/mul")
    report = audit(
        wanted_of(program),
        emitted_of(program, rules),
        replace(hlo, collectives=(*hlo.collectives, stranger)),
        program,
    )
    assert [finding.what for finding in (*report.missing, *report.extra)] == ["extra"]
    assert "of 7 elements" in report.extra[0].text
    assert report.extra[0].wanted is not None
    assert report.extra[0].wanted.kind == "all-gather"
