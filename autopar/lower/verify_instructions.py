"""Static proof that the instruction lists of a step can be run.

Each list defines a buffer once, uses it only while it is there, and leaves nothing behind; tasks
get what they were compiled for; every SEND has its RECV with the same tiles; arguments and results
are complete. A second proof runs the lists under two models of the channels and finds a deadlock:
under *buffered* a SEND never waits, and under *rendezvous* both sides wait for each other, in the
order of their lists. Lists that end under rendezvous end under every weaker model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn

from autopar.errors import ScheduleError, VerifyError
from autopar.ir.sharding import check_sharding
from autopar.lower.cross_mesh import TilePlan
from autopar.lower.instruction_text import instruction_text
from autopar.lower.instructions import (
    WHOLE,
    ArgumentUse,
    BufferSpec,
    Feed,
    Fetch,
    Free,
    Mark,
    Recv,
    ResultSource,
    Run,
    Send,
    StepProgram,
    Task,
    WorkerProgram,
    Zero,
)


def is_key_type(dtype: str) -> bool:
    """Whether a result's dtype is that of random keys, such as `key<fry>`."""
    return dtype.startswith("key<")


@dataclass(slots=True)
class _Walk:
    """What is known of one worker's buffers at some point of its list."""

    step: StepProgram
    program: WorkerProgram
    specs: Mapping[str, BufferSpec]
    tasks: Mapping[str, Task]
    persistent: frozenset[str]
    lent: frozenset[str]
    defined: dict[str, int] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    fetched: set[str] = field(default_factory=set)
    position: int = -1

    def fail(self, what: str, *, got: str = "", why: str = "") -> NoReturn:
        raise VerifyError(what, where=_place(self.program, self.position), got=got, why=why)

    def define(self, buffer: str) -> None:
        if buffer not in self.specs:
            self.fail(f"buffer {buffer} has no spec")
        if buffer in self.persistent:
            self.fail(f"buffer {buffer} is defined, but exists from the start")
        if buffer in self.defined:
            self.fail(
                f"buffer {buffer} is defined twice",
                why=f"first by instruction {self.defined[buffer]}",
            )
        self.defined[buffer] = self.position

    def use(self, buffer: str) -> None:
        if buffer in self.gone:
            self.fail(f"buffer {buffer} is used after it is gone", why=self.gone[buffer])
        if buffer not in self.defined and buffer not in self.persistent:
            self.fail(f"buffer {buffer} is used before it is defined")
        if buffer in self.fetched:
            self.fail(f"buffer {buffer} is used after it became a result")

    def end(self, buffer: str, how: str) -> None:
        self.use(buffer)
        if buffer in self.persistent:
            self.fail(f"buffer {buffer} is {how}, but a constant or closed-over array stays")
        self.gone[buffer] = f"{how} by instruction {self.position}"


def _place(program: WorkerProgram, position: int) -> str:
    who = f"worker {program.rank} ({program.stage})"
    if position < 0:
        return who
    return f"{who}, instruction {position}: {instruction_text(program.instructions[position])}"


def verify_step(step: StepProgram) -> None:
    """Prove that every list can be run and that they fit each other.

    Raises:
        VerifyError: naming worker, instruction number and text of what is wrong.
    """
    if step.micro_batches < 1:
        raise VerifyError("a step has no micro-batch", got=str(step.micro_batches))
    for rank, program in enumerate(step.workers):
        _check_tables(rank, program)
        _check_list(step, program)
    _check_arguments(step)
    _check_results(step)
    _check_messages(step)


def _check_tables(rank: int, program: WorkerProgram) -> None:
    """Names, specs, constants."""
    where = _place(program, -1)
    if program.rank != rank:
        raise VerifyError("workers must stand in the order of their ranks", where=where)
    for kind, names in (
        ("buffer", [name for name, _ in program.buffers]),
        ("task", [task.name for task in program.tasks]),
        ("persistent buffer", [name for name, _ in (*program.constants, *program.hidden)]),
    ):
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise VerifyError(f"the {kind} {twice[0]} is listed twice", where=where)
    tasks = [(f"task {task.name}", (*task.inputs, *task.outputs)) for task in program.tasks]
    for what, group in [*tasks, *((f"buffer {name}", (spec,)) for name, spec in program.buffers)]:
        for spec in group:
            _check_spec(spec, program, f"{where}, {what}")
    _check_persistent(program, where)


