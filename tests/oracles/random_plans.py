"""Plans to hold against the single device: the solver's, data parallel, and random ones.

A random plan draws one choice per root of the search space, a choice that divides more work being
likelier in proportion, and lets the followers follow. In every fourth one some followers go their
own way as well: the lowering must be right for more than a solver would search.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster
from autopar.ir.graph import OpGraph
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.lower.from_plan import program_of
from autopar.lower.program import Decisions, Program, Reshard, RunOp
from autopar.methods import ShardParallel
from autopar.rules.registry import rules_of
from autopar.rules.rule import Rule
from autopar.solver.assemble import ALL_STEPS, IntraModel, Restriction, assemble, roots_of
from autopar.solver.intra.solve import solve_problem
from autopar.solver.search.data_parallel import data_parallel
from autopar.solver.solve import program_of_decisions, solve
from autopar.trace.build import BuiltGraph, build_graph
from autopar.trace.jaxpr import trace_function
from tests.models.small_models import NAMES, small_model

SHAPES = ((8,), (2, 4), (3,), (6,))
RANDOM_PLANS = 20
DEVIATE_EVERY = 4
DEVIATING = 0.15
"""Share of the followers that choose for themselves in every `DEVIATE_EVERY`-th plan."""


@dataclass(frozen=True, slots=True)
class Case:
    """One program to run: `plan` is `solver`, `data`, or the number of a random plan."""

    model: str
    shape: tuple[int, ...]
    plan: str

    def __str__(self) -> str:
        return f"{self.model}-{'x'.join(map(str, self.shape))}-{self.plan}"


@dataclass(frozen=True, slots=True)
class Traced:
    """A small model's graph and rules."""

    built: BuiltGraph
    rules: tuple[Rule, ...]

    @property
    def graph(self) -> OpGraph:
        return self.built.graph


def cheap_network(shape: Sequence[int]) -> Cluster:
    """Communication so cheap that even small models are worth dividing."""
    return Cluster.abstract(
        shape=tuple(shape),
        alpha=(1e-9,) * len(shape),
        beta=(1e-12,) * len(shape),
        peak_flops=1e12,
        memory_bandwidth=1e12,
        memory_bytes=8e10,
    )


@functools.cache
def traced(name: str) -> Traced:
    """The small model of that name, traced."""
    model = small_model(name)
    built = build_graph(trace_function(model.step, model.args, {}))
    return Traced(built, rules_of(built.graph))


@functools.cache
def intra_model(name: str, shape: tuple[int, ...]) -> IntraModel:
    """The full search space of a small model on a mesh."""
    known = traced(name)
    return assemble(known.graph, known.rules, cheap_network(shape), Mesh.of(*shape))


def program_for(case: Case) -> Program:
    """What a case runs."""
    if case.plan == "solver":
        return _solver_program(case)
    if case.plan == "data":
        return _data_program(case)
    model = intra_model(case.model, case.shape)
    return program_of_decisions(model, random_decisions(case))


def _solver_program(case: Case) -> Program:
    known = traced(case.model)
    method = ShardParallel(logical_mesh=case.shape)
    plan = solve(known.graph, known.rules, cheap_network(case.shape), method)
    return program_of(plan, known.graph, known.rules)


def _data_program(case: Case) -> Program:
    """The batch over all axes of the mesh, which `DataParallel` itself would flatten."""
    known, mesh = traced(case.model), Mesh.of(*case.shape)
    space = data_parallel(known.graph, mesh.size, {})
    narrow = space.allowed
    assert narrow is not None
    model = assemble(
        known.graph,
        known.rules,
        cheap_network(case.shape),
        mesh,
        restriction=Restriction(
            lambda position, options: narrow(mesh, position, options), space.steps
        ),
    )
    return program_of_decisions(model, model.decode(solve_problem(model.problem).choices))


def random_decisions(case: Case) -> Decisions:
    """The decisions of a random plan; the case is the seed."""
    number = int(case.plan)
    rng = np.random.default_rng((NAMES.index(case.model), *case.shape, number))
    model = intra_model(case.model, case.shape)
    chosen = {
        root: int(rng.choice(len(weights), p=weights))
        for root, weights in _root_weights(case.model, case.shape)
    }
    own = [int(group.mapping[chosen[group.root]]) for group in model.groups]
    if number % DEVIATE_EVERY == DEVIATE_EVERY - 1:
        for node, group in enumerate(model.groups):
            if group.root != node and rng.random() < DEVIATING:
                own[node] = int(rng.integers(model.nodes.sizes[node]))
    return model.decide(own)


@functools.cache
def _root_weights(name: str, shape: tuple[int, ...]) -> tuple[tuple[int, NDArray[np.float64]], ...]:
    """Per root, the probability of each choice: in proportion to what it divides by."""
    model = intra_model(name, shape)
    nodes, mesh = model.nodes, model.mesh
    parts = [[_shards(sharding, mesh) for sharding in options] for options in nodes.inputs]
    parts += [[strategy.work for strategy in options] for options in nodes.ops]
    parts += [[_shards(sharding, mesh) for sharding in options] for options in nodes.layouts]
    rows = [(root, np.asarray(parts[root], np.float64)) for root in roots_of(model.groups)]
    return tuple((root, row / row.sum()) for root, row in rows)


def _shards(sharding: Sharding, mesh: Mesh) -> int:
    return math.prod(mesh.axis_size(axis) for axis in sharding.split_axes)


def split_share(decisions: Decisions) -> float:
    """The share of all ops, scalar ones too, that run divided."""
    return sum(strategy.work > 1 for strategy in decisions.ops) / len(decisions.ops)


def kinds_of(program: Program, rules: Sequence[Rule]) -> Iterator[str]:
    """Every kind of factor that is given an axis, and of every reshard step and finish."""
    for step in program.steps:
        if isinstance(step, Reshard):
            yield from (f"step {part.kind}" for part in step.steps)
        elif isinstance(step, RunOp):
            factors = rules[step.op].factors
            given = [factor for factor in step.strategy.assignment if factor >= 0]
            yield from (f"factor {factors[factor].kind}" for factor in given)
            yield from (f"finish {finish.kind}" for finish in step.strategy.finishes)
            if not given:
                yield "replicated"


ALL_KINDS = (
    *(f"step {kind}" for kind in ALL_STEPS),
    *(f"factor {kind}" for kind in ("pass", "sum", "max", "linear")),
    "finish max",
    "replicated",
)
"""What the models can show between them: they have no minimum, conjunction or disjunction."""


def random_cases(
    models: Sequence[str] = NAMES, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> tuple[Case, ...]:
    """All random plans of some models on some meshes."""
    return tuple(
        Case(name, shape, str(number))
        for name in models
        for shape in shapes
        for number in range(RANDOM_PLANS)
    )
