"""The collectives of the emitted program, read from its jaxpr, before XLA sees it.

Each stands in the named scope of its plan entry, so what was emitted is held against the plan
exactly. The same walk finds which of them XLA may leave out: those whose result nobody uses, those
that move constants, and those that equal an earlier one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxprs_in_params

from autopar._compat.source import scope_of
from autopar.ir.mesh import Mesh
from autopar.report.audit_values import COLLECTIVE_KINDS, Numbering, live_equations

REDUCTION_OF = {
    "psum": "sum",
    "psum_invariant": "sum",
    "reduce_scatter": "sum",
    "pmax": "max",
    "pmin": "min",
}
"""What JAX's reducing collectives reduce with."""

TAG = re.compile(r"\bap\d+\b")

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}
"""Calls that run their jaxpr once, on their operands."""

_TRIPS = {"scan": "length"}
"""Which parameter of a loop says how often its body runs."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """One collective of the emitted program.

    Attributes:
        tag: the scope of its plan entry, or empty.
        kind: as in the plan.
        axes: mesh axes, major to minor.
        elements: of the full tensor on those axes, as in the plan.
        times: how often a step runs it.
        reduction: `sum`, `max`, `min`, or empty.
        idle: why XLA may leave it out: nobody uses it, or it moves a constant; else empty.
        equal: the tag of an earlier collective that does the same, or empty.
    """

    tag: str
    kind: str
    axes: tuple[str, ...]
    elements: int
    times: int = 1
    reduction: str = ""
    idle: str = ""
    equal: str = ""


def emitted_collectives(
    function: Callable[..., Any], avals: Sequence[jax.ShapeDtypeStruct], mesh: Mesh
) -> tuple[Emitted, ...]:
    """All collectives of `function`, in execution order.

    A loop body's collectives run once per trip (once, where the number of trips is not known);
    those of each branch of a conditional count once.

    Args:
        function: the emitted program on global arrays (`lower.spmd.spmd_function`).
        avals: its arguments.
        mesh: the logical mesh.
    """
    walk = _Walk(mesh, [])
    walk.body(jax.make_jaxpr(function)(*avals).jaxpr, 1, "")
    return tuple(walk.found)


@dataclass
class _Walk:
    mesh: Mesh
    found: list[Emitted]
    first: dict[object, str] = field(default_factory=dict)

    def body(self, jaxpr: Any, times: int, scope: str) -> None:
        """A jaxpr that shares no values with its caller: the whole program, a loop's body."""
        outer, self.first = self.first, {}
        self.equations(jaxpr, Numbering(), (times, scope))
        self.first = outer

    def equations(self, jaxpr: Any, numbering: Numbering, where: tuple[int, str]) -> None:
        times, scope = where
        live = live_equations(jaxpr)
        for position, eqn in enumerate(jaxpr.eqns):
            name, own = str(eqn.primitive), scope_of(eqn.source_info)
            here = f"{scope}/{own}" if own else scope
            called = eqn.params.get(_CALLS.get(name, ""))
            if called is not None:
                inner = called.jaxpr if isinstance(called, ClosedJaxpr) else called
                numbering.enter(inner.invars, eqn.invars)
                self.equations(inner, numbering, (times, here))
                numbering.leave(eqn.outvars, inner.outvars)
                continue
            key, constant = numbering.equation(eqn)
            if name in COLLECTIVE_KINDS:
                idle = "it moves a constant" if constant else ""
                idle = idle if position in live else "nobody uses its result"
                self._collective(eqn, (times, here), idle, key)
                continue
            trips = int(eqn.params.get(_TRIPS.get(name, ""), 1))
            for inner in jaxprs_in_params(eqn.params):
                self.body(inner, times * trips, here)

    def _collective(self, eqn: Any, where: tuple[int, str], idle: str, key: object) -> None:
        times, scope = where
        name = str(eqn.primitive)
        kind = COLLECTIVE_KINDS[name]
        named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        axes = tuple(named) if isinstance(named, tuple | list) else (named,)
        tags = TAG.findall(scope)
        tag = tags[-1] if tags else ""
        devices = math.prod(self.mesh.axis_size(axis) for axis in axes)
        full = devices if kind in ("all-gather", "all-to-all") else 1
        equal = self.first.get(key, "")
        self.first.setdefault(key, tag)
        for atom in eqn.invars:
            elements = full * math.prod(atom.aval.shape)
            reduction = REDUCTION_OF.get(name, "")
            self.found.append(Emitted(tag, kind, axes, elements, times, reduction, idle, equal))