def _check_persistent(program: WorkerProgram, where: str) -> None:
    """Constants, closed-over arrays, donations."""
    specs = program.specs()
    for name, _ in (*program.constants, *program.hidden):
        if name not in specs:
            raise VerifyError(f"the persistent buffer {name} has no spec", where=where)
    for name, _ in program.constants:
        if specs[name].shape or specs[name].dtype != "int32":
            raise VerifyError(f"the constant {name} is no int32 scalar", where=where)
    for task in program.tasks:
        if any(not 0 <= p < len(task.inputs) for p in task.donated):
            raise VerifyError(f"task {task.name} donates an input it has not", where=where)


def _check_spec(spec: BufferSpec, program: WorkerProgram, where: str) -> None:
    if spec.sharding.partial:
        raise VerifyError("a buffer has pending sums", where=where, got=str(spec))
    if is_key_type(spec.dtype):
        raise VerifyError("a buffer has a key type", where=where, got=str(spec))
    try:
        check_sharding(spec.sharding, spec.shape, program.mesh)
    except VerifyError as error:
        raise VerifyError(error.what, where=where, got=error.got) from error


# One list.


def _check_list(step: StepProgram, program: WorkerProgram) -> None:
    uses = (use for argument in step.arguments for use in argument)
    walk = _Walk(
        step,
        program,
        program.specs(),
        {task.name: task for task in program.tasks},
        frozenset(name for name, _ in (*program.constants, *program.hidden)),
        frozenset(use.buffer for use in uses if use.rank == program.rank and not use.donated),
    )
    for position, instruction in enumerate(program.instructions):
        walk.position = position
        _CHECKS[type(instruction)](walk, instruction)
    for buffer, defined in walk.defined.items():
        if buffer not in walk.gone and buffer not in walk.fetched:
            walk.position = defined
            walk.fail(
                f"buffer {buffer} is left behind",
                why="what a step makes is freed, donated or fetched by its end",
            )


def _check_run(walk: _Walk, run: Run) -> None:
    if run.task not in walk.tasks:
        walk.fail(f"there is no task {run.task}", got=f"tasks {sorted(walk.tasks)}")
    task = walk.tasks[run.task]
    for kind, buffers, specs in (
        ("inputs", run.inputs, task.inputs),
        ("outputs", run.outputs, task.outputs),
    ):
        if len(buffers) != len(specs):
            walk.fail(f"task {run.task} has {len(specs)} {kind}", got=f"{len(buffers)} buffers")
    for buffer in run.inputs:
        walk.use(buffer)
    _check_donated(walk, run, task)
    for buffer in run.outputs:
        walk.define(buffer)
    for buffer, spec in zip(
        (*run.inputs, *run.outputs), (*task.inputs, *task.outputs), strict=True
    ):
        if walk.specs[buffer] != spec:
            walk.fail(
                f"buffer {buffer} is not what task {run.task} was compiled for",
                got=str(walk.specs[buffer]),
                why=f"the task has {spec}",
            )


def _check_donated(walk: _Walk, run: Run, task: Task) -> None:
    for position in task.donated:
        buffer = run.inputs[position]
        if run.inputs.count(buffer) > 1:
            walk.fail(f"buffer {buffer} is donated and is another input too")
        if buffer in walk.lent:
            walk.fail(f"buffer {buffer} is donated, but its argument is the caller's to keep")
        walk.end(buffer, "donated")


def _check_move(walk: _Walk, move: Send | Recv) -> None:
    if isinstance(move, Send):
        walk.use(move.buffer)
    else:
        walk.define(move.buffer)
    program, spec = walk.program, walk.specs[move.buffer]
    if not 0 <= move.peer < len(walk.step.workers) or move.peer == program.rank:
        walk.fail(f"worker {move.peer} is no peer", got=f"{len(walk.step.workers)} workers")
    if not 0 <= move.transfer < len(program.transfers):
        walk.fail(f"there is no transfer {move.transfer}")
    if move.tag < 0:
        walk.fail("a tag is negative", got=str(move.tag))
    plan = program.transfers[move.transfer]
    mesh, sharding = (
        (plan.source_mesh, plan.source)
        if isinstance(move, Send)
        else (plan.target_mesh, plan.target)
    )
    planned = BufferSpec(plan.shape, plan.dtype, sharding)
    if planned != spec or mesh != program.mesh:
        walk.fail(
            f"transfer {move.transfer} is not for buffer {move.buffer}",
            got=f"{planned} on {mesh}",
            why=f"the buffer is {spec} on {program.mesh}",
        )


