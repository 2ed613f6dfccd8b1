"""What users hold: `parallelize`, `make_plan`, `load_plan` and the plan they return."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

from autopar.cluster import Cluster
from autopar.errors import ArgumentError, ClusterError, PlanError
from autopar.guard import refuse_transforms, traced_leaves
from autopar.ir.graph import OpGraph
from autopar.ir.mesh import Mesh
from autopar.lower.from_plan import program_of
from autopar.lower.program import Program
from autopar.lower.spmd import partition_spec, spmd_function
from autopar.methods import METHODS, Auto, Method
from autopar.plan.plan import CostSummary, FrozenPlan, PricedCollective, SolverReport
from autopar.plan.serialize import read_plan, save_plan
from autopar.rules.registry import rules_of
from autopar.rules.rule import Rule
from autopar.runtime.local import LocalProgram, local_devices
from autopar.trace.build import BuiltGraph, build_graph
from autopar.trace.jaxpr import Leaf, TracedFunction, ensure_jitted, trace_function

if TYPE_CHECKING:
    from autopar.report.audit import AuditReport
    from autopar.report.check import CheckReport

COMPILE_SECONDS = 600.0
"""How long an audit waits for the compiler."""


def _report(room: str) -> Any:
    """A module of report/, loaded when it is first asked: running a step needs none of them."""
    return importlib.import_module(f"autopar.report.{room}")


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced function with its graph and rules."""

    function: TracedFunction
    built: BuiltGraph
    rules: tuple[Rule, ...]

    @property
    def graph(self) -> OpGraph:
        """The op graph."""
        return self.built.graph


def _ties_of(plan: FrozenPlan, traced: TracedFunction) -> list[int] | None:
    """The plan's ties if its arguments are those of the function; else it is refused later."""
    leaves = plan.inputs[: len(plan.inputs) - plan.num_hidden]
    then = [(leaf.name, leaf.shape) for leaf in leaves]
    now = [(leaf.name, tuple(leaf.aval.shape)) for leaf in traced.inputs]
    shapes = [tuple(leaf.aval.shape) for leaf in traced.outputs]
    fits = all(e.tied < 0 or shapes[e.tied : e.tied + 1] == [e.shape] for e in leaves)
    return [leaf.tied for leaf in leaves] if then == now and fits else None


