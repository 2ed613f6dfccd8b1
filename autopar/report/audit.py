"""The audit: does the compiled program communicate as planned, and not more?

Three lists are held against each other::

    plan  ==  emitted program (jaxpr)  >=  compiled program (HLO)
      each entry by its tag:               by tag, then by size:
      kind, axes, elements, times          merged, shared, hoisted and dropped ones are listed

So a fault of the emission (a collective dropped, doubled, over another axis, moved out of a loop)
and one of the compilation are told apart, and each names the user's line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.graph import Literal, Op, OpGraph
from autopar.lower.program import PlannedCollective, Program
from autopar.lower.spmd import abstract_mesh, spmd_function
from autopar.report.audit_emitted import Emitted, emitted_collectives
from autopar.report.audit_match import Finding, Wanted, asked_for, match_compiled, match_emitted
from autopar.report.compile import boundary_avals, compile_program
from autopar.report.compile_child import CompiledMemory, CompiledText
from autopar.report.hlo import HloProgram, read_hlo
from autopar.rules.rule import Rule

SHOWN = 20
"""Findings of one kind that a summary prints."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What the audit found.

    Attributes:
        extra: collectives that run and are not planned, or move more than planned.
        missing: planned collectives that do not run, for no reason that is known.
        merged: compiled collectives that carry several planned ones.
        dropped: planned ones that XLA left out or shared, with the reason.
        hoisted: planned ones that XLA runs outside of their loop, with the memory that costs.
        planned, compiled: how many collectives a step runs; of the compiled ones, instructions.
        memory: XLA's memory of one device, where it is known.
        notes: what could not be read exactly.
    """

    extra: tuple[Finding, ...]
    missing: tuple[Finding, ...]
    merged: tuple[Finding, ...]
    dropped: tuple[Finding, ...]
    hoisted: tuple[Finding, ...]
    planned: int
    compiled: int
    memory: CompiledMemory | None = None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing runs that is not planned, and nothing planned is missing."""
        return not self.extra and not self.missing

    def lines(self) -> tuple[str, ...]:
        """One line a finding, the faults first."""
        groups = (self.missing, self.extra, self.hoisted, self.dropped, self.merged)
        return tuple(str(finding) for group in groups for finding in group)

    def summary(self) -> str:
        """A few lines for people."""
        verdict = "ok" if self.ok else "NOT ok"
        head = f"audit {verdict}: {self.planned} collectives planned, {self.compiled} compiled"
        counts = [
            f"{len(group)} {name}"
            for name, group in (
                ("missing", self.missing),
                ("extra", self.extra),
                ("hoisted", self.hoisted),
                ("dropped", self.dropped),
                ("merged", self.merged),
            )
            if group
        ]
        lines = [head + (f" ({', '.join(counts)})" if counts else "")]
        for group in (self.missing, self.extra, self.hoisted, self.dropped, self.merged):
            lines += [f"  {finding}" for finding in group[:SHOWN]]
            if len(group) > SHOWN:
                lines.append(f"  ... and {len(group) - SHOWN} more {group[0].what}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def audit_program(
    program: Program,
    rules: Sequence[Rule],
    *,
    timeout: float = 600.0,
    xla_flags: Sequence[str] = (),
) -> AuditReport:
    """Emit, compile and audit a planned program; nothing runs.

    Args:
        program: what is planned.
        rules: the rules of its ops.
        timeout: seconds for the compilation.
        xla_flags: more XLA flags for it.

    Raises:
        AuditError: the program did not compile in time.
    """
    compiled = compile_program(program, rules, timeout=timeout, xla_flags=xla_flags)
    return audit_compiled(program, rules, compiled)


def audit_compiled(program: Program, rules: Sequence[Rule], compiled: CompiledText) -> AuditReport:
    """Audit a planned program that has been compiled already."""
    emitted = emitted_of(program, rules)
    hlo = read_hlo(compiled.text)
    return audit(wanted_of(program), emitted, hlo, program, memory=compiled.memory)


def audit(
    wanted: Sequence[Wanted],
    emitted: Sequence[Emitted],
    hlo: HloProgram,
    program: Program,
    *,
    memory: CompiledMemory | None = None,
) -> AuditReport:
    """Hold the three lists against each other.

    Args:
        wanted: the plan's collectives, `wanted_of(program)`.
        emitted: the emitted ones, `emitted_of(program, rules)`.
        hlo: the compiled program.
        program: gives the mesh.
        memory: passed on.
    """
    faults = match_emitted(wanted, emitted)
    asked = asked_for(wanted, emitted)
    found = (*faults, *match_compiled(asked, hlo, program.mesh))

    def of(what: str) -> tuple[Finding, ...]:
        return tuple(finding for finding in found if finding.what == what)

    return AuditReport(
        of("extra"),
        of("missing"),
        of("merged"),
        of("dropped"),
        of("hoisted"),
        sum(want.times for want in wanted),
        sum(item.times for item in hlo.collectives),
        memory,
        hlo.notes,
    )


def emitted_of(program: Program, rules: Sequence[Rule]) -> tuple[Emitted, ...]:
    """The collectives that the lowering emits for a program."""
    function = spmd_function(program, rules, abstract_mesh(program.mesh))
    return emitted_collectives(function, boundary_avals(program), program.mesh)


def wanted_of(program: Program) -> tuple[Wanted, ...]:
    """The planned collectives with the user's lines."""
    graph = program.graph
    names = {entry.value: entry.name for entry in graph.inputs}
    for operand, name in zip(graph.outputs, graph.output_names, strict=True):
        if not isinstance(operand, Literal):
            names.setdefault(operand, name)
    makers = {value: op for op in graph.ops for value in op.outputs}
    return tuple(_wanted(item, graph, names, makers) for item in program.collectives)


def _wanted(
    item: PlannedCollective, graph: OpGraph, names: Mapping[int, str], makers: Mapping[int, Op]
) -> Wanted:
    needs = graph.ops[item.op] if item.op < len(graph.ops) else makers.get(item.value)
    return Wanted(
        item.tag,
        item.kind,
        item.axes,
        item.elements,
        reduction=item.reduction,
        itemsize=item.itemsize,
        source=needs.source if needs else "",
        name=names.get(item.value) or (needs.name if needs else "result"),
    )
