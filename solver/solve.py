"""From (graph, cluster, method) to a frozen plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax

from autopar.cluster import Cluster
from autopar.errors import SolveError
from autopar.ir.graph import OpGraph
from autopar.ir.mesh import Mesh
from autopar.lower.program import Decisions, Program, Reshard, write_program
from autopar.methods import (
    DataParallel,
    ManualParallel,
    Method,
    ShardParallel,
    Zero2Parallel,
    Zero3Parallel,
)
from autopar.plan.boundaries import argument_boundaries, result_boundaries
from autopar.plan.fingerprint import fingerprint, signatures
from autopar.plan.plan import CostSummary, FrozenPlan, ReshardChoice, SolverReport
from autopar.rules.rule import Rule
from autopar.rules.strategy import Assignment, assignment_text
from autopar.solver.assemble import IntraModel, Restriction, assemble
from autopar.solver.cost.memory import peak_bytes
from autopar.solver.intra.problem import Limits, Solution
from autopar.solver.intra.solve import solve_problem
from autopar.solver.logical_mesh import fitting, logical_meshes
from autopar.solver.price import communication_seconds, price_list
from autopar.solver.search.data_parallel import data_parallel
from autopar.solver.search.manual import manual
from autopar.solver.search.space import Space
from autopar.solver.search.zero import zero

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """A solved logical mesh."""

    model: IntraModel
    decisions: Decisions
    solution: Solution


def space_of(method: Method, graph: OpGraph, cluster: Cluster, batch: Mapping[int, int]) -> Space:
    """The search space that a method names.

    Raises:
        ArgumentError: the logical mesh does not fit the cluster.
    """
    devices = cluster.size
    if isinstance(method, DataParallel):
        return data_parallel(graph, devices, batch)
    if isinstance(method, Zero2Parallel):
        return zero(graph, devices, batch, stage=2)
    if isinstance(method, Zero3Parallel):
        return zero(graph, devices, batch, stage=3)
    if isinstance(method, ManualParallel):
        named = method.logical_mesh
        mesh = Mesh(*zip(*named, strict=True)) if named else Mesh.of(*cluster.shape)
        return manual(graph, fitting(mesh, devices), method.specs)
    sizes = method.logical_mesh if isinstance(method, ShardParallel) else None
    return Space("shard", logical_meshes(sizes, devices))


def solve(
    graph: OpGraph,
    rules: Sequence[Rule],
    cluster: Cluster,
    method: Method,
    *,
    batch: Mapping[int, int] | None = None,
    progress: Progress = lambda text: None,
) -> FrozenPlan:
    """Find the best plan of a method.

    Args:
        graph: a verified graph.
        rules: its rules.
        cluster: hardware and prices.
        method: search space and limits.
        batch: positions of argument leaves that hold examples, with their batch dims.
        progress: told what is being worked on.

    Raises:
        SolveError: nothing is feasible, or every plan needs more memory than allowed.
    """
    start = time.perf_counter()
    space = space_of(method, graph, cluster, batch or {})
    name = method.solver if isinstance(method, ShardParallel) else "auto"
    limits = Limits(time_limit=method.time_limit / len(space.meshes))
    answers = []
    for mesh in space.meshes:
        progress(f"solving {space.name} on mesh {mesh}")
        answers.append(_answer(graph, rules, cluster, (space, mesh), (name, limits)))
    best = min(answers, key=lambda answer: answer.solution.objective)
    plan = freeze(best.model, best.decisions, best.solution, type(method).__name__)
    seconds = time.perf_counter() - start
    bound = min(answer.solution.lower_bound for answer in answers)
    plan = replace(plan, solver=_report(best.solution, bound, seconds, answers))
    return _within_memory(plan, method, cluster)


def _answer(
    graph: OpGraph,
    rules: Sequence[Rule],
    cluster: Cluster,
    where: tuple[Space, Mesh],
    how: tuple[str, Limits],
) -> Answer:
    space, mesh = where
    narrow = space.allowed
    fixed: dict[int, Assignment] = {}
    if space.base is not None:
        first = _answer(graph, rules, cluster, (space.base, mesh), how)
        split = enumerate(strategy.assignment for strategy in first.decisions.ops)
        fixed = {index: chosen for index, chosen in split if max(chosen) >= 0}
    model = assemble(
        graph,
        rules,
        cluster,
        mesh,
        restriction=Restriction(
            None if narrow is None else lambda i, options: narrow(mesh, i, options),
            space.steps,
            fixed,
        ),
    )
    solution = solve_problem(model.problem, solver=how[0], limits=how[1])
    return Answer(model, model.decode(solution.choices), solution)


def _report(
    solution: Solution, bound: float, seconds: float, answers: Sequence[Answer]
) -> SolverReport:
    objective = solution.objective
    gap = (objective - bound) / objective if objective > bound else 0.0
    notes = list(solution.notes)
    if len(answers) > 1:
        tried = ", ".join(f"{a.model.mesh}: {a.solution.objective:.4g} s" for a in answers)
        notes.append(f"logical meshes tried: {tried}")
    return SolverReport(solution.name, objective, bound, gap, seconds, tuple(notes))


def _within_memory(plan: FrozenPlan, method: Method, cluster: Cluster) -> FrozenPlan:
    asked = getattr(method, "memory_bytes", None)
    if asked is not None and plan.cost.peak_bytes > asked:
        over = plan.cost.peak_bytes - asked
        raise SolveError(
            "the fastest plan does not fit in memory",
            got=f"{plan.cost.peak_bytes:,} bytes a device, {over:,.0f} over memory_bytes",
            why="the search does not yet trade time for memory",
            remedy="Zero3Parallel(), more devices, or a smaller batch",
        )
    if plan.cost.peak_bytes > cluster.device.memory_bytes:
        note = f"needs {plan.cost.peak_bytes:,} bytes a device, more than the device has"
        return replace(plan, notes=(*plan.notes, note))
    return plan


def program_of_decisions(model: IntraModel, decisions: Decisions) -> Program:
    """The program that decisions mean."""
    return write_program(model.graph, model.mesh, decisions, model.steps)


def freeze(model: IntraModel, decisions: Decisions, solution: Solution, method: str) -> FrozenPlan:
    """The frozen plan of decisions, priced."""
    graph, rules = model.graph, model.rules
    program = program_of_decisions(model, decisions)
    lines = price_list(program, rules, model.collectives)
    return FrozenPlan(
        function=graph.name,
        jax_version=jax.__version__,
        fingerprint=fingerprint(graph),
        signatures=signatures(graph),
        cluster=model.collectives.cluster,
        mesh=model.mesh,
        method=method,
        inputs=argument_boundaries(graph, decisions.inputs),
        outputs=result_boundaries(graph, decisions.outputs),
        num_hidden=graph.num_hidden,
        strategies=tuple(
            assignment_text(rule, strategy.assignment, model.mesh)
            for rule, strategy in zip(rules, decisions.ops, strict=True)
        ),
        settled=decisions.settled,
        reshards=tuple(
            ReshardChoice(step.value, step.source, step.target, step.steps)
            for step in program.steps
            if isinstance(step, Reshard)
        ),
        collectives=lines,
        cost=CostSummary(
            model.compute_seconds(decisions),
            communication_seconds(lines),
            peak_bytes(program, rules),
        ),
        solver=_report(solution, solution.lower_bound, solution.seconds, ()),
        notes=(*graph.notes, *replicated_notes(graph, rules)),
    )


def replicated_notes(graph: OpGraph, rules: Sequence[Rule]) -> tuple[str, ...]:
    """One note per reason why ops run replicated, with the first user line."""
    found: dict[str, list[str]] = {}
    for op, rule in zip(graph.ops, rules, strict=True):
        if rule.reason:
            found.setdefault(rule.reason, []).append(op.source)
    return tuple(
        f"{len(places)} op(s) run replicated: {reason} (first at {places[0]})"
        for reason, places in found.items()
    )
