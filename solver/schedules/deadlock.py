"""Can the lists of a schedule with communication be followed, whatever the channels are like?

| model            | when a send or receive ends                                                 |
|------------------|-----------------------------------------------------------------------------|
| rendezvous       | both sides stand at their ends of the transfer: everything blocks            |
| one stream       | posted in order on one stream a rank; a transfer starts when both are at head |
| stream a pair    | the same with one stream for each pair of ranks                             |
| stream a direction | the same with one stream for each ordered pair                            |
| buffered         | sends end at once and are matched by tag                                    |

With streams, a rank goes on after posting; it waits only where an action needs what was received.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from autopar.errors import ScheduleError
from autopar.plan.schedule import Action, Schedule, parts

Message = tuple[int, int, str, int]
"""(source stage, target stage, F or B, micro-batch)."""


class Channels(Enum):
    """How sends and receives wait for each other."""

    RENDEZVOUS = "rendezvous"
    ONE_STREAM = "one stream"
    STREAM_A_PAIR = "a stream a pair"
    STREAM_A_DIRECTION = "a stream a direction"
    BUFFERED = "buffered"


def check_no_deadlock(schedule: Schedule, channels: Channels) -> None:
    """Follow the lists of a schedule with communication to their ends, moving no data.

    Raises:
        ScheduleError: they stand still; says who waits for what.
    """
    run = _Run(schedule, channels)
    run.to_the_end()


def message_of(action: Action) -> Message:
    """The transfer of a send or receive."""
    kind = action.kind[-1]
    if action.kind.startswith("SEND"):
        return (action.stage, action.peer, kind, action.micro)
    return (action.peer, action.stage, kind, action.micro)


class _Run:
    def __init__(self, schedule: Schedule, channels: Channels) -> None:
        self.channels = channels
        self.rank_of = schedule.placement
        self.rows = [[a for cell in row for a in parts(cell)] for row in schedule.ranks]
        self.at = [0] * len(self.rows)
        self.done: set[Message] = set()
        self.sent: set[Message] = set()
        self.queues: dict[tuple[int, ...], list[Message]] = {}
        self.needs = _needs(self.rows)
        self.step: Callable[[int, Action], bool] = {
            Channels.RENDEZVOUS: self._rendezvous,
            Channels.BUFFERED: self._buffered,
        }.get(channels, self._posted)

    def to_the_end(self) -> None:
        moved = True
        while moved:
            moved = self._start_transfers()
            for rank, row in enumerate(self.rows):
                while self.at[rank] < len(row) and self._may(rank, row[self.at[rank]]):
                    self.at[rank] += 1
                    moved = True
        waiting = [
            f"rank {rank} at {row[self.at[rank]]}"
            for rank, row in enumerate(self.rows)
            if self.at[rank] < len(row)
        ]
        if waiting:
            raise ScheduleError(
                "the ranks would wait for each other for ever",
                got=", ".join(waiting),
                why=f"with {self.channels.value} channels",
                remedy="append each receive when its send is scheduled (communicate does)",
            )

    def _may(self, rank: int, action: Action) -> bool:
        if action.kind.startswith(("SEND", "RECV")):
            return self.step(rank, action)
        key = (action.stage, "F" if action.kind == "F" else "B", action.micro)
        return all(message in self.done for message in self.needs.get(key, ()))

    def _rendezvous(self, rank: int, action: Action) -> bool:
        message = message_of(action)
        if message in self.done:
            return True
        peer = self.rank_of[action.peer]
        if self.at[peer] == len(self.rows[peer]):
            return False
        theirs = self.rows[peer][self.at[peer]]
        meets = theirs.kind.startswith(("SEND", "RECV")) and message_of(theirs) == message
        if meets:
            self.done.add(message)
        return meets

    def _buffered(self, rank: int, action: Action) -> bool:
        message = message_of(action)
        if action.kind.startswith("SEND"):
            self.done.add(message)
            return True
        return message in self.done

    def _posted(self, rank: int, action: Action) -> bool:
        message = message_of(action)
        self.queues.setdefault(self._stream(rank, message), []).append(message)
        return True

    def _stream(self, rank: int, message: Message) -> tuple[int, ...]:
        ends = (self.rank_of[message[0]], self.rank_of[message[1]])
        if self.channels is Channels.ONE_STREAM:
            return (rank,)
        if self.channels is Channels.STREAM_A_PAIR:
            return (rank, *sorted(ends))
        return (rank, *ends)

    def _start_transfers(self) -> bool:
        """Transfers that are at the head of the streams of both of their ends happen."""
        moved = False
        for queue in self.queues.values():
            while queue and self._at_both_heads(queue[0]):
                message = queue[0]
                self.done.add(message)
                for rank in {self.rank_of[message[0]], self.rank_of[message[1]]}:
                    self.queues[self._stream(rank, message)].remove(message)
                moved = True
        return moved

    def _at_both_heads(self, message: Message) -> bool:
        streams = [self._stream(self.rank_of[end], message) for end in message[:2]]
        heads = [self.queues.get(stream, [])[:1] for stream in streams]
        return all(head == [message] for head in heads)


def _needs(rows: list[list[Action]]) -> dict[tuple[int, str, int], list[Message]]:
    """Per (stage, F or B, micro-batch), what must have been received before."""
    found: dict[tuple[int, str, int], list[Message]] = {}
    for row in rows:
        for action in row:
            if action.kind.startswith("RECV"):
                key = (action.stage, action.kind[-1], action.micro)
                found.setdefault(key, []).append(message_of(action))
    return found
