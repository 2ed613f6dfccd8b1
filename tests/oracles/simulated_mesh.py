"""An independent interpreter: a value on a mesh is a list of numpy blocks, one per device.

Device order is row-major over the mesh. Nothing here uses the code under test to place a block or
to move one; only `run_rule` calls it, for the rule's local program itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from autopar.ir.block import AxisIndex
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import Step
from autopar.ir.sharding import Sharding
from autopar.rules.rule import Local, Rule
from autopar.rules.strategy import Finish, Strategy

Array = NDArray[Any]
Blocks = list[Array]
Place = dict[str, int]


@dataclass(frozen=True, slots=True)
class Computation:
    """A primitive applied to global operands: what `run_rule` runs in pieces."""

    primitive: Any
    params: Mapping[str, Any]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shapes: tuple[tuple[int, ...], ...]


def places(mesh: Mesh) -> Iterator[Place]:
    """The coordinates of each device, in device order."""
    for at in np.ndindex(*mesh.sizes):
        yield dict(zip(mesh.names, at, strict=True))


def _size(mesh: Mesh, axes: Sequence[str]) -> int:
    return math.prod(dict(zip(mesh.names, mesh.sizes, strict=True))[axis] for axis in axes)


def _position(mesh: Mesh, axes: Sequence[str], place: Place) -> int:
    """Row-major position along `axes`, the first of them slowest."""
    position = 0
    for axis in axes:
        position = position * _size(mesh, (axis,)) + place[axis]
    return position


def cut(sharding: Sharding, shape: Sequence[int], mesh: Mesh, place: Place) -> tuple[slice, ...]:
    """The part of a value of `shape` that the device at `place` holds."""
    parts = []
    for axes, size in zip(sharding.dims, shape, strict=True):
        count = _size(mesh, axes)
        assert size % count == 0, f"{sharding} does not divide {tuple(shape)}"
        position = _position(mesh, axes, place)
        parts.append(slice(position * (size // count), (position + 1) * (size // count)))
    return tuple(parts)


def random_array(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> Array:
    """Small halves (integers for integer types): sums and products of a few of them are exact."""
    kind = np.dtype(dtype)
    if kind == np.bool_:
        return np.asarray(rng.integers(0, 2, shape), np.bool_)
    values = rng.integers(-4, 5, shape)
    if jnp.issubdtype(kind, jnp.complexfloating):
        return np.asarray((values + 1j * rng.integers(-4, 5, shape)) / 2, kind)
    if jnp.issubdtype(kind, jnp.floating):
        return np.asarray(values / 2, np.float64).astype(kind)
    low = 0 if jnp.issubdtype(kind, jnp.unsignedinteger) else -4
    return np.asarray(rng.integers(low, 5, shape), kind)


def scatter(array: Array, sharding: Sharding, mesh: Mesh, rng: np.random.Generator) -> Blocks:
    """Cut `array`; along partial axes the devices hold random summands that add up to it."""
    count = _size(mesh, sharding.partial)
    summands = [random_array(rng, array.shape, array.dtype) for _ in range(count - 1)]
    # Unequal summands, so that nothing which treats partial blocks as replicas can pass.
    last = array
    for summand in summands:
        last = np.asarray(last - summand, array.dtype)
    summands.append(last)
    return [
        np.array(
            summands[_position(mesh, sharding.partial, place)][
                cut(sharding, array.shape, mesh, place)
            ]
        )
        for place in places(mesh)
    ]


def _same(one: Array, other: Array) -> bool:
    inexact = jnp.issubdtype(one.dtype, jnp.inexact)
    return np.array_equal(one, other, equal_nan=bool(inexact))


def gather(blocks: Blocks, sharding: Sharding, shape: Sequence[int], mesh: Mesh) -> Array:
    """Put the blocks together: replicas must agree bit for bit, partial blocks are added."""
    whole: dict[int, Array] = {}
    filled: dict[int, Array] = {}
    for place, block in zip(places(mesh), blocks, strict=True):
        index = cut(sharding, shape, mesh, place)
        summand = _position(mesh, sharding.partial, place)
        target = whole.setdefault(summand, np.zeros(tuple(shape), block.dtype))
        seen = filled.setdefault(summand, np.zeros(tuple(shape), np.bool_))
        assert block.shape == target[index].shape, (
            f"device {place} holds {block.shape}, {sharding} of {tuple(shape)} says otherwise"
        )
        if seen.ndim == 0 or seen[index].size:
            if np.all(seen[index]):
                assert _same(target[index], block), f"replicas differ at {place} under {sharding}"
        target[index] = block
        seen[index] = True
    assert all(np.all(seen) for seen in filled.values())
    parts = [whole[summand] for summand in sorted(whole)]
    total = parts[0]
    for part in parts[1:]:
        total = np.asarray(total + part, total.dtype)
    return total


FINISH: Mapping[str, Callable[[Array, Array], Array]] = {
    "max": np.maximum,
    "min": np.minimum,
    "and": np.logical_and,
    "or": np.logical_or,
}


def _groups(mesh: Mesh, axes: Sequence[str]) -> list[list[int]]:
    """Devices that differ only along `axes`, in the order of `axes`."""
    members: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for device, place in enumerate(places(mesh)):
        fixed = tuple(at for axis, at in place.items() if axis not in axes)
        members.setdefault(fixed, []).append((_position(mesh, axes, place), device))
    return [[device for _, device in sorted(group)] for group in members.values()]


def apply_finish(blocks: Blocks, finish: Finish, mesh: Mesh) -> Blocks:
    """A pmax and the like: every device of a group gets the group's extreme."""
    done = list(blocks)
    for group in _groups(mesh, finish.axes):
        result = blocks[group[0]]
        for device in group[1:]:
            result = FINISH[finish.kind](result, blocks[device])
        for device in group:
            done[device] = np.asarray(result, blocks[device].dtype)
    return done


