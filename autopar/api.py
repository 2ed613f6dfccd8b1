"""What users hold: `parallelize`, `make_plan`, `load_plan` and the plan they return."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from autopar.cluster import Cluster
from autopar.errors import ArgumentError, ClusterError, PlanError, TransformError
from autopar.guard import refuse_transforms, traced_leaves
from autopar.lower.from_plan import program_of
from autopar.lower.spmd import spmd_function
from autopar.methods import METHODS, Auto, Method, PipeshardParallel, ShardParallel
from autopar.plan.pipeline import PipelinePlan
from autopar.plan.pipeline_json import KEY, pipeline_from_json
from autopar.plan.plan import FrozenPlan
from autopar.plan.serialize import plan_from_json, read_object
from autopar.plans import Plan, Traced, trace
from autopar.runtime.local import LocalProgram, local_devices
from autopar.staged import StagedPlan
from autopar.trace.jaxpr import Leaf, ensure_jitted


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file, of either kind.

    Raises:
        PlanError: missing, damaged, or of another version.
    """
    data = read_object(path)
    if KEY in data:
        return StagedPlan(pipeline_from_json(data, file=str(path)))
    return Plan(plan_from_json(data, file=str(path)))


@dataclass(frozen=True, slots=True)
class Options:
    """How `parallelize` was asked to work; see there."""

    cluster: Cluster | None
    method: Method
    batch_argnums: tuple[int, ...]
    batch_argnames: tuple[str, ...]
    batch_dims: int | Mapping[int | str, int]
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
            dims = options.batch_dims
            dim = dims if isinstance(dims, int) else dims.get(leaf.argument, 0)
            if dim >= len(leaf.aval.shape):
                raise ArgumentError(f"{leaf.name} has no dim {dim}", got=str(leaf.aval.shape))
            found[position] = dim
    return found


def _staged_method(method: Method, cluster: Cluster) -> PipeshardParallel | ShardParallel | None:
    """The method of a step that runs in micro-batches or on workers; None for one SPMD program."""
    if isinstance(method, Auto) and (method.num_micro_batches or 1) > 1:
        count = method.num_micro_batches or 1
        method = ShardParallel(None, count, "auto", method.memory_bytes, method.time_limit)
    if isinstance(method, PipeshardParallel):
        return method
    if isinstance(method, ShardParallel) and method.num_micro_batches > 1:
        return method
    if cluster.kind == "ray" and cluster.size == cluster.shape[-1]:
        # One host: one stage, in one worker.
        if isinstance(method, Auto):
            return ShardParallel(memory_bytes=method.memory_bytes, time_limit=method.time_limit)
        if isinstance(method, ShardParallel):
            return method
    return None


def _solve(traced: Traced, options: Options, progress: Callable[[str], None]) -> Plan:
    cluster = _as_cluster(options.cluster)
    batch = batch_leaves(traced.function.inputs, options)
    staged = _staged_method(options.method, cluster)
    # Loaded here, by name, so that saved plans run without the solver.
    if staged is not None:
        pipelines = importlib.import_module("autopar.solver.inter.pipeline")
        frozen = pipelines.solve_pipeline(
            traced.graph, traced.rules, cluster, staged, batch=batch, progress=progress
        )
        return StagedPlan(frozen, traced)
    solver = importlib.import_module("autopar.solver.solve")
    return Plan(
        solver.solve(
            traced.graph, traced.rules, cluster, options.method, batch=batch, progress=progress
        ),
        traced,
    )


