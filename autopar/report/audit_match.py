"""Holding collectives that run against collectives that were asked for.

`match_emitted` compares the plan with the emitted program: they must be equal, entry by entry.
`match_compiled` compares what was asked for with the compiled HLO: by tag first, then by size, and
what is compiled may be less than what was asked for, never more (the amount is elements times runs
per step). Both give findings; none of them raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autopar.ir.mesh import Mesh
from autopar.report.audit_emitted import TAG, Emitted
from autopar.report.hlo import HloCollective, HloProgram

ORDERED = ("all-gather", "reduce-scatter", "all-to-all")
"""Kinds whose result depends on the order of the devices in a group."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A collective that should run.

    Attributes:
        tag: its scope in the program, `ap12`.
        kind, axes, elements, times, reduction: as in `Emitted`.
        itemsize: bytes an element.
        source: the user's line.
        name: the op that needs it, or the argument or result that is moved.
        idle, equal: why XLA may leave it out, as in `Emitted`.
    """

    tag: str
    kind: str
    axes: tuple[str, ...]
    elements: int
    times: int = 1
    reduction: str = ""
    itemsize: int = 4
    source: str = ""
    name: str = ""
    idle: str = ""
    equal: str = ""

    def __str__(self) -> str:
        place = f"{self.source} [{self.name}]" if self.name else self.source
        return f"{self.tag} {_words(self.kind, self.axes, self.elements, self.times)} {place}"


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference.

    Attributes:
        what: `missing`, `extra`, `merged`, `dropped` or `hoisted`.
        text: one sentence.
        wanted: the plan's entry it is about; for an extra one the nearest, if there is any.
        saved_elements: elements per step that need not move; negative for an extra one.
        memory_bytes: bytes that a hoisted collective's result keeps alive through its loop.
    """

    what: str
    text: str
    wanted: Wanted | None = None
    saved_elements: int = 0
    memory_bytes: int = 0

    @property
    def source(self) -> str:
        """The user's line, or empty."""
        return self.wanted.source if self.wanted else ""

    def __str__(self) -> str:
        place = f"  ({self.wanted})" if self.wanted else ""
        return f"{self.what}: {self.text}{place}"


def _words(kind: str, axes: Sequence[str] | None, elements: int, times: int) -> str:
    over = ".".join(axes) if axes is not None else "no axes of the mesh"
    return f"{kind} over {over or 'nothing'} of {elements:,} elements x {times}"


def match_emitted(wanted: Sequence[Wanted], emitted: Sequence[Emitted]) -> tuple[Finding, ...]:
    """Everything in which the emitted program differs from the plan."""
    by_tag: dict[str, list[Emitted]] = {}
    for item in emitted:
        by_tag.setdefault(item.tag, []).append(item)
    found: list[Finding] = []
    for want in wanted:
        mine = by_tag.pop(want.tag, [])
        same = [item for item in mine if _facts(item) == _facts(want)]
        if not same:
            found.append(_not_emitted(want, mine))
        for item in mine:
            if not same or item is not same[0]:
                found.append(_extra(item, [want], "emitted"))
    for rest in by_tag.values():
        found += [_extra(item, wanted, "emitted") for item in rest]
    return tuple(found)


def _facts(item: Emitted | Wanted) -> tuple[object, ...]:
    # a conjunction of booleans runs as a minimum of 0 and 1, a disjunction as a maximum
    reduction = {"and": "min", "or": "max"}.get(item.reduction, item.reduction)
    return item.kind, item.axes, item.elements, item.times, reduction


def _not_emitted(want: Wanted, instead: Sequence[Emitted]) -> Finding:
    text = "the program does not ask for it"
    if instead:
        item = instead[0]
        text += f"; in its place stands {_words(item.kind, item.axes, item.elements, item.times)}"
        if item.times < want.times:
            text += ", moved out of a loop"
    return Finding("missing", text, want)


def _extra(item: Emitted, wanted: Sequence[Wanted], stage: str) -> Finding:
    text = f"{_words(item.kind, item.axes, item.elements, item.times)} is {stage}, not planned"
    near = _nearest(item.kind, item.elements, wanted)
    return Finding("extra", text, near, -item.elements * item.times)


def _nearest(kind: str, elements: int, wanted: Iterable[Wanted]) -> Wanted | None:
    order = sorted(wanted, key=lambda w: (w.kind != kind, abs(w.elements - elements)))
    return order[0] if order else None


@dataclass(frozen=True, slots=True)
class _Run:
    """One tensor of one compiled collective."""

    kind: str
    groups: tuple[tuple[int, ...], ...]
    elements: int
    times: int
    tags: tuple[str, ...]
    name: str
    axes: tuple[str, ...] | None

    def __str__(self) -> str:
        words = _words(self.kind, self.axes, self.elements, self.times)
        return f"{words} ({self.name}{', ' + ' '.join(self.tags) if self.tags else ''})"


def match_compiled(
    wanted: Sequence[Wanted],
    hlo: HloProgram,
    mesh: Mesh,
) -> tuple[Finding, ...]:
    """Everything in which the compiled program differs from what was asked for.

    Args:
        wanted: what was asked for.
        hlo: what one device does.
        mesh: the logical mesh; device d of the HLO is its device d.
    """
    runs = [run for item in hlo.collectives for run in _runs(item, mesh)]
    ledger = _Ledger(wanted, mesh)
    tagged = [run for run in runs if any(tag in ledger.by_tag for tag in run.tags)]
    lost = [run for run in runs if not any(tag in ledger.by_tag for tag in run.tags)]
    extra = [run for run in (*tagged, *lost) if not ledger.book(run)]
    found = [_extra_run(run, wanted) for run in extra]
    found += ledger.findings()
    found += [_merged(item, wanted) for item in hlo.collectives if len(item.members) > 1]
    return tuple(found)


