"""What users hold of a plan: the frozen decisions together with the function they are for."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec

from autopar.errors import PlanError
from autopar.ir.graph import OpGraph
from autopar.ir.mesh import Mesh
from autopar.lower.from_plan import program_of
from autopar.lower.program import Program
from autopar.lower.spmd import partition_spec
from autopar.plan.pipeline import PipelinePlan
from autopar.plan.plan import CostSummary, FrozenPlan, PricedCollective, SolverReport
from autopar.plan.serialize import save_plan
from autopar.rules.registry import rules_of
from autopar.rules.rule import Rule
from autopar.trace.build import BuiltGraph, build_graph
from autopar.trace.jaxpr import TracedFunction, trace_function

if TYPE_CHECKING:
    from autopar.report.audit import AuditReport
    from autopar.report.check import CheckReport

COMPILE_SECONDS = 600.0
"""How long an audit waits for the compiler."""


def report_room(room: str) -> Any:
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


def _ties_of(plan: FrozenPlan | PipelinePlan, traced: TracedFunction) -> list[int] | None:
    """The plan's ties if its arguments are those of the function; else it is refused later."""
    leaves = plan.inputs[: len(plan.inputs) - plan.num_hidden]
    then = [(leaf.name, leaf.shape) for leaf in leaves]
    now = [(leaf.name, tuple(leaf.aval.shape)) for leaf in traced.inputs]
    shapes = [tuple(leaf.aval.shape) for leaf in traced.outputs]
    fits = all(e.tied < 0 or shapes[e.tied : e.tied + 1] == [e.shape] for e in leaves)
    return [leaf.tied for leaf in leaves] if then == now and fits else None


def trace(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    state_argnums: Sequence[int] | None = None,
    plan: FrozenPlan | PipelinePlan | None = None,
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
        text: str = report_room("summary").plan_summary(self.frozen, width=width)
        return text

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        save_plan(self.frozen, path)

    def bind(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
        """The plan together with the function it is for.

        Raises:
            PlanError: it is the plan of another function.
        """
        traced = trace(function, args, kwargs, plan=self.frozen)
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
        compiled = report_room("compile").compile_program(program, traced.rules, timeout=timeout)
        report = report_room("audit").audit_compiled(program, traced.rules, compiled)
        jaxpr = traced.function.jaxpr
        share = report_room("share").share_of(compiled.text, program, jaxpr, timeout=timeout)
        return report, share

    def audit(self, *, timeout: float = COMPILE_SECONDS) -> AuditReport:
        """Compile for as many virtual devices in a child process; hold compiled against planned."""
        rules = self._bound().rules
        report: AuditReport = report_room("audit").audit_program(
            self.program(), rules, timeout=timeout
        )
        return report

    def parallel_share(self, *, timeout: float = COMPILE_SECONDS) -> float:
        """FLOPs of the one-device program over n times those of one device of this plan."""
        traced = self._bound()
        jaxpr = traced.function.jaxpr
        share: float = report_room("share").parallel_share(
            self.program(), traced.rules, jaxpr, timeout=timeout
        )
        return share

    def check(self) -> CheckReport:
        """Recompute objective, memory and feasibility without the solver's code."""
        traced = self._bound()
        report: CheckReport = report_room("check").check_plan(
            self.frozen, traced.graph, traced.rules
        )
        return report