def _trace(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    state_argnums: Sequence[int] | None = None,
    plan: FrozenPlan | None = None,
) -> Traced:
    """Trace and build; which results are state is the plan's word where there is a plan."""
    traced = trace_function(function, args, kwargs)
    ties = None if plan is None else _ties_of(plan, traced)
    built = build_graph(traced, state_argnums=state_argnums, ties=ties)
    return Traced(traced, built, rules_of(built.graph))


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan, and the function it is for if it is known.

    Attributes:
        frozen: the decisions.
        traced: the function; None for a plan that was only loaded (see `bind`).
    """

    frozen: FrozenPlan
    traced: Traced | None = None

    @property
    def cost(self) -> CostSummary:
        """Predicted seconds and bytes of a step, per device."""
        return self.frozen.cost

    @property
    def solver(self) -> SolverReport:
        """How the plan was found, and how good it is known to be."""
        return self.frozen.solver

    @property
    def mesh(self) -> Mesh:
        """The logical mesh."""
        return self.frozen.mesh

    @property
    def collectives(self) -> tuple[PricedCollective, ...]:
        """What will run: kind, axes, bytes, times a step, seconds, source line, name."""
        return self.frozen.collectives

    def partition_specs(self) -> tuple[dict[str, PartitionSpec], dict[str, PartitionSpec]]:
        """PartitionSpecs of the arguments and of the results, by path."""
        sides = (self.frozen.inputs, self.frozen.outputs)
        made = [{leaf.name: partition_spec(leaf.sharding) for leaf in side} for side in sides]
        return made[0], made[1]

    def summary(self, *, width: int = 100) -> str:
        """The plan as text, to be read by people."""
        text: str = _report("summary").plan_summary(self.frozen, width=width)
        return text

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        save_plan(self.frozen, path)

    def bind(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
        """The plan together with the function it is for.

        Raises:
            PlanError: it is the plan of another function.
        """
        traced = _trace(function, args, kwargs, plan=self.frozen)
        program_of(self.frozen, traced.graph, traced.rules)
        return Plan(self.frozen, traced)

    def _bound(self) -> Traced:
        if self.traced is None:
            raise PlanError(
                "this plan was loaded without its function",
                why="a plan file holds decisions, no program",
                remedy="plan.bind(step, *args) first; arguments may be ShapeDtypeStructs",
            )
        return self.traced

    def program(self) -> Program:
        """What will run, step by step."""
        traced = self._bound()
        return program_of(self.frozen, traced.graph, traced.rules)

    def verify(self, *, timeout: float = COMPILE_SECONDS) -> tuple[AuditReport, float]:
        """The audit and the parallel share from one compilation of the planned program."""
        program, traced = self.program(), self._bound()
        compiled = _report("compile").compile_program(program, traced.rules, timeout=timeout)
        report = _report("audit").audit_compiled(program, traced.rules, compiled)
        jaxpr = traced.function.jaxpr
        share = _report("share").share_of(compiled.text, program, jaxpr, timeout=timeout)
        return report, share

    def audit(self, *, timeout: float = COMPILE_SECONDS) -> AuditReport:
        """Compile for as many virtual devices in a child process; hold compiled against planned."""
        rules = self._bound().rules
        report: AuditReport = _report("audit").audit_program(self.program(), rules, timeout=timeout)
        return report

    def parallel_share(self, *, timeout: float = COMPILE_SECONDS) -> float:
        """FLOPs of the one-device program over n times those of one device of this plan."""
        traced = self._bound()
        jaxpr = traced.function.jaxpr
        share: float = _report("share").parallel_share(
            self.program(), traced.rules, jaxpr, timeout=timeout
        )
        return share

    def check(self) -> CheckReport:
        """Recompute objective, memory and feasibility without the solver's code."""
        traced = self._bound()
        report: CheckReport = _report("check").check_plan(self.frozen, traced.graph, traced.rules)
        return report


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file.

    Raises:
        PlanError: missing, damaged, or of another version.
    """
    return Plan(read_plan(path))


@dataclass(frozen=True, slots=True)
class Options:
    """How `parallelize` was asked to work; see there."""

    cluster: Cluster | None
    method: Method
    batch_argnums: tuple[int, ...]
    batch_argnames: tuple[str, ...]
    batch_dims: int
    state_argnums: tuple[int, ...] | None


def _as_cluster(cluster: Cluster | str | None) -> Cluster:
    if cluster is None:
        return Cluster.local()
    return Cluster.parse(cluster) if isinstance(cluster, str) else cluster


def batch_leaves(leaves: Sequence[Leaf], options: Options) -> dict[int, int]:
    """Positions of the argument leaves that hold examples, each with its batch dim.

    Raises:
        ArgumentError: an argument is missing, or a leaf has no such dim.
    """
    wanted: tuple[Hashable, ...] = (*options.batch_argnums, *options.batch_argnames)
    known = {leaf.argument for leaf in leaves}
    for argument in wanted:
        if argument not in known:
            raise ArgumentError(
                "a batch argument does not exist",
                got=repr(argument),
                why=f"the function is called with {sorted(map(str, known))}",
                remedy="name positions in batch_argnums and keywords in batch_argnames",
            )
    found = {}
    for position, leaf in enumerate(leaves):
        if leaf.argument in wanted and leaf.aval.shape:
            if options.batch_dims >= len(leaf.aval.shape):
                raise ArgumentError(
                    f"{leaf.name} has no dim {options.batch_dims}", got=str(leaf.aval.shape)
                )
            found[position] = options.batch_dims
    return found


def _solve(traced: Traced, options: Options, progress: Callable[[str], None]) -> Plan:
    # Loaded here, by name, so that saved plans run without the solver.
    solver = importlib.import_module("autopar.solver.solve")
    frozen = solver.solve(
        traced.graph,
        traced.rules,
        _as_cluster(options.cluster),
        options.method,
        batch=batch_leaves(traced.function.inputs, options),
        progress=progress,
    )
    return Plan(frozen, traced)


class _Specialised:
    """A parallelised function for one set of shapes and static arguments."""

    def __init__(self, plan: FrozenPlan, traced: Traced) -> None:
        self.plan = Plan(plan, traced)
        self.traced = traced
        self.program = program_of(plan, traced.graph, traced.rules)

    @functools.cached_property
    def local(self) -> LocalProgram:
        """The program on this process's devices; made at the first run."""
        cluster = self.plan.frozen.cluster
        if cluster.kind == "ray":
            raise ClusterError(
                "plans for Ray clusters cannot be run yet",
                got=str(cluster),
                why="there is no Ray runtime in this version: such clusters can be planned for",
                remedy="cluster=Cluster.local() to run on this process's devices",
            )
        ids = cluster.device_ids if cluster.kind == "local" else ()
        devices = local_devices(self.program.mesh.size, ids)
        return LocalProgram(self.program, self.traced.rules, devices, self.traced.built.hidden)


