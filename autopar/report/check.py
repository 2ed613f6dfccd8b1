"""The independent checker: is a plan legal, and does it cost what it says?

From the plan and the function alone, with its own formulas and its own walk; nothing of the solver
is imported. Two sums come out of the walk. The *objective* counts, like the solver, each use of a
value by itself: what its layout costs from where the value is made (or settled), the reductions
inside ops, and compute; a result tied to an argument pays its way to the argument's layout, so
the step is priced in its steady state. What *runs* does each reshard once, and so is never dearer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.errors import AutoparError, VerifyError
from autopar.ir.graph import Literal, OpGraph
from autopar.ir.sharding import Sharding, check_sharding
from autopar.plan.fingerprint import check_fingerprint
from autopar.plan.plan import Boundary, FrozenPlan
from autopar.plan.resolve import plan_strategies
from autopar.report.check_prices import (
    Buffer,
    RingPrices,
    in_memory,
    local_bytes,
    op_seconds,
    peak_of,
)
from autopar.report.check_replay import Ran, Replay
from autopar.rules.rule import Rule

TOLERANCE = 1e-9
"""Relative: sums of the same terms in another order agree to this."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The plan's figures, computed anew.

    Attributes:
        objective: seconds as the solver counts them, every use by itself.
        communication_seconds: of what runs.
        compute_seconds: roofline seconds of all ops.
        peak_bytes: most bytes alive at once on one device.
        problems: what is illegal or differs from the plan, one sentence each.
    """

    objective: float
    communication_seconds: float
    compute_seconds: float
    peak_bytes: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the plan is legal and its figures are right."""
        return not self.problems

    def summary(self) -> str:
        """A few lines for people."""
        figures = (
            f"check {'ok' if self.ok else 'NOT ok'}: objective {self.objective:.6g} s, "
            f"communication {self.communication_seconds:.6g} s, compute "
            f"{self.compute_seconds:.6g} s, peak {self.peak_bytes:,} bytes"
        )
        return "\n".join([figures, *(f"  {problem}" for problem in self.problems)])


def check_plan(plan: FrozenPlan, graph: OpGraph, rules: Sequence[Rule]) -> CheckReport:
    """Recompute feasibility, objective, price list and memory of a plan.

    Args:
        plan: what is to be checked.
        graph: the function it was made for.
        rules: the rules of its ops.
    """
    nothing = (math.nan, math.nan, math.nan, 0)
    try:
        check_fingerprint(plan, graph)
        problems = [*_boundary_problems(plan, graph), *_settled_problems(plan, graph)]
        if problems:
            return CheckReport(*nothing, tuple(problems))
        strategies = plan_strategies(plan, graph, rules)
        prices = RingPrices(plan.cluster, plan.mesh)
    except AutoparError as error:
        where = f" ({error.where})" if error.where else ""
        return CheckReport(*nothing, (f"{error.what}{where}",))
    except ValueError as error:
        return CheckReport(*nothing, (f"the plan has too few or too many entries: {error}",))
    replay = Replay(plan, graph, prices).run(strategies)
    compute = op_seconds(graph, rules, strategies, prices)
    report = CheckReport(
        math.fsum((compute, *replay.per_use, *replay.finishes)),
        math.fsum(item.seconds for item in replay.ran),
        compute,
        _peak(plan, graph, rules, replay),
        tuple(replay.problems),
    )
    figures = (*_figure_problems(plan, report), *_price_problems(plan, replay.ran))
    return CheckReport(
        report.objective,
        report.communication_seconds,
        report.compute_seconds,
        report.peak_bytes,
        (*report.problems, *figures),
    )


def _boundary_problems(plan: FrozenPlan, graph: OpGraph) -> Iterator[str]:
    values = [(entry.name, entry.value) for entry in graph.inputs]
    sides: tuple[tuple[str, Sequence[Boundary], list[tuple[str, object]]], ...] = (
        ("argument", plan.inputs, [(name, value) for name, value in values]),
        ("result", plan.outputs, list(zip(graph.output_names, graph.outputs, strict=True))),
    )
    for side, boundaries, known in sides:
        if len(boundaries) != len(known):
            yield f"{len(boundaries)} {side}s are planned, the function has {len(known)}"
            return
        for boundary, (name, operand) in zip(boundaries, known, strict=True):
            assert isinstance(operand, int | Literal)
            now = (name, graph.shape_of(operand), str(graph.dtype_of(operand)))
            if (boundary.name, boundary.shape, boundary.dtype) != now:
                yield f"{side} {boundary.name} is planned as another array than {now}"
            if boundary.sharding.partial:
                yield f"{side} {name} has the sharding {boundary.sharding}, which is pending"
            yield from _illegal(boundary.sharding, graph.shape_of(operand), plan, f"{side} {name}")
    for entry, boundary in zip(graph.inputs, plan.inputs, strict=True):
        if (entry.tied_output, entry.donated) != (boundary.tied, boundary.donated):
            yield f"argument {entry.name} is tied or donated otherwise than in the function"
        if entry.tied_output < 0:
            continue
        result = plan.outputs[entry.tied_output]
        tied = isinstance(graph.outputs[entry.tied_output], int)
        if tied and result.sharding != boundary.sharding:
            yield (
                f"argument {entry.name} enters as {boundary.sharding}, but its next value, "
                f"result {result.name}, leaves as {result.sharding}"
            )