def local_view(
    computation: Computation,
    strategy: Strategy,
    mesh: Mesh,
    operands: Sequence[Any],
    axis_index: AxisIndex,
) -> Local:
    """What the rule's local program gets on one device."""
    return Local(
        computation.primitive,
        computation.params,
        tuple(operands),
        computation.in_shapes,
        computation.out_shapes,
        strategy.ins,
        strategy.outs,
        mesh,
        axis_index,
    )


def run_rule(
    rule: Rule,
    computation: Computation,
    strategy: Strategy,
    operands: Sequence[Blocks],
    mesh: Mesh,
) -> list[Blocks]:
    """Run the rule's local program on every device, then the op's own finishes.

    The program is traced once, with the device's coordinates as arguments: as on a real mesh, it
    cannot know where it runs.

    Args:
        rule: the rule under test.
        computation: the primitive with its global parameters and shapes.
        strategy: the resolved assignment.
        operands: per operand its blocks, laid as `strategy.ins` says.
        mesh: the logical mesh.

    Returns:
        Per result its blocks, laid as `strategy.outs` says.
    """
    results: list[Blocks] = [[] for _ in computation.out_shapes]

    @jax.jit
    def program(coordinates: Array, *local_operands: Any) -> tuple[Any, ...]:
        place = dict(zip(mesh.names, coordinates, strict=True))
        return rule.bind(local_view(computation, strategy, mesh, local_operands, place.__getitem__))

    for device, place in enumerate(places(mesh)):
        at = np.array(list(place.values()), np.int32)
        made = program(at, *(blocks[device] for blocks in operands))
        for blocks, result in zip(results, made, strict=True):
            blocks.append(np.asarray(result))
    for finish in strategy.finishes:
        results[finish.output] = apply_finish(results[finish.output], finish, mesh)
    return results


def evaluate(primitive: Any, params: Mapping[str, Any], operands: Sequence[Array]) -> list[Array]:
    """The primitive on whole operands, on one device."""
    bound = primitive.get_bind_params(dict(params))
    result = primitive.bind(*(jnp.asarray(o) for o in operands), **bound)
    return [np.asarray(r) for r in (result if primitive.multiple_results else (result,))]