def _runs(item: HloCollective, mesh: Mesh) -> list[_Run]:
    # the plan counts the full tensor of an all-to-all, HLO one device's part
    scale = len(item.groups[0]) if item.kind == "all-to-all" else 1
    axes = item.axes(mesh.names, mesh.sizes)
    return [
        _Run(
            item.kind,
            _comparable(item.kind, item.groups),
            scale * member.elements,
            item.times,
            tuple(dict.fromkeys(TAG.findall(member.op_name))),
            item.name,
            axes,
        )
        for member in item.members
    ]


def _comparable(kind: str, groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    order = groups if kind in ORDERED else [sorted(group) for group in groups]
    return tuple(sorted(tuple(group) for group in order))


class _Ledger:
    """What of each wanted collective, by position, is left to be compiled."""

    def __init__(self, wanted: Sequence[Wanted], mesh: Mesh) -> None:
        self.wanted = tuple(wanted)
        self.left = [want.elements * want.times for want in wanted]
        self.runs: list[list[_Run]] = [[] for _ in wanted]
        self.groups = [_comparable(w.kind, mesh.groups(w.axes)) for w in wanted]
        self.by_tag: dict[str, list[int]] = {}
        self.by_class: dict[str, list[int]] = {}
        self.by_size: dict[tuple[object, ...], list[int]] = {}
        for position, want in enumerate(wanted):
            self.by_tag.setdefault(want.tag, []).append(position)
            self.by_class.setdefault(want.equal or want.tag, []).append(position)
            key = (want.kind, self.groups[position], want.elements)
            self.by_size.setdefault(key, []).append(position)

    def book(self, run: _Run) -> bool:
        """Count a run against what it stands for; False if it fits nothing.

        By its tags, entries of equal size first; by size alone only where XLA lost the tag.
        """
        mine = [at for tag in run.tags for at in self.by_tag.get(tag, ())]
        if not mine:
            mine = self.by_size.get((run.kind, run.groups, run.elements), [])
        mine.sort(key=lambda at: self.wanted[at].elements != run.elements)
        for at in mine:
            same = self.wanted[at].kind == run.kind and self.groups[at] == run.groups
            if same and run.elements * run.times <= self.left[at]:
                self.left[at] -= run.elements * run.times
                self.runs[at].append(run)
                return True
        return False

    def findings(self) -> list[Finding]:
        """What was compiled less than wanted."""
        found = []
        for at, want in enumerate(self.wanted):
            if not self.runs[at]:
                if len(self.groups[at][0]) > 1 and want.elements > 0:
                    found.append(self._absent(want))
            elif self.left[at] > 0:
                found.append(self._less(at))
        return found

    def _absent(self, want: Wanted) -> Finding:
        saved = want.elements * want.times
        if want.idle:
            return Finding("dropped", f"XLA left it out: {want.idle}", want, saved)
        twins = self.by_class[want.equal or want.tag]
        survivor = next((self.wanted[at].tag for at in twins if self.runs[at]), "")
        if survivor:
            text = f"XLA runs it once, together with the equal {survivor}"
            return Finding("dropped", text, want, saved)
        return Finding("missing", "the compiled program does not run it", want)

    def _less(self, at: int) -> Finding:
        want, saved = self.wanted[at], self.left[at]
        times = sum(run.times for run in self.runs[at])
        if times >= want.times:
            return Finding("dropped", "XLA moves fewer elements", want, saved)
        held = want.elements * want.itemsize
        text = f"XLA runs it {times} x in place of {want.times} x, moved out of its loop"
        return Finding("hoisted", f"{text}; {held:,} bytes stay alive", want, saved, held)


def _extra_run(run: _Run, wanted: Sequence[Wanted]) -> Finding:
    tagged = [want for want in wanted if want.tag in run.tags]
    near = _nearest(run.kind, run.elements, tagged or wanted)
    text = f"{run} is compiled, not planned"
    return Finding("extra", text, near, -run.elements * run.times)


def _merged(item: HloCollective, wanted: Sequence[Wanted]) -> Finding:
    tags = list(dict.fromkeys(tag for m in item.members for tag in TAG.findall(m.op_name)))
    first = next((want for want in wanted if want.tag in tags), None)
    count = len(item.members)
    text = f"{item.name} carries {count} {item.kind}s, {count - 1} starts fewer: {' '.join(tags)}"
    return Finding("merged", text, first)


def asked_for(wanted: Sequence[Wanted], emitted: Sequence[Emitted]) -> tuple[Wanted, ...]:
    """What the emitted program asks XLA for, with the plan's lines where a tag gives them."""
    lines = {want.tag: want for want in wanted}
    return tuple(
        replace(
            lines.get(item.tag, Wanted(item.tag, item.kind, item.axes, item.elements)),
            kind=item.kind,
            axes=item.axes,
            elements=item.elements,
            times=item.times,
            reduction=item.reduction,
            idle=item.idle,
            equal=item.equal,
        )
        for item in emitted
    )
