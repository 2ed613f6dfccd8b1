"""A pipeline schedule is data: per rank, actions in order.

An action is written `<stage><TYPE><micro-batch>`: `1F3`. Types are F (forward), B (the whole
backward), I and W (its two parts: input and weight gradients), the communication of each, and
REDUCE_GRAD, UNSHARD, RESHARD, which have no micro-batch. A send or receive whose peer is not the
next stage on the chain says so: `0SEND_F3@2`. Two actions that overlap are `(0F7;7B3)OVERLAP_F_B`,
and an empty cell is a bubble. The text form is that of `torch.distributed.pipelining`, with `@peer`
added for values that skip stages.
"""

from __future__ import annotations

import csv
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import ScheduleError
from autopar.files import write_atomically

COMPUTE = ("F", "B", "I", "W")
COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
ONCE = ("REDUCE_GRAD", "UNSHARD", "RESHARD")
KINDS = (*COMPUTE, *COMMUNICATION, *ONCE)

_ACTION = re.compile(r"(?P<stage>\d+)(?P<kind>[A-Z]+(?:_[A-Z]+)?)(?P<micro>\d*)(?:@(?P<peer>\d+))?")
_OVERLAP = re.compile(r"\((?P<parts>[^()]*)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a schedule.

    Attributes:
        stage: which stage works.
        kind: one of KINDS.
        micro: micro-batch; -1 for what happens once.
        peer: of a send or receive, the other stage; else -1.
    """

    stage: int
    kind: str
    micro: int = -1
    peer: int = -1

    def __str__(self) -> str:
        micro = str(self.micro) if self.micro >= 0 else ""
        far = self.kind in COMMUNICATION and self.peer != neighbour(self.stage, self.kind)
        return f"{self.stage}{self.kind}{micro}" + (f"@{self.peer}" if far else "")


def neighbour(stage: int, kind: str) -> int:
    """The peer of a send or receive on a plain chain of stages."""
    return stage + (1 if kind in ("SEND_F", "RECV_B") else -1)


@dataclass(frozen=True, slots=True)
class Overlap:
    """A forward and a backward that run at the same time on one rank."""

    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return f"({';'.join(map(str, self.actions))})OVERLAP_F_B"


Cell = Action | Overlap | None
"""None is a bubble."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Rows of actions, one a rank.

    Attributes:
        name: for people.
        stages: their number.
        micro_batches: their number.
        ranks: per rank its cells, in order.
    """

    name: str
    stages: int
    micro_batches: int
    ranks: tuple[tuple[Cell, ...], ...]

    @property
    def placement(self) -> tuple[int, ...]:
        """Per stage the rank that runs it; -1 if none does."""
        found = [-1] * self.stages
        for rank, row in enumerate(self.ranks):
            for cell in row:
                for action in parts(cell):
                    if 0 <= action.stage < self.stages:
                        found[action.stage] = rank
        return tuple(found)

    def __str__(self) -> str:
        return grid_text(self)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write one row a rank; an empty cell is a bubble."""
        write_atomically(path, csv_text(self), kind=ScheduleError)


def parts(cell: Cell) -> tuple[Action, ...]:
    """The actions of a cell."""
    if cell is None:
        return ()
    return cell.actions if isinstance(cell, Overlap) else (cell,)


def parse_action(text: str) -> Action:
    """Read one action.

    Raises:
        ScheduleError: the text is none.
    """
    match = _ACTION.fullmatch(text.strip())
    kind = match["kind"] if match else ""
    if match is None or kind not in KINDS or bool(match["micro"]) == (kind in ONCE):
        raise ScheduleError(
            "an action cannot be read",
            got=repr(text),
            why=f"want <stage><TYPE><micro-batch>, types {', '.join(KINDS)}",
        )
    stage = int(match["stage"])
    peer = -1
    if kind in COMMUNICATION:
        peer = int(match["peer"]) if match["peer"] else neighbour(stage, kind)
    elif match["peer"]:
        raise ScheduleError("only sends and receives have a peer", got=repr(text))
    return Action(stage, kind, int(match["micro"]) if match["micro"] else -1, peer)


def parse_cell(text: str) -> Cell:
    """Read a cell: an action, an overlap, or nothing.

    Raises:
        ScheduleError: the text is none of these.
    """
    text = text.strip()
    if not text or text == ".":
        return None
    overlap = _OVERLAP.fullmatch(text)
    if overlap is None:
        return parse_action(text)
    return Overlap(tuple(parse_action(part) for part in overlap["parts"].split(";")))


# --- text and CSV --------------------------------------------------------------------------------


def grid_text(schedule: Schedule, *, mark: tuple[int, int] | None = None) -> str:
    """One line a rank, in columns; the cell at `mark` (rank, column) is pointed at."""
    rows = [[str(cell) if cell is not None else "." for cell in row] for row in schedule.ranks]
    columns = max(map(len, rows), default=0)
    widths = [max((len(row[c]) for row in rows if c < len(row)), default=1) for c in range(columns)]
    head = f"{schedule.name}: {schedule.stages} stages, {schedule.micro_batches} micro-batches"
    lines = [head]
    for rank, row in enumerate(rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append(f"rank {rank}: {' '.join(cells)}".rstrip())
        if mark is not None and mark[0] == rank:
            before = len(f"rank {rank}: ") + sum(width + 1 for width in widths[: mark[1]])
            lines.append(
                " " * before + "^" * max(1, len(row[mark[1]]) if mark[1] < len(row) else 1)
            )
    return "\n".join(lines)


def parse_grid(text: str) -> Schedule:
    """Read `grid_text` back.

    Raises:
        ScheduleError: it is no grid.
    """
    lines = [line for line in text.splitlines() if line.strip() and not set(line) <= {" ", "^"}]
    head = re.fullmatch(r"(.*): (\d+) stages, (\d+) micro-batches", lines[0]) if lines else None
    if head is None or not all(re.match(r"rank \d+:", line) for line in lines[1:]):
        raise ScheduleError("a schedule cannot be read", got=text[:80])
    rows = tuple(
        tuple(parse_cell(cell) for cell in line.partition(":")[2].split()) for line in lines[1:]
    )
    return Schedule(head[1], int(head[2]), int(head[3]), rows)


def csv_text(schedule: Schedule) -> str:
    """One row a rank."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows(cell_texts(schedule))
    return out.getvalue()


def cell_texts(schedule: Schedule) -> list[list[str]]:
    """Rows of what `parse_cell` reads; a bubble is an empty text."""
    return [["" if cell is None else str(cell) for cell in row] for row in schedule.ranks]


def parse_csv(text: str, *, name: str = "csv") -> Schedule:
    """Read `csv_text`; stages and micro-batches are counted.

    Raises:
        ScheduleError: a cell cannot be read.
    """
    rows = tuple(tuple(map(parse_cell, row)) for row in csv.reader(io.StringIO(text)))
    actions = [action for row in rows for cell in row for action in parts(cell)]
    stages = max((action.stage for action in actions), default=-1) + 1
    micro = max((action.micro for action in actions), default=-1) + 1
    return Schedule(name, stages, micro, rows)


def from_csv(path: str | os.PathLike[str], *, name: str = "") -> Schedule:
    """Read a CSV file, and check it.

    Raises:
        ScheduleError: it is missing, cannot be read, or is no valid schedule.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ScheduleError(
            "a schedule file cannot be read", where=str(path), why=str(error)
        ) from error
    made = parse_csv(text, name=name or Path(path).stem)
    validate(made)
    return made


# --- the validator -------------------------------------------------------------------------------


def validate(schedule: Schedule) -> None:
    """Check that a schedule does all work once, in an order that can be followed.

    Every stage is on one rank; each micro-batch has one F, and one B or one I and one W in that
    order (none at all for inference); no action stands twice; sends and receives match; and all
    ranks together can follow their lists, each action waiting for what it needs.

    Raises:
        ScheduleError: with the whole grid, and the place marked.
    """
    _check_cells(schedule)
    _check_counts(schedule)
    _check_order(schedule)


def _fail(schedule: Schedule, what: str, rank: int = -1, column: int = 0) -> ScheduleError:
    mark = (rank, column) if rank >= 0 else None
    return ScheduleError(what, got="\n" + grid_text(schedule, mark=mark))


def _check_cells(schedule: Schedule) -> None:
    """Ranges, places and duplicates."""
    seen: set[Action] = set()
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(schedule.ranks):
        if not any(parts(cell) for cell in row):
            raise _fail(schedule, f"rank {rank} has nothing to do", rank)
        for column, cell in enumerate(row):
            for action in parts(cell):
                problem = _cell_problem(schedule, action)
                if action in seen:
                    problem = f"{action} stands twice"
                if rank_of.setdefault(action.stage, rank) != rank:
                    problem = f"stage {action.stage} is on ranks {rank_of[action.stage]} and {rank}"
                if problem:
                    raise _fail(schedule, problem, rank, column)
                seen.add(action)


def _cell_problem(schedule: Schedule, action: Action) -> str:
    if not 0 <= action.stage < schedule.stages:
        return f"{action}: there is no stage {action.stage}"
    if action.kind not in ONCE and not 0 <= action.micro < schedule.micro_batches:
        return f"{action}: there is no micro-batch {action.micro}"
    if action.kind in COMMUNICATION and not 0 <= action.peer < schedule.stages:
        return f"{action}: there is no stage {action.peer}"
    return ""


def _check_counts(schedule: Schedule) -> None:
    """Per stage: every F, and every B or I and W."""
    found = {
        (action.stage, action.kind, action.micro)
        for row in schedule.ranks
        for cell in row
        for action in parts(cell)
    }
    inference = not any(kind in ("B", "I", "W") for _, kind, _ in found)
    for stage in range(schedule.stages):
        for micro in range(schedule.micro_batches):
            has = {kind for kind in COMPUTE if (stage, kind, micro) in found}
            if "F" not in has:
                raise _fail(schedule, f"{stage}F{micro} is missing")
            if not inference and has not in ({"F", "B"}, {"F", "I", "W"}):
                raise _fail(
                    schedule,
                    f"micro-batch {micro} of stage {stage} needs B, or I and W; it has "
                    f"{', '.join(sorted(has - {'F'})) or 'neither'}",
                )


def _check_order(schedule: Schedule) -> None:
    """Follow all lists at once; whoever waits for what never comes is marked."""
    follow = _Follow(schedule)
    at = [0] * len(schedule.ranks)
    while True:
        moved = False
        for rank, row in enumerate(schedule.ranks):
            while at[rank] < len(row) and not follow.waits_for(row[at[rank]]):
                follow.do(row[at[rank]])
                at[rank] += 1
                moved = True
        if not moved:
            break
    stuck = [rank for rank, row in enumerate(schedule.ranks) if at[rank] < len(row)]
    # The cause is where a rank waits for what it would do itself later on.
    stuck.sort(key=lambda rank: not _waits_for_itself(follow, schedule.ranks[rank], at[rank]))
    if stuck:
        rank = stuck[0]
        cell = schedule.ranks[rank][at[rank]]
        raise _fail(schedule, f"{cell} waits for {follow.waits_for(cell)} for ever", rank, at[rank])
    if follow.sent != follow.received:
        lost = sorted(str(action) for action in follow.sent ^ follow.received)
        raise _fail(schedule, f"no receive or no send for {', '.join(lost)}")


def _waits_for_itself(follow: _Follow, row: tuple[Cell, ...], place: int) -> bool:
    later = {str(action) for cell in row[place:] for action in parts(cell)}
    return follow.waits_for(row[place]) in later


class _Follow:
    """What has been done while a schedule is followed."""

    def __init__(self, schedule: Schedule) -> None:
        self.last = schedule.stages - 1
        self.rank_of = schedule.placement
        self.done: set[tuple[str, int, int]] = set()
        self.sent: set[Action] = set()
        self.received: set[Action] = set()
        self.wants: dict[tuple[str, int, int], list[Action]] = {}
        self.communicates = False
        for row in schedule.ranks:
            for cell in row:
                for action in parts(cell):
                    if action.kind in ("RECV_F", "RECV_B"):
                        self.communicates = True
                        key = (action.kind[-1], action.stage, action.micro)
                        self.wants.setdefault(key, []).append(action)

    def waits_for(self, cell: Cell) -> str:
        """What a cell still needs; empty if nothing."""
        own = {(a.kind, a.stage, a.micro) for a in parts(cell)}
        for action in parts(cell):
            for need in self._needs(action):
                if need not in self.done and need not in own:
                    kind, stage, micro = need
                    return f"{stage}{kind}{micro}"
            if action.kind.startswith("RECV") and self._counterpart(action) not in self.sent:
                return f"the send of stage {action.peer}"
            key = ("F" if action.kind == "F" else "B", action.stage, action.micro)
            if action.kind in ("F", "B", "I"):
                for recv in self.wants.get(key, []):
                    if self._counterpart(recv) not in self.received:
                        return str(recv)
        return ""

    def do(self, cell: Cell) -> None:
        """The cell has been done."""
        for action in parts(cell):
            if action.kind.startswith("SEND"):
                self.sent.add(action)
            elif action.kind.startswith("RECV"):
                self.received.add(self._counterpart(action))
            else:
                self.done.add((action.kind, action.stage, action.micro))
                if action.kind == "I":
                    self.done.add(("B", action.stage, action.micro))

    def _counterpart(self, recv: Action) -> Action:
        return Action(recv.peer, f"SEND_{recv.kind[-1]}", recv.micro, recv.stage)

    def _needs(self, action: Action) -> list[tuple[str, int, int]]:
        stage, micro = action.stage, action.micro
        if action.kind == "F":
            return self._from("F", stage - 1, action)
        if action.kind in ("B", "I"):
            return [("F", stage, micro), *self._from("B", stage + 1, action)]
        if action.kind == "W":
            return [("I", stage, micro)]
        if action.kind.startswith("SEND"):
            return [(action.kind[-1], stage, micro)]
        return []

    def _from(self, kind: str, source: int, action: Action) -> list[tuple[str, int, int]]:
        """A neighbour's action, where there is one and it comes without a receive."""
        if not 0 <= source <= self.last:
            return []
        apart = self.rank_of[source] != self.rank_of[action.stage]
        return [] if self.communicates and apart else [(kind, source, action.micro)]
