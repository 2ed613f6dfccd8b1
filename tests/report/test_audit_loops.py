"""Loops and shared work: what XLA moves, shares and leaves out is told from what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from autopar.ir.mesh import Mesh
from autopar.report.audit_emitted import Emitted, emitted_collectives
from autopar.report.audit_match import Finding, Wanted, asked_for, match_compiled, match_emitted
from autopar.report.hlo import read_hlo

MESH = Mesh(("x", "y"), (2, 4))
LINE = "model.py:12 (layer)"
GATHER = Wanted("ap1", "all-gather", ("y",), 64, 5, itemsize=4, source=LINE, name="params/w")


def gather(value: jax.Array, tag: str = "ap1") -> jax.Array:
    with jax.named_scope(tag):
        whole: jax.Array = jax.lax.all_gather(value, "y", axis=0, tiled=True)
    return whole


def psum(value: jax.Array, tag: str, axis: str = "y") -> jax.Array:
    with jax.named_scope(tag):
        total: jax.Array = jax.lax.psum(value, axis)
    return total


def inside(carry: jax.Array, w: jax.Array) -> jax.Array:
    """A gather of the same value in each of 5 trips."""

    def body(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(c @ gather(w)), None

    return jax.lax.scan(body, carry, None, length=5)[0]


def outside(carry: jax.Array, w: jax.Array) -> jax.Array:
    whole = gather(w)
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ whole), None), carry, None, length=5)[0]


def each(carry: jax.Array, w: jax.Array) -> jax.Array:
    """A gather of another value in each trip: it cannot be moved."""

    def body(c: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(c @ gather(w * index)), None

    return jax.lax.scan(body, carry, jnp.arange(5.0))[0]


def programs(
    body: Callable[..., Any], *shapes: tuple[int, ...], results: int = 1
) -> tuple[tuple[Emitted, ...], Any]:
    """What `body` asks for, and what is compiled of it."""
    mesh = jax.make_mesh(MESH.sizes, MESH.names, axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P(),) * len(shapes),
        out_specs=(P(),) * results if results > 1 else P(),
        check_vma=False,
    )
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(mapped).lower(*avals).compile().as_text() or ""
    return emitted_collectives(mapped, avals, MESH), read_hlo(text)


def kinds(findings: tuple[Finding, ...]) -> list[str]:
    return [finding.what for finding in findings]


def test_xla_may_move_a_gather_out_of_its_loop() -> None:
    emitted, hlo = programs(inside, (4, 8), (2, 8))
    assert not match_emitted([GATHER], emitted)
    (found,) = match_compiled(asked_for([GATHER], emitted), hlo, MESH)
    assert found.what == "hoisted"
    assert found.source == LINE
    assert found.saved_elements == 4 * 64
    assert found.memory_bytes == 64 * 4
    assert "1 x in place of 5 x" in found.text


def test_the_lowering_may_not_move_a_gather_out_of_its_loop() -> None:
    emitted, hlo = programs(outside, (4, 8), (2, 8))
    found = match_emitted([GATHER], emitted)
    assert kinds(found) == ["missing", "extra"]
    assert "moved out of a loop" in found[0].text
    assert found[0].source == LINE
    assert not match_compiled(asked_for([GATHER], emitted), hlo, MESH)


def test_a_gather_moved_into_a_loop_is_extra() -> None:
    emitted, hlo = programs(each, (4, 8), (2, 8))
    once = Wanted("ap1", "all-gather", ("y",), 64, 1, source=LINE)
    assert kinds(match_emitted([once], emitted)) == ["missing", "extra"]
    found = match_compiled([once], hlo, MESH)
    assert sorted(kinds(found)) == ["extra", "missing"]
    assert all(finding.source == LINE for finding in found)
    assert "x 5" in next(f.text for f in found if f.what == "extra")


def test_a_gather_that_runs_in_each_trip_is_as_planned() -> None:
    emitted, hlo = programs(each, (4, 8), (2, 8))
    assert [(item.tag, item.elements, item.times) for item in emitted] == [("ap1", 64, 5)]
    assert not match_emitted([GATHER], emitted)
    assert not match_compiled(asked_for([GATHER], emitted), hlo, MESH)


def wanted_from(emitted: tuple[Emitted, ...]) -> list[Wanted]:
    return [
        Wanted(e.tag, e.kind, e.axes, e.elements, e.times, e.reduction, source=LINE)
        for e in emitted
    ]


@pytest.mark.parametrize("first", ["ap1", "ap2"])
def test_equal_collectives_run_once(first: str) -> None:
    second = "ap2" if first == "ap1" else "ap1"

    def body(a: jax.Array) -> jax.Array:
        return jnp.sin(psum(a * 2, first)) + jnp.cos(psum(a * 2, second))

    emitted, hlo = programs(body, (8, 4))
    assert [item.equal for item in emitted] == ["", first]
    (found,) = match_compiled(asked_for(wanted_from(emitted), emitted), hlo, MESH)
    assert found.what == "dropped"
    assert "together with the equal" in found.text


def test_a_value_that_nobody_uses_and_a_constant_are_left_out() -> None:
    def body(a: jax.Array) -> jax.Array:
        psum(a, "ap1")
        ones = jax.lax.broadcast_in_dim(jnp.float32(1), (2, 4), ())
        place = jax.lax.axis_index("y")
        part = jax.lax.dynamic_slice_in_dim(ones, place // 2, 1, axis=0)
        zeros = jnp.where(place == 0, jnp.zeros_like(part), 0 * jnp.zeros_like(part))
        return a + gather(part, "ap2") + gather(zeros, "ap3")

    emitted, hlo = programs(body, (4, 4))
    assert emitted[0].idle == "nobody uses its result"
    assert {item.tag: item.idle for item in emitted[1:]}["ap2"] == "it moves a constant"
    found = match_compiled(asked_for(wanted_from(emitted[:2]), emitted[:2]), hlo, MESH)
    assert kinds(found)[:2] == ["dropped", "dropped"]


def test_merged_collectives_keep_their_tags() -> None:
    def body(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        return psum(a, "ap1"), psum(b, "ap2")

    emitted, hlo = programs(body, (8,), (3, 3), results=2)
    assert not any(item.equal or item.idle for item in emitted)
    (found,) = match_compiled(asked_for(wanted_from(emitted), emitted), hlo, MESH)
    assert found.what == "merged"
    assert "carries 2 all-reduces, 1 starts fewer: ap1 ap2" in found.text


def test_sums_over_axes_of_different_order_differ_for_scatter_only() -> None:
    def body(a: jax.Array) -> tuple[jax.Array, jax.Array]:
        with jax.named_scope("ap1"):
            part = jax.lax.psum_scatter(a, ("y", "x"), scatter_dimension=0, tiled=True)
        with jax.named_scope("ap2"):
            return part, jax.lax.psum(jnp.sin(a), ("y", "x"))

    emitted, hlo = programs(body, (8,), results=2)
    right = asked_for(wanted_from(emitted), emitted)
    assert not match_compiled(right, hlo, MESH)
    swapped = [Wanted(w.tag, w.kind, ("x", "y"), w.elements) for w in right]
    assert sorted(kinds(match_compiled(swapped, hlo, MESH))) == ["extra", "missing"]


def test_branches_and_calls_are_walked() -> None:
    def body(a: jax.Array) -> jax.Array:
        inner = jax.jit(lambda v: psum(v, "ap1", "x"))
        summed = inner(a)
        out: jax.Array = jax.lax.cond(summed[0] > 0, lambda v: psum(v, "ap2"), lambda v: v, summed)
        return out

    emitted, hlo = programs(body, (8,))
    assert [(e.tag, e.axes, e.times) for e in emitted] == [("ap1", ("x",), 1), ("ap2", ("y",), 1)]
    assert not match_compiled(asked_for(wanted_from(emitted), emitted), hlo, MESH)


def test_nothing_planned_and_nothing_compiled() -> None:
    emitted, hlo = programs(lambda a: a + 1, (8,))
    assert emitted == ()
    assert match_emitted([], emitted) == ()
    assert match_compiled([], hlo, MESH) == ()