def _sum(parts: Sequence[Array]) -> Array:
    total = parts[0]
    for part in parts[1:]:
        total = np.asarray(total + part, total.dtype)
    return total


def _mask(blocks: Blocks, step: Step, mesh: Mesh) -> Blocks:
    return [
        block if all(place[axis] == 0 for axis in step.axes) else np.zeros_like(block)
        for place, block in zip(places(mesh), blocks, strict=True)
    ]


def _slice(blocks: Blocks, step: Step, mesh: Mesh) -> Blocks:
    count = _size(mesh, step.axes)
    return [
        np.split(block, count, step.dim)[_position(mesh, step.axes, place)]
        for place, block in zip(places(mesh), blocks, strict=True)
    ]


def _in_groups(
    blocks: Blocks, step: Step, mesh: Mesh, exchange: Callable[[Blocks], Blocks]
) -> Blocks:
    done = list(blocks)
    for group in _groups(mesh, step.axes):
        for device, block in zip(group, exchange([blocks[d] for d in group]), strict=True):
            done[device] = block
    return done


def apply_reshard_step(blocks: Blocks, step: Step, mesh: Mesh) -> Blocks:
    """One reshard step as the collective of its name would do it."""
    count = _size(mesh, step.axes)

    def all_to_all(group: Blocks) -> Blocks:
        pieces = [np.split(block, count, step.to_dim) for block in group]
        return [np.concatenate([p[i] for p in pieces], step.dim) for i in range(count)]

    exchanges: Mapping[str, Callable[[Blocks], Blocks]] = {
        "all-reduce": lambda group: [_sum(group)] * count,
        "reduce-scatter": lambda group: np.split(_sum(group), count, step.dim),
        "all-gather": lambda group: [np.concatenate(group, step.dim)] * count,
        "all-to-all": all_to_all,
    }
    if step.kind == "mask":
        return _mask(blocks, step, mesh)
    if step.kind == "slice":
        return _slice(blocks, step, mesh)
    return _in_groups(blocks, step, mesh, exchanges[step.kind])


def run_on_devices(
    items: Sequence[tuple[Rule, Computation, Strategy, Sequence[Blocks]]], mesh: Mesh
) -> list[list[Blocks]]:
    """`run_rule` for several rules as one program of a real `shard_map` over this host's devices.

    Every block travels with a leading dim for its device, so that partial values and replicas
    enter and leave as they are.
    """
    devices = np.array(jax.devices()[: mesh.size]).reshape(mesh.sizes)
    by_device = jax.sharding.PartitionSpec(mesh.names)

    def program(operands: list[list[Any]]) -> list[list[Any]]:
        made = []
        for (rule, computation, strategy, _), stacked in zip(items, operands, strict=True):
            blocks = [block[0] for block in stacked]
            local = local_view(computation, strategy, mesh, blocks, jax.lax.axis_index)
            results = list(rule.bind(local))
            for finish in strategy.finishes:
                results[finish.output] = _collective_finish(results[finish.output], finish)
            made.append([jnp.asarray(result)[None] for result in results])
        return made

    mapped = jax.shard_map(
        program,
        mesh=jax.sharding.Mesh(devices, mesh.names),
        in_specs=by_device,
        out_specs=by_device,
        check_vma=False,
    )
    stacked = [[np.stack(blocks) for blocks in operands] for *_, operands in items]
    return [[list(np.asarray(r)) for r in results] for results in jax.jit(mapped)(stacked)]


def _collective_finish(value: Any, finish: Finish) -> Any:
    if finish.kind == "max":
        return jax.lax.pmax(value, finish.axes)
    if finish.kind == "min":
        return jax.lax.pmin(value, finish.axes)
    numbers = value.astype(jnp.int32)
    if finish.kind == "and":
        return jax.lax.pmin(numbers, finish.axes).astype(value.dtype)
    return jax.lax.pmax(numbers, finish.axes).astype(value.dtype)
