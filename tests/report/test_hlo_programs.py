"""Programs compiled here, read back: every number is known from how the program was written."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.report.hlo import HloProgram, parallel_share, read_hlo

NAMES, SIZES = ("d", "x"), (2, 4)
LAX = jax.lax


def device_mesh() -> Mesh:
    return jax.make_mesh(SIZES, NAMES, axis_types=(AxisType.Auto, AxisType.Auto))


def compiled(function: Callable[..., Any], *shapes: tuple[int, ...]) -> HloProgram:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return read_hlo(jax.jit(function).lower(*arguments).compile().as_text() or "")


def on_mesh(body: Callable[..., Any], *shapes: tuple[int, ...]) -> HloProgram:
    """``body`` on every device, each argument whole on each."""
    mapped = jax.shard_map(
        body,
        mesh=device_mesh(),
        in_specs=(P(),) * len(shapes),
        out_specs=P(),
        check_vma=False,
    )
    return compiled(mapped, *shapes)


def facts(program: HloProgram) -> list[tuple[str, int, int, tuple[str, ...] | None]]:
    return [(c.kind, c.elements, c.times, c.axes(NAMES, SIZES)) for c in program.collectives]


@pytest.mark.parametrize(
    ("axes", "spanned"),
    [("x", ("x",)), ("d", ("d",)), (("x", "d"), ("d", "x"))],
)
def test_all_reduce_names_its_axes(axes: str, spanned: tuple[str, ...]) -> None:
    program = on_mesh(lambda a: LAX.psum(a, axes), (6, 5))
    assert facts(program) == [("all-reduce", 30, 1, spanned)]
    assert program.collectives[0].dtype == "f32"
    assert program.collectives[0].op_name.endswith("psum")


def test_all_gather_counts_its_output_and_reduce_scatter_its_input() -> None:
    gathered = on_mesh(lambda a: LAX.all_gather(a, "x"), (3, 5))
    assert facts(gathered) == [("all-gather", 60, 1, ("x",))]
    scattered = on_mesh(lambda a: LAX.psum_scatter(a, "d", tiled=True), (4, 5))
    assert facts(scattered) == [("reduce-scatter", 20, 1, ("d",))]


def test_permute_names_the_axis_it_moves_along() -> None:
    ring = [(i, (i + 2) % 4) for i in range(4)]
    program = on_mesh(lambda a: LAX.ppermute(a, "x", ring), (6, 5))
    assert facts(program) == [("collective-permute", 30, 1, ("x",))]


@pytest.mark.parametrize("split", [0, 1])
def test_all_to_all_in_a_loop_runs_once_a_trip(split: int) -> None:
    def body(a: jax.Array) -> jax.Array:
        def step(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            moved = LAX.all_to_all(carry, "x", split, split, tiled=True)
            return jnp.sin(moved), None

        return LAX.scan(step, a, None, length=5)[0]

    # the tuple form that the CPU back-end writes is still one tensor of 8 * 12 elements
    program = on_mesh(body, (8, 12))
    assert facts(program) == [("all-to-all", 96, 5, ("x",))]
    assert len(program.collectives[0].members) == 1


def test_nested_loops_multiply() -> None:
    def body(a: jax.Array) -> jax.Array:
        def inner(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return LAX.psum(jnp.sin(carry), "x"), None

        def outer(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            carry = LAX.scan(inner, carry, None, length=3)[0]
            return jnp.cos(LAX.psum(carry, "d")) @ carry, None

        return LAX.scan(outer, a, None, length=4)[0]

    program = on_mesh(body, (7, 7))
    assert sorted(facts(program)) == [("all-reduce", 49, 4, ("d",)), ("all-reduce", 49, 12, ("x",))]
    assert program.dot_flops == 4 * 2 * 7**3
    assert program.notes == ()


def two_sums(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    with jax.named_scope("ap3"):
        first = LAX.psum(a, "x")
    with jax.named_scope("ap4"):
        second = LAX.psum(b, "x")
    return first, second


def test_merged_all_reduces_keep_each_ones_elements_and_name() -> None:
    def body(a: jax.Array, b: jax.Array) -> jax.Array:
        first, second = two_sums(a, b)
        return jnp.sin(first) * second.sum()

    (merged,) = on_mesh(body, (6, 5), (7,)).collectives
    members = {(m.elements, m.op_name.split("/")[-2]) for m in merged.members}
    assert members == {(30, "ap3"), (7, "ap4")}
    assert merged.elements == 37


def test_merged_all_reduces_that_are_the_result_have_the_joint_name() -> None:
    (merged,) = on_mesh(two_sums, (6, 5), (7,)).collectives
    assert sorted(m.elements for m in merged.members) == [7, 30]
    assert all("ap3" in m.op_name and "ap4" in m.op_name for m in merged.members)


def test_the_partitioner_s_own_collectives_are_read() -> None:
    # what GSPMD inserts prints its groups as iota lists and as meshes with device_ids
    mesh = device_mesh()

    def put(*spec: Any) -> NamedSharding:
        return NamedSharding(mesh, P(*spec))

    function = jax.jit(
        lambda a, b: LAX.with_sharding_constraint(jnp.tanh(a @ b), put("x", "d")) @ b,
        in_shardings=(put("d", "x"), put("x", None)),
        out_shardings=put(("x", "d"), None),
    )
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    program = read_hlo(function.lower(shape, shape).compile().as_text() or "")
    assert program.collectives
    assert all(c.axes(NAMES, SIZES) in (("d",), ("x",)) for c in program.collectives)


def test_loop_with_a_bound_that_is_not_known_counts_once_and_says_so() -> None:
    def grow(a: jax.Array) -> jax.Array:
        grown: jax.Array = LAX.while_loop(lambda c: c.sum() < 1e6, lambda c: c @ c, a)
        return grown

    program = compiled(grow, (8, 8))
    assert program.dot_flops == 2 * 8**3
    assert len(program.notes) == 1
    assert "counts once" in program.notes[0]


def test_every_branch_counts_once() -> None:
    def choose(a: jax.Array, which: jax.Array) -> jax.Array:
        branches = [lambda a: a @ a, lambda a: (a @ a) @ jnp.sin(a), lambda a: a]
        chosen: jax.Array = LAX.switch(which[0].astype(int), branches, a)
        return chosen

    assert compiled(choose, (8, 8), (1,)).dot_flops == 3 * 2 * 8**3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("spec", "shapes", "macs"),
    [
        ("mk,kn->mn", ((6, 5), (5, 7)), 6 * 5 * 7),
        ("bmk,bnk->bmn", ((3, 6, 5), (3, 7, 5)), 3 * 6 * 5 * 7),
        ("abk,kcd->abcd", ((2, 3, 5), (5, 4, 6)), 2 * 3 * 5 * 4 * 6),
    ],
)
def test_dots_in_fusions(
    dtype: Any, spec: str, shapes: tuple[tuple[int, ...], ...], macs: int
) -> None:
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    function = jax.jit(lambda a, b: jnp.tanh(jnp.einsum(spec, a, b)) + 1)
    program = read_hlo(function.lower(*arguments).compile().as_text() or "")
    assert program.dot_flops == 2 * macs


def convolve(x: jax.Array, w: jax.Array, *, stride: int, groups: int, padding: str) -> jax.Array:
    return LAX.conv_general_dilated(
        x,
        w,
        (stride, stride),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


@pytest.mark.parametrize(
    ("stride", "groups", "padding"),
    [(1, 1, "VALID"), (1, 1, "SAME"), (2, 1, "SAME"), (2, 4, "SAME"), (1, 8, "SAME")],
)
def test_convolution_and_its_gradients_count_the_same(
    stride: int, groups: int, padding: str
) -> None:
    image, kernel = (2, 9, 10, 8), (3, 3, 8 // groups, 16)

    def apply(x: jax.Array, w: jax.Array) -> jax.Array:
        return convolve(x, w, stride=stride, groups=groups, padding=padding)

    # a convolution of ones by ones counts, at each output, its own multiply-adds
    macs = int(apply(jnp.ones(image), jnp.ones(kernel)).sum())
    if padding == "VALID":
        assert macs == math.prod((2, 7, 8, 16)) * 9 * 8 // groups
    assert compiled(apply, image, kernel).dot_flops == 2 * macs
    gradients = jax.grad(lambda x, w: (apply(x, w) ** 2).sum(), (0, 1))
    assert compiled(gradients, image, kernel).dot_flops == 3 * 2 * macs


@pytest.mark.parametrize(("spec", "share"), [(P(NAMES), 1.0), (P("x"), 0.5), (P(), 0.125)])
def test_parallel_share(spec: P, share: float) -> None:
    def work(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.tanh(a @ b) @ b

    shapes = ((64, 32), (32, 32))
    mapped = jax.shard_map(
        work, mesh=device_mesh(), in_specs=(spec, P()), out_specs=spec, check_vma=False
    )
    assert parallel_share(compiled(work, *shapes), compiled(mapped, *shapes), 8) == share


def test_parallel_share_without_contractions() -> None:
    nothing, something = HloProgram((), 0.0, ()), HloProgram((), 8.0, ())
    assert parallel_share(nothing, nothing, 4) == 1.0
    assert parallel_share(something, nothing, 4) == math.inf