@dataclass
class _Whole:
    """One SPMD program for one set of shapes and static arguments."""

    frozen: FrozenPlan
    traced: Traced
    plan: Plan = field(init=False)

    def __post_init__(self) -> None:
        self.plan = Plan(self.frozen, self.traced)
        self.program = program_of(self.frozen, self.traced.graph, self.traced.rules)

    @functools.cached_property
    def local(self) -> LocalProgram:
        """The program on this process's devices; made at the first run."""
        cluster = self.frozen.cluster
        if cluster.kind == "ray":
            raise ClusterError(
                "a plan that is one program for all devices does not run on Ray workers yet",
                got=str(cluster),
                why="each worker runs the stages of a pipeline on its own devices",
                remedy="PipeshardParallel(...), or cluster=Cluster.local()",
            )
        devices = local_devices(self.program.mesh.size, cluster.device_ids)
        return LocalProgram(self.program, self.traced.rules, devices, self.traced.built.hidden)

    def inline(self, leaves: Sequence[Any]) -> Any:
        """The results as part of the program that is being traced."""
        body = spmd_function(self.program, self.traced.rules, self.local.mesh)
        guarded = refuse_transforms(body, self.traced.function.name)
        return guarded(*leaves, *self.traced.built.hidden)


@dataclass
class _Staged:
    """A pipeline for one set of shapes and static arguments."""

    frozen: PipelinePlan
    traced: Traced
    plan: StagedPlan = field(init=False)

    def __post_init__(self) -> None:
        self.plan = StagedPlan(self.frozen, self.traced)

    @functools.cached_property
    def local(self) -> Any:
        """Its workers, compiled and connected (a PipelineProgram); made at the first run."""
        # Loaded here, by name: most programs need none of it.
        return importlib.import_module("autopar.pipelined").PipelineProgram(
            self.frozen, self.traced
        )

    def inline(self, leaves: Sequence[Any]) -> Any:
        """Refused: several programs cannot become part of one."""
        raise TransformError(
            f"the pipeline {self.traced.function.name!r} is called inside jax.jit",
            got=f"{len(leaves)} traced arguments",
            why="a step in micro-batches or stages is several programs that workers run",
            remedy="call it outside of jit, or use ShardParallel() without micro-batches",
        )


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
        self._entries: dict[Hashable, _Whole | _Staged] = {}
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
        return trace(self._function, args, kwargs, state_argnums=state, plan=plan)

    def _entry(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Whole | _Staged:
        traced = self._trace(args, kwargs)
        key = self._flatten(args, kwargs)[1]
        if key not in self._entries:
            plan = self._plan or _solve(traced, self._options, lambda text: None)
            self._entries[key] = (
                _Staged(plan.frozen, traced)
                if isinstance(plan, StagedPlan)
                else _Whole(plan.frozen, traced)
            )
        return self._entries[key]

    def _inline(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Become part of the program that is being traced around the call."""
        entry = self._entry(args, kwargs)
        results = entry.inline(self._flatten(args, kwargs)[0])
        return jax.tree.unflatten(entry.traced.function.out_tree, results)

    def runtime(self, *args: Any, **kwargs: Any) -> Any:
        """What runs a pipeline (runtime.pipeline.LocalPipeline or the Ray runtime); starts it.

        Raises:
            PlanError: the plan for these arguments is one program, which has no workers.
        """
        entry = self._entry(args, kwargs)
        if not isinstance(entry, _Staged):
            raise PlanError("this plan is one program: there are no workers")
        return entry.local.runtime

    def close(self) -> None:
        """End the workers that were started for this function; it starts new ones when called."""
        for entry in self._entries.values():
            running = entry.__dict__.pop("local", None)
            if isinstance(entry, _Staged) and running is not None:
                running.close()


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


def _dims(dims: int | Mapping[int | str, int]) -> int | Mapping[int | str, int]:
    for dim in [dims] if isinstance(dims, int) else dims.values():
        _numbers(dim, "batch_dims")
    return dims if isinstance(dims, int) else dict(dims)


def parallelize(  # noqa: PLR0913 - keyword options of the public contract
    function: Callable[..., Any],
    *,
    cluster: Cluster | str | None = None,
    method: Method | None = None,
    plan: Plan | None = None,
    batch_argnums: Sequence[int] = (),
    batch_argnames: Sequence[str] = (),
    batch_dims: int | Mapping[int | str, int] = 0,
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
        batch_dims: the dim of those arguments that counts examples; by argument (position or
            keyword) where they differ.
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
        _dims(batch_dims),
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
    batch_dims: int | Mapping[int | str, int] = 0,
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
