"""How long a schedule takes, and what it holds in memory: a timed run without the work.

Each rank runs its actions in order, one at a time. An action starts when its rank is free and what
it needs has arrived: F of a stage the F of the stages before it (and the transfer from there), B
its own F and the B of the stages behind it. Transfers run beside the work, one at a time on each
directed pair of ranks, in the order in which they become ready. Updates follow a rank's last
action. A micro-batch's activations are held from the start of its F to the end of its B (of its W,
where the backward is cut in two).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autopar.errors import ScheduleError
from autopar.plan.schedule import COMPUTE, Action, Cell, Schedule, parts
from autopar.solver.schedules.communicate import Edges, chain

Transfer = Callable[[int, int, str], float]
"""(source stage, target stage, F or B) to seconds."""


def _free(source: int, target: int, kind: str) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds of each stage's actions.

    Attributes:
        forward, backward: F and B of one micro-batch, by stage.
        input_grad, weight_grad: I and W, where the backward is cut in two.
        update: once, after the stage's last action.
        transfer: from stage to stage.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    input_grad: tuple[float, ...] = ()
    weight_grad: tuple[float, ...] = ()
    update: tuple[float, ...] = ()
    transfer: Transfer = _free

    def of(self, action: Action) -> float:
        """Seconds of a compute action."""
        table = {
            "F": self.forward,
            "B": self.backward,
            "I": self.input_grad,
            "W": self.weight_grad,
        }
        return table[action.kind][action.stage]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device of each stage: held throughout, and by each micro-batch in flight."""

    base: tuple[float, ...]
    activation: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """One action on one rank; `update` has no action."""

    rank: int
    action: Action | None
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Move:
    """One transfer: what `source`'s action of a micro-batch sends to `target`."""

    source: int
    target: int
    kind: str
    micro: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step.

    Attributes:
        events: actions, rank by rank, in order.
        transfers: between ranks, in the order in which they start.
        makespan: seconds.
        peak_bytes: per rank; 0 where no memory was given.
        peak_live: per rank, the most activations held at once, in units of a whole stage pass.
    """

    events: tuple[Event, ...]
    transfers: tuple[Move, ...]
    makespan: float
    peak_bytes: tuple[float, ...]
    peak_live: tuple[int, ...]


def simulate(
    schedule: Schedule,
    durations: Durations,
    memory: Memory | None = None,
    edges: Edges | None = None,
) -> Timeline:
    """Run a schedule of compute actions; actions of communication are not looked at.

    Raises:
        ScheduleError: it stands still.
    """
    run = _Run(schedule, durations, edges or chain(schedule.stages))
    run.to_the_end()
    live, held = _held(schedule, run.events, memory)
    last = max((event.end for event in run.events), default=0.0)
    return Timeline(tuple(run.events), tuple(run.moves), last, held, live)


@dataclass
class _Run:
    schedule: Schedule
    durations: Durations
    edges: Edges
    events: list[Event] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    arrived: dict[tuple[str, int, int, int], float] = field(default_factory=dict)
    done: dict[tuple[str, int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queues = [_computed(row) for row in self.schedule.ranks]
        self.clock = [0.0] * len(self.queues)
        self.links: dict[tuple[int, int], float] = {}
        self.rank_of = {a.stage: rank for rank, row in enumerate(self.queues) for a in row}
        pairs = (("F", self.edges.forward), ("B", self.edges.backward))
        self.before = {
            (kind, stage): [a for a, b in edges if b == stage]
            for kind, edges in pairs
            for stage in range(self.schedule.stages)
        }
        self.after = {
            (kind, stage): [b for a, b in edges if a == stage]
            for kind, edges in pairs
            for stage in range(self.schedule.stages)
        }

    def to_the_end(self) -> None:
        at = [0] * len(self.queues)
        todo = list(range(len(self.queues)))
        while todo:
            # The rank whose next action can start first goes first: links serve in that order.
            ready = [(s, r) for r in todo if (s := self._start(self.queues[r], at[r], r)) >= 0]
            if not ready:
                waiting = ", ".join(str(self.queues[r][at[r]]) for r in todo)
                raise ScheduleError("the schedule stands still", got=f"next actions: {waiting}")
            start, rank = min(ready)
            self._do(rank, self.queues[rank][at[rank]], start)
            at[rank] += 1
            todo = [r for r in todo if at[r] < len(self.queues[r])]
        for rank, row in enumerate(self.queues):
            stages = dict.fromkeys(action.stage for action in row)
            for stage in stages if self.durations.update else ():
                end = self.clock[rank] + self.durations.update[stage]
                self.events.append(Event(rank, None, self.clock[rank], end))
                self.clock[rank] = end

    def _start(self, row: Sequence[Action], place: int, rank: int) -> float:
        """When the next action can start; negative if something it needs is not done."""
        action = row[place]
        times = [self.clock[rank]]
        kind = "F" if action.kind == "F" else "B"
        stage, micro = action.stage, action.micro
        if action.kind in ("B", "I"):
            times.append(self.done.get(("F", stage, micro), -1.0))
        if action.kind == "W":
            times.append(self.done.get(("B", stage, micro), -1.0))
        else:
            for source in self.before[kind, stage]:
                times.append(self.arrived.get((kind, source, stage, micro), -1.0))
        return -1.0 if min(times) < 0 else max(times)

    def _do(self, rank: int, action: Action, start: float) -> None:
        end = start + self.durations.of(action)
        self.events.append(Event(rank, action, start, end))
        self.clock[rank] = end
        if action.kind == "W":
            return
        kind = "F" if action.kind == "F" else "B"
        self.done[kind, action.stage, action.micro] = end
        for target in self.after[kind, action.stage]:
            arrival = end
            other = self.rank_of[target]
            if other != rank:
                begin = max(end, self.links.get((rank, other), 0.0))
                arrival = begin + self.durations.transfer(action.stage, target, kind)
                self.links[rank, other] = arrival
                self.moves.append(Move(action.stage, target, kind, action.micro, begin, arrival))
            self.arrived[kind, action.stage, target, action.micro] = arrival


def _computed(row: Sequence[Cell]) -> list[Action]:
    """The compute actions of a rank; the two of an overlap follow each other."""
    return [action for cell in row for action in parts(cell) if action.kind in COMPUTE]


def _held(
    schedule: Schedule, events: Sequence[Event], memory: Memory | None
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Most activations and most bytes at once, per rank."""
    ranks = len(schedule.ranks)
    cut = {(e.action.stage, e.action.micro) for e in events if e.action and e.action.kind == "W"}
    changes: list[list[tuple[float, int, int]]] = [[] for _ in range(ranks)]
    stages: list[dict[int, None]] = [{} for _ in range(ranks)]
    for event in events:
        if event.action is None:
            continue
        action = event.action
        stages[event.rank].setdefault(action.stage)
        if action.kind == "F":
            changes[event.rank].append((event.start, 1, action.stage))
        elif action.kind == ("W" if (action.stage, action.micro) in cut else "B"):
            changes[event.rank].append((event.end, 0, action.stage))
    live, held = [], []
    for rank in range(ranks):
        count, most = 0, 0
        size = sum(memory.base[s] for s in stages[rank]) if memory else 0.0
        peak = size
        for _, begins, stage in sorted(changes[rank], key=lambda change: change[:2]):
            sign = 1 if begins else -1
            count += sign
            size += sign * (memory.activation[stage] if memory else 0.0)
            most, peak = max(most, count), max(peak, size)
        live.append(most)
        held.append(peak)
    return tuple(live), tuple(held)
