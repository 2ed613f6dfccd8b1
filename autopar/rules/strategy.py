"""A strategy gives each mesh axis to one factor of an op's rule; resolving it says all the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.errors import VerifyError
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.rules.rule import FINISHES, DimMap, Rule

Assignment = tuple[int, ...]
"""Per mesh axis, in mesh order, the factor it is given to, or -1: replicated there."""


@dataclass(frozen=True, slots=True)
class Finish:
    """A reduction that the op does itself: `kind` in FINISHES over `axes` of result `output`."""

    output: int
    kind: str
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run one op.

    Attributes:
        assignment: what was decided.
        ins: sharding each operand must have.
        outs: sharding each result then has.
        finishes: reductions inside the op.
        work: number of devices among which the computation is divided.
    """

    assignment: Assignment
    ins: tuple[Sharding, ...]
    outs: tuple[Sharding, ...]
    finishes: tuple[Finish, ...]
    work: int


def resolve(rule: Rule, assignment: Assignment, mesh: Mesh) -> Strategy | None:
    """What `assignment` means, or None where sizes do not divide.

    A compound dim `(b c)` may be split by c's axes only if b's axes split b entirely: otherwise
    its blocks would not be contiguous.
    """
    axes_of: dict[int, tuple[str, ...]] = {}
    for axis, factor in zip(mesh.names, assignment, strict=True):
        if factor >= 0:
            axes_of[factor] = (*axes_of.get(factor, ()), axis)
    for factor, axes in axes_of.items():
        size = rule.factors[factor].size
        if size is not None and size % _product(axes, mesh):
            return None
    ins = _shardings(rule, rule.ins, axes_of, mesh)
    outs = _shardings(rule, rule.outs, axes_of, mesh)
    if ins is None or outs is None:
        return None
    return Strategy(
        assignment,
        _with_partial(rule, ins, axes_of, mesh, outputs=False),
        _with_partial(rule, outs, axes_of, mesh, outputs=True),
        _finishes(rule, axes_of),
        math.prod(
            _product(axes, mesh)
            for factor, axes in axes_of.items()
            if rule.factors[factor].size is not None
        ),
    )


def _product(axes: tuple[str, ...], mesh: Mesh) -> int:
    return math.prod(mesh.axis_size(axis) for axis in axes)


def _shardings(
    rule: Rule, maps: tuple[DimMap, ...], axes_of: dict[int, tuple[str, ...]], mesh: Mesh
) -> tuple[Sharding, ...] | None:
    made = []
    for dims in maps:
        split = []
        for factors in dims:
            axes: tuple[str, ...] = ()
            whole = False
            for factor in factors:
                own = axes_of.get(factor, ())
                if own and whole:
                    return None
                axes += own
                whole = whole or rule.factors[factor].size != _product(own, mesh)
            split.append(axes)
        made.append(Sharding(tuple(split)))
    return tuple(made)


def _with_partial(
    rule: Rule,
    shardings: tuple[Sharding, ...],
    axes_of: dict[int, tuple[str, ...]],
    mesh: Mesh,
    *,
    outputs: bool,
) -> tuple[Sharding, ...]:
    made = []
    for position, sharding in enumerate(shardings):
        partial: set[str] = set()
        for factor, axes in axes_of.items():
            entry = rule.factors[factor]
            if position in (entry.partial_out if outputs else entry.partial_in):
                partial |= set(axes)
        ordered = tuple(name for name in mesh.names if name in partial)
        made.append(Sharding(sharding.dims, ordered))
    return tuple(made)


def _finishes(rule: Rule, axes_of: dict[int, tuple[str, ...]]) -> tuple[Finish, ...]:
    made: dict[tuple[int, str], tuple[str, ...]] = {}
    for factor in sorted(axes_of):
        kind = rule.factors[factor].kind
        if kind in FINISHES:
            for output in range(len(rule.outs)):
                made[output, kind] = made.get((output, kind), ()) + axes_of[factor]
    return tuple(Finish(output, kind, axes) for (output, kind), axes in made.items())


def assignment_text(rule: Rule, assignment: Assignment, mesh: Mesh) -> str:
    """`x:b y:k`; an axis given to nothing is left out; `-` if none is given."""
    cells = [
        f"{axis}:{rule.factors[factor].name}"
        for axis, factor in zip(mesh.names, assignment, strict=True)
        if factor >= 0
    ]
    return " ".join(cells) or "-"


def parse_assignment(rule: Rule, text: str, mesh: Mesh) -> Assignment:
    """Read `assignment_text` back.

    Raises:
        VerifyError: an axis or factor is unknown.
    """
    names = {factor.name: position for position, factor in enumerate(rule.factors)}
    chosen = dict.fromkeys(mesh.names, -1)
    for cell in text.split() if text != "-" else []:
        axis, _, name = cell.partition(":")
        if axis not in chosen or name not in names:
            raise VerifyError(
                f"strategy {text!r} does not fit the rule",
                got=cell,
                why=f"axes {mesh.names}, factors {tuple(names)} in {rule.spec!r}",
            )
        chosen[axis] = names[name]
    return tuple(chosen[axis] for axis in mesh.names)