def _form(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """What decides which arguments of a call are static: how many, and which by keyword."""
    return len(args), tuple(sorted(kwargs))


class ParallelFunction:
    """A function that runs on a cluster with the result it has on one device.

    Called like the function it was made from. The first call for a set of shapes traces, plans
    and compiles; later calls run. When traced inside `jax.jit` it becomes part of that program.
    """

    def __init__(
        self, function: Callable[..., Any], options: Options, plan: Plan | None = None
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = ensure_jitted(function)
        self._options = options
        self._plan = plan
        self._entries: dict[Hashable, _Specialised] = {}
        self._traces: dict[Hashable, Traced] = {}
        self._statics: dict[tuple[int, tuple[str, ...]], frozenset[int | str]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step, or become part of the program that is being traced."""
        leaves, key = self._flatten(args, kwargs)
        if traced_leaves(leaves, getattr(self, "__name__", "function")):
            return self._inline(args, kwargs)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entry(args, kwargs)
            # Which arguments are static is known only since the first trace.
            leaves, _ = self._flatten(args, kwargs)
        results = entry.local.run(leaves)
        return jax.tree.unflatten(entry.traced.function.out_tree, results)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or ShapeDtypeStructs); runs nothing."""
        return self._entry(args, kwargs).plan

    def place(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The arguments, put where the step wants them; static ones stay as they are.

        Returns the positional arguments; with keywords, `(args, kwargs)`.
        """
        entry = self._entry(args, kwargs)
        placed = entry.local.place(self._flatten(args, kwargs)[0])
        dynamic_args, dynamic_kwargs = jax.tree.unflatten(entry.traced.function.in_tree, placed)
        rest = iter(dynamic_args)
        static = self._static(args, kwargs)
        whole = tuple(a if i in static else next(rest) for i, a in enumerate(args))
        return (whole, {**kwargs, **dynamic_kwargs}) if kwargs else whole

    def _static(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[int | str]:
        """Static positions and keywords: the form of the call decides which it is."""
        return self._statics.get(_form(args, kwargs), frozenset())

    def _dynamic(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        static = self._static(args, kwargs)
        return (
            tuple(a for i, a in enumerate(args) if i not in static),
            {k: v for k, v in kwargs.items() if k not in static},
        )

    def _flatten(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], Hashable]:
        """Array leaves of a call, and what distinguishes calls that need plans of their own."""
        leaves, tree = jax.tree.flatten(self._dynamic(args, kwargs))
        avals = tuple(
            (x.shape, x.dtype, getattr(x, "weak_type", False)) if hasattr(x, "dtype") else type(x)
            for x in leaves
        )
        static = self._static(args, kwargs)
        fixed = tuple((i, type(a), a) for i, a in enumerate(args) if i in static)
        named = tuple((k, type(v), v) for k, v in sorted(kwargs.items()) if k in static)
        return leaves, (tree, avals, fixed, named)

    def _trace(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Traced:
        if _form(args, kwargs) not in self._statics:
            traced = self._trace_anew(args, kwargs)
            self._statics[_form(args, kwargs)] = traced.function.static
            self._traces[self._flatten(args, kwargs)[1]] = traced
            return traced
        key = self._flatten(args, kwargs)[1]
        if key not in self._traces:
            self._traces[key] = self._trace_anew(args, kwargs)
        return self._traces[key]

    def _trace_anew(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Traced:
        plan = None if self._plan is None else self._plan.frozen
        state = self._options.state_argnums
        return _trace(self._function, args, kwargs, state_argnums=state, plan=plan)

    def _entry(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Specialised:
        traced = self._trace(args, kwargs)
        key = self._flatten(args, kwargs)[1]
        if key not in self._entries:
            plan = self._plan or _solve(traced, self._options, lambda text: None)
            self._entries[key] = _Specialised(plan.frozen, traced)
        return self._entries[key]

    def _inline(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Become part of the program that is being traced around the call."""
        entry = self._entry(args, kwargs)
        body = spmd_function(entry.program, entry.traced.rules, entry.local.mesh)
        leaves = self._flatten(args, kwargs)[0]
        results = refuse_transforms(body, entry.traced.function.name)(
            *leaves, *entry.traced.built.hidden
        )
        return jax.tree.unflatten(entry.traced.function.out_tree, results)


def _check_kinds(cluster: object, method: object, plan: object) -> None:
    """Refuse what is no cluster, method or plan.

    Raises:
        ArgumentError: naming the option.
    """
    given = (
        ("cluster", cluster, (Cluster, str), "Cluster.local(), or a text such as abstract:2x4"),
        ("method", method, METHODS, "an object such as autopar.Auto()"),
        ("plan", plan, (Plan,), "autopar.load_plan(path)"),
    )
    for name, value, kinds, remedy in given:
        if value is not None and not isinstance(value, kinds):
            raise ArgumentError(f"{name}= cannot be used", got=repr(value)[:80], remedy=remedy)
    if plan is not None and (method is not None or cluster is not None):
        raise ArgumentError(
            "a plan was given beside a cluster or a method",
            why="a plan says already how and for what it was made",
            remedy="leave out cluster= and method=",
        )


def _numbers(value: int | Sequence[int], name: str) -> tuple[int, ...]:
    """Argument positions: one, or several.

    Raises:
        ArgumentError: a position is no number from 0.
    """
    numbers = (value,) if isinstance(value, int) else tuple(value)
    for number in numbers:
        if not isinstance(number, int) or number < 0:
            raise ArgumentError(
                f"{name} holds something else than argument positions",
                got=repr(number),
                remedy="positions count from 0; name keywords in batch_argnames",
            )
    return numbers


def parallelize(  # noqa: PLR0913 - keyword options of the public contract
    function: Callable[..., Any],
    *,
    cluster: Cluster | str | None = None,
    method: Method | None = None,
    plan: Plan | None = None,
    batch_argnums: Sequence[int] = (),
    batch_argnames: Sequence[str] = (),
    batch_dims: int = 0,
    state_argnums: Sequence[int] | None = None,
) -> ParallelFunction:
    """Make a function run on a cluster, with the result it has on one device.

    Args:
        function: plain or `jax.jit`-ed (static and donated arguments are kept).
        cluster: where it will run, or the text of one; this process's devices by default.
        method: how to search; `Auto()` by default.
        plan: a plan made before, instead of a search.
        batch_argnums, batch_argnames: arguments that hold examples, by position and keyword; only
            methods that split the batch by name need them (arguments that are not state otherwise).
        batch_dims: the dim of those arguments that counts examples.
        state_argnums: arguments whose leaves come back as results; found by name if None.

    Raises:
        AutoparError: a kind of it, with what to do.
    """
    _check_kinds(cluster, method, plan)
    options = Options(
        None if cluster is None else _as_cluster(cluster),
        method or Auto(),
        _numbers(batch_argnums, "batch_argnums"),
        (batch_argnames,) if isinstance(batch_argnames, str) else tuple(batch_argnames),
        _numbers(batch_dims, "batch_dims")[0],
        None if state_argnums is None else _numbers(state_argnums, "state_argnums"),
    )
    return ParallelFunction(function, options, plan)


def make_plan(  # noqa: PLR0913 - keyword options of the public contract
    function: Callable[..., Any],
    *args: Any,
    cluster: Cluster | str | None = None,
    method: Method | None = None,
    batch_argnums: Sequence[int] = (),
    batch_argnames: Sequence[str] = (),
    batch_dims: int = 0,
    state_argnums: Sequence[int] | None = None,
    progress: Callable[[str], None] = lambda text: None,
    **kwargs: Any,
) -> Plan:
    """The plan of `function(*args, **kwargs)`; arguments may be ShapeDtypeStructs, nothing runs.

    Args:
        function: as for `parallelize`, like the other options.
        args, kwargs: what it will be called with.
        cluster, method, batch_argnums, batch_argnames, batch_dims, state_argnums: see there.
        progress: told what is being worked on.
    """
    step = parallelize(
        function,
        cluster=cluster,
        method=method,
        batch_argnums=batch_argnums,
        batch_argnames=batch_argnames,
        batch_dims=batch_dims,
        state_argnums=state_argnums,
    )
    traced = step._trace(args, kwargs)
    return _solve(traced, step._options, progress)
