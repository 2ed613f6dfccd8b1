"""Cases for factor rules, and the check that holds a rule against its primitive."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar.ir.graph import Literal, Op, Operand, OpGraph
from autopar.ir.mesh import Mesh
from autopar.rules.registry import eqn_of, rule_of
from autopar.rules.rule import Rule
from autopar.rules.strategy import Assignment, Strategy, assignment_text, resolve
from autopar.trace.build import build_graph
from autopar.trace.jaxpr import trace_function
from tests.oracles.simulated_mesh import (
    Array,
    Blocks,
    Computation,
    evaluate,
    gather,
    random_array,
    run_rule,
    scatter,
)

MESHES = tuple(Mesh.of(*s) for s in ((2,), (3,), (2, 2), (2, 3), (4, 2), (2, 2, 2)))
DIMS = (1, 2, 3, 4, 6, 12)
MOST_ASSIGNMENTS = 3000
WIDE = np.complex128
"""Holds every inexact dtype exactly; NumPy cannot compare NaNs of bfloat16."""

Made = tuple[Callable[..., Any], tuple[Array, ...]]
Maker = Callable[[np.random.Generator], Made]


@dataclass(frozen=True, slots=True)
class Case:
    """One line of a table: a function whose trace holds the primitive under test.

    Attributes:
        primitive: its name.
        make: draws the function and its arguments.
        rtol: allowed error of float results, relative to the largest number that is summed;
            0 asks for equal bits.
        label: tells lines of the same primitive apart.
    """

    primitive: str
    make: Maker
    rtol: float = 0.0
    label: str = ""

    @property
    def id(self) -> str:
        return f"{self.primitive}-{self.label}" if self.label else self.primitive

    def rng(self, salt: int = 0) -> np.random.Generator:
        """A generator of this case's own: the same in every process."""
        return np.random.default_rng([zlib.crc32(self.id.encode()), salt])


@dataclass(frozen=True, slots=True)
class Instance:
    """One op with its operands and what it makes on one device."""

    op: Op
    rule: Rule
    computation: Computation
    operands: tuple[Array, ...]
    expected: tuple[Array, ...]


def shape_of_rank(
    rng: np.random.Generator, rank: int, *, most: int = 400, least: int = 1
) -> tuple[int, ...]:
    """Random dims from DIMS whose product stays below `most`."""
    dims: list[int] = []
    for _ in range(rank):
        room = most // int(np.prod(dims, dtype=int))
        fitting = [d for d in DIMS if least <= d <= max(room, least)]
        dims.append(int(rng.choice(fitting)))
    return tuple(dims)


def as_array(graph: OpGraph, operand: Operand, env: Mapping[int, Array]) -> Array:
    if isinstance(operand, Literal):
        return np.asarray(operand.value, operand.dtype)
    return env[operand]


def instances(
    function: Callable[..., Any], args: Sequence[Array], primitive: str
) -> list[Instance]:
    """All ops of that name in the function's graph, run on one device with `args`."""
    built = build_graph(trace_function(function, tuple(args), {}))
    graph = built.graph
    arrays = [*args, *(np.asarray(h) for h in built.hidden)]
    env = {e.value: a for e, a in zip(graph.inputs, arrays, strict=True)}
    found = []
    for op in graph.ops:
        operands = tuple(as_array(graph, o, env) for o in op.inputs)
        expected = tuple(evaluate(op.primitive, op.params, operands))
        env.update(zip(op.outputs, expected, strict=True))
        if op.name == primitive:
            eqn = eqn_of(graph, op)
            made = Computation(op.primitive, op.params, eqn.in_shapes, eqn.out_shapes)
            found.append(Instance(op, rule_of(eqn), made, operands, expected))
    return found


def valid_assignments(rule: Rule, mesh: Mesh, rng: np.random.Generator) -> list[Assignment]:
    """All assignments that resolve, or a random part of them where there are very many."""
    count = len(rule.factors) + 1
    if count ** len(mesh.names) <= MOST_ASSIGNMENTS:
        tried = list(itertools.product(range(-1, count - 1), repeat=len(mesh.names)))
    else:
        drawn = rng.integers(-1, count - 1, (MOST_ASSIGNMENTS, len(mesh.names)))
        tried = sorted({tuple(int(f) for f in row) for row in drawn})
    return [a for a in tried if resolve(rule, a, mesh) is not None]


