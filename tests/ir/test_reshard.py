from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import VerifyError
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import (
    COLLECTIVES,
    LOCAL_STEPS,
    Step,
    apply_step,
    full_elements,
    next_steps,
    parse_step,
)
from autopar.ir.sharding import Sharding, check_sharding, parse_sharding, replicated
from tests.oracles.simulated_mesh import (
    apply_reshard_step,
    gather,
    random_array,
    scatter,
)

MESHES = [Mesh.of(*s) for s in ((2,), (3,), (2, 2), (2, 3), (2, 2, 2))]
SHAPES = [(12,), (4, 6), (12, 1), (2, 3, 4), (0, 6), ()]


def walk(mesh: Mesh, shape: tuple[int, ...], rng: np.random.Generator, length: int) -> set[str]:
    """A random path of steps from a replicated value, checked after each; the kinds taken."""
    array = random_array(rng, shape, jnp.float32 if rng.random() < 0.5 else jnp.int32)
    sharding = replicated(len(shape))
    blocks = scatter(array, sharding, mesh, rng)
    taken = set()
    for _ in range(length):
        options = list(next_steps(sharding, shape, mesh))
        kinds = sorted({step.kind for step, _ in options})
        if not kinds:
            break
        kind = kinds[int(rng.integers(len(kinds)))]
        options = [option for option in options if option[0].kind == kind]
        step, after = options[int(rng.integers(len(options)))]
        check_sharding(after, shape, mesh)
        assert after == apply_step(sharding, step, mesh)
        assert after != sharding
        blocks = apply_reshard_step(blocks, step, mesh)
        sharding = after
        taken.add(kind)
        message = f"{step} to {sharding} on {mesh}"
        np.testing.assert_array_equal(gather(blocks, sharding, shape, mesh), array, message)
    return taken


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_paths_preserve_the_value(mesh: Mesh, shape: tuple[int, ...], *, full: bool) -> None:
    rng = np.random.default_rng([mesh.size, len(mesh.names), *shape])
    for _ in range(100 if full else 8):
        walk(mesh, shape, rng, 12)


def test_paths_take_every_kind() -> None:
    rng = np.random.default_rng(0)
    taken = set().union(*(walk(Mesh.of(2, 3), (12, 6), rng, 12) for _ in range(20)))
    assert taken == {*COLLECTIVES, *LOCAL_STEPS}


STARTS = ["[x,-]+y", "[-,x.y]", "[y,x]", "[-,-]+x.y", "[x.y,-]", "[-,y]+x", "[-,-]"]


@pytest.mark.parametrize("start", STARTS)
def test_every_step_from_a_random_placement(start: str) -> None:
    """From random summands, not only those that steps make."""
    mesh, shape = Mesh.of(2, 3), (12, 6)
    rng = np.random.default_rng(1)
    sharding = parse_sharding(start)
    array = random_array(rng, shape, jnp.float32)
    blocks = scatter(array, sharding, mesh, rng)
    for step, after in next_steps(sharding, shape, mesh):
        made = apply_reshard_step(blocks, step, mesh)
        np.testing.assert_array_equal(gather(made, after, shape, mesh), array, str(step))
        assert parse_step(str(step)) == step


def test_a_wrong_step_is_caught() -> None:
    mesh, rng = Mesh.of(2, 2), np.random.default_rng(2)
    array = random_array(rng, (4, 4), jnp.float32)
    pending = parse_sharding("[-,-]+x")
    blocks = scatter(array, pending, mesh, rng)
    with pytest.raises(AssertionError, match="replicas differ"):
        gather(blocks, replicated(2), (4, 4), mesh)
    swapped = scatter(array, parse_sharding("[x.y,-]"), mesh, rng)
    wrong = gather(swapped, parse_sharding("[y.x,-]"), (4, 4), mesh)
    assert not np.array_equal(wrong, array)


@pytest.mark.parametrize(
    ("before", "step", "after"),
    [
        ("[-,-]+x.y", "all-reduce(x)", "[-,-]+y"),
        ("[-,-]+x.y", "all-reduce(x.y)", "[-,-]"),
        ("[y,-]+x", "reduce-scatter(x)@0", "[y.x,-]"),
        ("[x.y,-]", "all-gather(y)@0", "[x,-]"),
        ("[x.y,-]", "all-gather(x.y)@0", "[-,-]"),
        ("[x.y,-]", "all-to-all(y)@0@1", "[x,y]"),
        ("[x,y]", "all-to-all(y)@1@0", "[x.y,-]"),
        ("[x,-]", "slice(y)@0", "[x.y,-]"),
        ("[-,-]+y", "mask(x)", "[-,-]+x.y"),
    ],
)
def test_apply_step(before: str, step: str, after: str) -> None:
    mesh = Mesh.of(2, 2)
    assert str(apply_step(parse_sharding(before), parse_step(step), mesh)) == after


@pytest.mark.parametrize(
    ("before", "step", "message"),
    [
        ("[x,-]", "all-reduce(x)", "sums an axis that is not partial"),
        ("[-,-]+x", "reduce-scatter(y)@0", "sums an axis that is not partial"),
        ("[x.y,-]", "all-gather(x)@0", "not minor-most"),
        ("[-,-]", "all-gather(x)@0", "not minor-most"),
        ("[x.y,-]", "all-to-all(x)@0@1", "not minor-most"),
        ("[x,-]", "slice(x)@1", "uses an axis that is taken"),
        ("[-,-]+x", "mask(x)", "uses an axis that is taken"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(before: str, step: str, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        apply_step(parse_sharding(before), parse_step(step), Mesh.of(2, 2))


@pytest.mark.parametrize(
    "text", ["", "all-gather", "all-gather(x", "gather(x)@0", "slice(x)@0@1@2", "slice(x)@a"]
)
def test_unreadable_step(text: str) -> None:
    with pytest.raises(VerifyError, match="a reshard step cannot be read"):
        parse_step(text)


def test_full_elements_is_the_tensor_on_the_axes_of_the_step() -> None:
    mesh, shape = Mesh.of(2, 3), (12, 6)
    whole = math.prod(shape)

    def elements(before: str, step: Step) -> int:
        return full_elements(parse_sharding(before), step, shape, mesh)

    assert elements("[x.y,-]", Step("all-gather", ("x", "y"), 0)) == whole
    assert elements("[x.y,-]", Step("all-gather", ("y",), 0)) == whole // 2
    assert elements("[x,y]", Step("all-to-all", ("y",), 1, 0)) == whole // 2
    assert elements("[x,-]+y", Step("all-reduce", ("y",))) == whole // 2
    assert elements("[-,-]+x.y", Step("reduce-scatter", ("x",), 0)) == whole


def test_steps_keep_sizes_that_divide() -> None:
    steps = list(next_steps(Sharding(((), ())), (3, 1), Mesh.of(2, 3)))
    assert [str(step) for step, _ in steps] == ["slice(y)@0", "mask(x)", "mask(y)"]