def _check_free(walk: _Walk, free: Free) -> None:
    walk.end(free.buffer, "freed")


def _check_zero(walk: _Walk, zero: Zero) -> None:
    walk.define(zero.buffer)


def _check_feed(walk: _Walk, feed: Feed) -> None:
    walk.define(feed.buffer)
    if not 0 <= feed.argument < len(walk.step.arguments):
        walk.fail(
            f"there is no argument {feed.argument}", got=f"{len(walk.step.arguments)} arguments"
        )
    if feed.micro != WHOLE and not 0 <= feed.micro < walk.step.micro_batches:
        walk.fail(f"there is no micro-batch {feed.micro}", got=f"{walk.step.micro_batches} of them")
    before = walk.program.instructions[: walk.position]
    if any(
        isinstance(other, Feed) and (other.argument, other.micro) == (feed.argument, feed.micro)
        for other in before
    ):
        walk.fail("the same argument is fed twice to one worker")
    uses = walk.step.arguments[feed.argument]
    wanted = (walk.program.rank, feed.buffer, feed.micro)
    if wanted not in [(use.rank, use.buffer, use.micro) for use in uses]:
        walk.fail("a FEED is not among the uses of its argument")


def _check_fetch(walk: _Walk, fetch: Fetch) -> None:
    if fetch.buffer not in walk.fetched:
        walk.use(fetch.buffer)
    walk.fetched.add(fetch.buffer)
    if not 0 <= fetch.result < len(walk.step.results):
        walk.fail(f"there is no result {fetch.result}", got=f"{len(walk.step.results)} results")
    source = walk.step.results[fetch.result]
    if (source.rank, source.buffer) != (walk.program.rank, fetch.buffer):
        walk.fail(
            f"result {fetch.result} does not come from here",
            why=f"its source is buffer {source.buffer} of worker {source.rank}",
        )


def _check_mark(walk: _Walk, mark: Mark) -> None:
    if not mark.text.strip():
        walk.fail("a MARK says nothing")


_CHECKS: dict[type, Callable[[_Walk, Any], None]] = {
    Run: _check_run,
    Send: _check_move,
    Recv: _check_move,
    Free: _check_free,
    Zero: _check_zero,
    Feed: _check_feed,
    Fetch: _check_fetch,
    Mark: _check_mark,
}


# All lists together.


def _check_arguments(step: StepProgram) -> None:
    fed = {
        (program.rank, entry.buffer, entry.argument, entry.micro)
        for program in step.workers
        for entry in program.instructions
        if isinstance(entry, Feed)
    }
    for number, uses in enumerate(step.arguments):
        for use in uses:
            where = f"argument {number}, worker {use.rank}, buffer {use.buffer}"
            if (use.rank, use.buffer, number, use.micro) not in fed:
                raise VerifyError("a use of an argument has no FEED", where=where, got=str(use))
            _check_position(step, use, where)
        if len({(use.rank, use.micro) for use in uses}) != len(uses):
            raise VerifyError(f"argument {number} has a use twice", got=str(uses))


def _check_position(step: StepProgram, use: ArgumentUse, where: str) -> None:
    if (use.micro == WHOLE) != (use.position is None):
        raise VerifyError(
            "a micro-batch has a position in its argument, and a whole argument none",
            where=where,
            got=str(use),
        )
    if use.position is None:
        return
    (dim, inner), shape = use.position, step.workers[use.rank].specs()[use.buffer].shape
    if not 0 <= dim < len(shape) or inner < 1 or shape[dim] % inner:
        raise VerifyError(
            "the position of a micro-batch does not fit its buffer",
            where=where,
            got=f"dim {dim}, inner {inner}, shape {shape}",
        )


def _check_results(step: StepProgram) -> None:
    fetches = [
        (entry.result, program.rank, entry.buffer)
        for program in step.workers
        for entry in program.instructions
        if isinstance(entry, Fetch)
    ]
    for number, source in enumerate(step.results):
        found = [fetch for fetch in fetches if fetch[0] == number]
        where = f"result {number}"
        if len(found) != 1:
            raise VerifyError(
                f"result {number} has {len(found)} FETCH instructions",
                where=f"worker {source.rank}, buffer {source.buffer}",
            )
        spec = step.workers[source.rank].specs()[source.buffer]
        if not _is_result(spec, source):
            raise VerifyError(
                "a result is of another shape or dtype than its buffer",
                where=f"{where}, worker {source.rank}, buffer {source.buffer}",
                got=f"{source.dtype}{list(source.shape)} from {spec}",
            )