def _settled_problems(plan: FrozenPlan, graph: OpGraph) -> Iterator[str]:
    made = {value for op in graph.ops for value in op.outputs}
    for value, sharding in plan.settled:
        if value not in made:
            yield f"v{value} is settled, but no op makes it"
            continue
        if sharding.partial:
            yield f"v{value} is settled in {sharding}, which is pending"
        yield from _illegal(sharding, graph.values[value].shape, plan, f"settled v{value}")


def _illegal(
    sharding: Sharding, shape: tuple[int, ...], plan: FrozenPlan, where: str
) -> Iterator[str]:
    try:
        check_sharding(sharding, shape, plan.mesh)
    except VerifyError as error:
        yield f"{where}: {error.what}: {error.got}"


def _peak(plan: FrozenPlan, graph: OpGraph, rules: Sequence[Rule], replay: Replay) -> int:
    stored = in_memory(graph, rules)
    given: list[Buffer] = [
        (entry.value, boundary.sharding, 0)
        for entry, boundary in zip(graph.inputs, plan.inputs, strict=True)
    ]
    kept = {buffer for entry, buffer in zip(graph.inputs, given, strict=True) if not entry.donated}
    kept |= {
        replay.buffer(operand, boundary.sharding)
        for operand, boundary in zip(graph.outputs, plan.outputs, strict=True)
        if not isinstance(operand, Literal)
    }
    sizes: dict[Buffer, int] = {}
    for buffer in (*given, *(made for event in replay.events for made in event.makes)):
        value, layout, _ = buffer
        if value in stored:
            elements = layout.local_size(graph.values[value].shape, plan.mesh)
            sizes[buffer] = local_bytes(graph, value, elements)
    return peak_of(replay.events, sizes, frozenset(kept), given)


def _figure_problems(plan: FrozenPlan, found: CheckReport) -> Iterator[str]:
    pairs = (
        ("objective", plan.solver.objective, found.objective),
        ("communication_seconds", plan.cost.communication_seconds, found.communication_seconds),
        ("compute_seconds", plan.cost.compute_seconds, found.compute_seconds),
        ("peak_bytes", plan.cost.peak_bytes, found.peak_bytes),
    )
    for name, said, now in pairs:
        if not _equal(said, now):
            yield f"{name} is {said!r} in the plan, {now!r} when computed anew"
    bound = plan.solver.lower_bound
    if bound > plan.solver.objective and not _equal(bound, plan.solver.objective):
        yield f"lower_bound {bound!r} is above the objective {plan.solver.objective!r}"


def _price_problems(plan: FrozenPlan, ran: Sequence[Ran]) -> Iterator[str]:
    """Hold the price list against what runs; names are for people and are not compared."""
    now: Counter[tuple[object, ...]] = Counter(
        (r.kind, r.axes, r.elements, r.bytes, r.reduction, r.source) for r in ran
    )
    seconds = {(r.kind, r.axes, r.bytes): r.seconds for r in ran}
    said: Counter[tuple[object, ...]] = Counter()
    for line in plan.collectives:
        words = f"{line.kind} over {'.'.join(line.axes)} of {line.elements:,} elements"
        key = (line.kind, line.axes, line.elements, line.bytes, line.reduction, line.source)
        said[key] += line.times
        price = seconds.get((line.kind, line.axes, line.bytes))
        if price is not None and not _equal(line.seconds, price):
            yield f"{words} ({line.source}) takes {price!r} s, the plan says {line.seconds!r} s"
    for entry in dict.fromkeys((*said, *now)):
        if said[entry] != now[entry]:
            kind, axes, elements, _, _, source = entry
            assert isinstance(axes, tuple)
            words = f"{kind} over {'.'.join(axes)} of {elements:,} elements ({source})"
            yield f"{words} runs {now[entry]} x, the price list says {said[entry]} x"


def _equal(one: float, other: float) -> bool:
    return one == other or abs(one - other) <= TOLERANCE * max(abs(one), abs(other))
