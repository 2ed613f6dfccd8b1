"""The collectives of the emitted program, read from its jaxpr, before XLA sees it.

Each stands in the named scope of its plan entry, so what was emitted is held against the plan
exactly. The same walk finds which of them XLA may leave out: those whose result nobody uses, those
that move constants, and those that equal another one (found by value numbering, Cocke and
Schwartz 1970: two equations are equal if they do the same to equal operands).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import Literal, jaxprs_in_params

from autopar._compat.source import scope_of
from autopar.ir.mesh import Mesh
from autopar.ir.text import params_text

KIND_OF = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
"""JAX's collective primitives; the result of `all_gather` is the full tensor."""

REDUCTION_OF = {
    "psum": "sum",
    "psum_invariant": "sum",
    "reduce_scatter": "sum",
    "pmax": "max",
    "pmin": "min",
}
_TRIPS = {"scan": "length"}
"""Which parameter of a loop says how often its body runs."""

_VARIES = ("axis_index",)
"""Equations without operands that still differ from device to device."""

_SPREADS = ("broadcast_in_dim", "convert_element_type", "reshape", "transpose", "squeeze", "copy")
_CUTS = ("slice", "dynamic_slice", "all_gather", "all_to_all")
"""Of a splat (one number everywhere) these make a splat, wherever they cut or move it."""

TAG = re.compile(r"\bap\d+\b")


@dataclass(frozen=True, slots=True)
class Emitted:
    """One collective of the emitted program.

    Attributes:
        tag: the scope of its plan entry, or empty.
        kind: as in the plan.
        axes: mesh axes.
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
    jaxpr = jax.make_jaxpr(function)(*avals)
    return tuple(_walk(jaxpr.jaxpr, mesh, 1, ""))


@dataclass
class _Numbering:
    """Value numbers of one jaxpr: equal numbers mean equal values."""

    fresh: Any = field(default_factory=itertools.count)
    numbers: dict[Any, int] = field(default_factory=dict)
    keys: dict[object, int] = field(default_factory=dict)
    constant: set[int] = field(default_factory=set)
    splat: set[int] = field(default_factory=set)

    def of(self, atom: Any) -> int:
        if isinstance(atom, Literal):
            number = self.keyed(("literal", str(atom.aval), repr(atom.val)))
            self.constant.add(number)
            self.splat.add(number)
            return number
        if atom not in self.numbers:
            self.numbers[atom] = next(self.fresh)
        return self.numbers[atom]

    def keyed(self, key: object) -> int:
        if key not in self.keys:
            self.keys[key] = next(self.fresh)
        return self.keys[key]

    def equation(self, eqn: Any) -> tuple[object, bool]:
        """A key that equal equations share, and whether the results are constants."""
        name, inputs = str(eqn.primitive), tuple(self.of(atom) for atom in eqn.invars)
        # an unordered effect (a callback) makes each equation its own
        mark = id(eqn) if eqn.effects and name not in KIND_OF else 0
        key = (name, inputs, params_text(eqn.params), mark)
        splat = name in (*_SPREADS, *_CUTS) and inputs[0] in self.splat
        fixed = name not in _VARIES and not eqn.effects and self.constant.issuperset(inputs)
        splat = splat or (fixed and all(var.aval.shape == () for var in eqn.outvars))
        for position, var in enumerate(eqn.outvars):
            number = self.keyed((key, position))
            self.numbers[var] = number
            if fixed or splat:
                self.constant.add(number)
            if splat:
                self.splat.add(number)
        return key, fixed or splat


def _walk(jaxpr: Any, mesh: Mesh, times: int, scope: str) -> list[Emitted]:
    numbering, live = _Numbering(), _live(jaxpr)
    first: dict[object, str] = {}
    found: list[Emitted] = []
    for position, eqn in enumerate(jaxpr.eqns):
        name, own = str(eqn.primitive), scope_of(eqn.source_info)
        here = f"{scope}/{own}" if own else scope
        key, constant = numbering.equation(eqn)
        if name in KIND_OF:
            idle = "nobody uses its result" if position not in live else ""
            idle = idle or ("it moves a constant" if constant else "")
            made = _read(eqn, mesh, times, here, (idle, first.get(key, "")))
            first.setdefault(key, made[0].tag if made else "")
            found += made
            continue
        trips = int(eqn.params.get(_TRIPS.get(name, ""), 1))
        for inner in jaxprs_in_params(eqn.params):
            found += _walk(inner, mesh, times * trips, here)
    return found


def _live(jaxpr: Any) -> frozenset[int]:
    """Positions of the equations whose results reach the jaxpr's results, or that act."""
    wanted = {var for var in jaxpr.outvars if not isinstance(var, Literal)}
    live = set()
    for position in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[position]
        acts = bool(eqn.effects) and str(eqn.primitive) not in KIND_OF
        if acts or any(var in wanted for var in eqn.outvars):
            live.add(position)
            wanted.update(var for var in eqn.invars if not isinstance(var, Literal))
    return frozenset(live)


def _read(eqn: Any, mesh: Mesh, times: int, scope: str, fate: tuple[str, str]) -> list[Emitted]:
    name = str(eqn.primitive)
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    axes = tuple(axis for axis in (named if isinstance(named, tuple) else (named,)) if axis)
    tag = TAG.search(scope)
    devices = math.prod(mesh.axis_size(axis) for axis in axes)
    full = devices if KIND_OF[name] in ("all-gather", "all-to-all") else 1
    return [
        Emitted(
            tag.group() if tag else "",
            KIND_OF[name],
            axes,
            full * math.prod(atom.aval.shape),
            times,
            REDUCTION_OF.get(name, ""),
            *fate,
        )
        for atom in eqn.invars
    ]