def _is_result(spec: BufferSpec, source: ResultSource) -> bool:
    if is_key_type(source.dtype):
        return spec.dtype == "uint32" and spec.shape[: len(source.shape)] == source.shape
    return (spec.shape, spec.dtype) == (source.shape, source.dtype)


Channel = tuple[int, int, int]
"""Sender, receiver, tag."""


def _moves(step: StepProgram, kind: type) -> Iterable[tuple[Channel, WorkerProgram, int, TilePlan]]:
    for program in step.workers:
        for position, entry in enumerate(program.instructions):
            if not isinstance(entry, kind):
                continue
            assert isinstance(entry, Send | Recv)
            channel = _channel(program.rank, entry)
            yield channel, program, position, program.transfers[entry.transfer]


def _check_messages(step: StepProgram) -> None:
    ends: list[dict[Channel, tuple[WorkerProgram, int, TilePlan]]] = [{}, {}]
    for kind, found in zip((Send, Recv), ends, strict=True):
        for channel, program, position, plan in _moves(step, kind):
            if channel in found:
                raise VerifyError(
                    f"tag {channel[2]} is used twice from worker {channel[0]} to {channel[1]}",
                    where=_place(program, position),
                    why=f"first by instruction {found[channel][1]}",
                )
            found[channel] = (program, position, plan)
    sends, recvs = ends
    for mine, theirs, missing in ((sends, recvs, "RECV"), (recvs, sends, "SEND")):
        for channel, (program, position, plan) in mine.items():
            if channel not in theirs:
                peer = channel[1] if mine is sends else channel[0]
                raise VerifyError(
                    f"worker {peer} has no {missing} for this", where=_place(program, position)
                )
            if theirs[channel][2] != plan:
                other = _place(*theirs[channel][:2])
                raise VerifyError(
                    "the two sides of a transfer have different tiles",
                    where=_place(program, position),
                    got=f"other side: {other}",
                )


# Deadlock.


class ChannelModel(Enum):
    """How a SEND and its RECV wait for each other."""

    BUFFERED = "buffered"
    RENDEZVOUS = "rendezvous"


def verify_no_deadlock(
    step: StepProgram,
    models: Sequence[ChannelModel] = (ChannelModel.BUFFERED, ChannelModel.RENDEZVOUS),
) -> None:
    """Run the lists of a verified step to their ends, moving no data.

    Raises:
        ScheduleError: they do not end; says who waits for whom.
    """
    for model in models:
        _simulate(step, model)


Moves = list[tuple[int, Send | Recv]]


def _simulate(step: StepProgram, model: ChannelModel) -> None:
    lists: list[Moves] = [
        [
            (position, entry)
            for position, entry in enumerate(program.instructions)
            if isinstance(entry, Send | Recv)
        ]
        for program in step.workers
    ]
    at = [0] * len(lists)
    sent: set[Channel] = set()
    moved = True
    while moved:
        moved = False
        for rank, moves in enumerate(lists):
            while at[rank] < len(moves) and _may_go(rank, lists, at, sent, model):
                move = moves[at[rank]][1]
                if isinstance(move, Send):
                    sent.add(_channel(rank, move))
                at[rank] += 1
                moved = True
    waiting = [
        f"{_place(step.workers[rank], moves[at[rank]][0])}"
        for rank, moves in enumerate(lists)
        if at[rank] < len(moves)
    ]
    if waiting:
        raise ScheduleError(
            "the workers would wait for each other for ever",
            got="; ".join(waiting),
            why=f"with {model.value} channels",
        )


def _may_go(
    rank: int, lists: list[Moves], at: list[int], sent: set[Channel], model: ChannelModel
) -> bool:
    """Whether the next move of a rank can happen now."""
    move = lists[rank][at[rank]][1]
    channel = _channel(rank, move)
    if isinstance(move, Recv):
        return channel in sent
    if model is ChannelModel.BUFFERED:
        return True
    theirs, place = lists[move.peer], at[move.peer]
    if place == len(theirs) or not isinstance(theirs[place][1], Recv):
        return False
    return _channel(move.peer, theirs[place][1]) == channel


def _channel(rank: int, move: Send | Recv) -> Channel:
    pair = (rank, move.peer) if isinstance(move, Send) else (move.peer, rank)
    return (*pair, move.tag)