def pick_assignments(
    rule: Rule, mesh: Mesh, rng: np.random.Generator, count: int
) -> list[Assignment]:
    """Some valid assignments, those that use many axes the likelier."""
    valid = valid_assignments(rule, mesh, rng)
    weights = np.array([1.0 + 4.0 * sum(f >= 0 for f in a) ** 2 for a in valid])
    size = min(count, len(valid))
    chosen = rng.choice(len(valid), size, replace=False, p=weights / weights.sum())
    return [valid[i] for i in chosen]


def place_operands(
    instance: Instance, strategy: Strategy, mesh: Mesh, rng: np.random.Generator
) -> list[Blocks]:
    return [
        scatter(operand, sharding, mesh, rng)
        for operand, sharding in zip(instance.operands, strategy.ins, strict=True)
    ]


def check_results(
    instance: Instance, strategy: Strategy, results: Sequence[Blocks], mesh: Mesh, rtol: float
) -> None:
    """The gathered results are the primitive's.

    Floats may differ by `rtol` times the largest number that went into the sum: what rounding
    of partial results can do.
    """
    shardings = strategy.outs
    for blocks, sharding, expected in zip(results, shardings, instance.expected, strict=True):
        actual = gather(blocks, sharding, expected.shape, mesh)
        assert actual.dtype == expected.dtype
        if not jnp.issubdtype(expected.dtype, jnp.inexact):
            np.testing.assert_array_equal(actual, expected)
            continue
        bound = _largest([expected, *blocks]) * rtol
        np.testing.assert_allclose(actual.astype(WIDE), expected.astype(WIDE), 0.0, bound)


def _largest(arrays: Sequence[Array]) -> float:
    wide = [np.abs(a.astype(WIDE)) for a in arrays if a.size]
    return max((float(np.max(w, where=np.isfinite(w), initial=0.0)) for w in wide), default=0.0)


def check_instance(
    instance: Instance, assignment: Assignment, mesh: Mesh, rng: np.random.Generator, rtol: float
) -> None:
    strategy = resolve(instance.rule, assignment, mesh)
    assert strategy is not None
    blocks = place_operands(instance, strategy, mesh, rng)
    try:
        results = run_rule(instance.rule, instance.computation, strategy, blocks, mesh)
        check_results(instance, strategy, results, mesh, rtol)
    except Exception as error:
        shapes = instance.computation.in_shapes, instance.computation.out_shapes
        error.add_note(
            f"{instance.op.name} {shapes} by {instance.rule.spec!r} as "
            f"{assignment_text(instance.rule, assignment, mesh)!r} on {mesh}: "
            f"{[str(s) for s in strategy.ins]} -> {[str(s) for s in strategy.outs]}"
        )
        raise


def check_case(case: Case, *, draws: int, picks: int) -> None:
    """`draws` random problems, each with `picks` random assignments."""
    seen = 0
    for draw in range(draws):
        rng = case.rng(draw)
        function, args = case.make(rng)
        for instance in instances(function, args, case.primitive):
            assert not instance.rule.reason, instance.rule.reason
            mesh = MESHES[int(rng.integers(len(MESHES)))]
            for assignment in pick_assignments(instance.rule, mesh, rng, picks):
                check_instance(instance, assignment, mesh, rng, case.rtol)
                seen += 1
    # JAX traces some draws to nothing (a transpose that moves no dim), but never all of them.
    assert seen, f"no draw of {case.id} holds the primitive"


def check_all_assignments(case: Case, mesh: Mesh, salt: int = 0) -> int:
    """One problem under every assignment of `mesh`; returns how many there were."""
    rng = case.rng(salt)
    function, args = case.make(rng)
    tried = 0
    for instance in instances(function, args, case.primitive):
        for assignment in valid_assignments(instance.rule, mesh, rng):
            check_instance(instance, assignment, mesh, rng, case.rtol)
            tried += 1
    return tried


def arrays(rng: np.random.Generator, dtype: Any, *shapes: tuple[int, ...]) -> tuple[Array, ...]:
    return tuple(random_array(rng, shape, dtype) for shape in shapes)
