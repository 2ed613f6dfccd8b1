"""From the tasks of all stages and a schedule to the instruction lists of all workers.

Everything is put down in one global order: when a task is scheduled, what it sends is appended to
its worker's list and the matching receives to their workers' lists at that moment. Followed in
order, such lists cannot deadlock under any kind of channel (see solver/schedules/deadlock.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.errors import ScheduleError
from autopar.ir.graph import OpGraph
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding
from autopar.layers.stage_graph import (
    BACKWARD_TASK,
    BEFORE_ALL,
    FORWARD_TASK,
    LOOPED,
    Exit,
    StageGraph,
)
from autopar.lower.boundary import Outside, outside
from autopar.lower.cross_mesh import TilePlan, plan_tiles
from autopar.lower.instructions import (
    WHOLE,
    ArgumentUse,
    BufferSpec,
    Feed,
    Fetch,
    Free,
    Instruction,
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
from autopar.lower.tasks import Slot, StageTask
from autopar.plan.schedule import Action, Schedule
from autopar.trace.micro_graph import LAST


@dataclass(frozen=True, slots=True)
class StageLowering:
    """A stage with its decisions carried out.

    Attributes:
        stage: its graph.
        mesh: its devices.
        inputs: how each input of the graph lies.
        outputs: how each output does.
        tasks: its programs, in the order in which they run.
    """

    stage: StageGraph
    mesh: Mesh
    inputs: tuple[Sharding, ...]
    outputs: tuple[Sharding, ...]
    tasks: tuple[StageTask, ...]


def step_program(
    stages: Sequence[StageLowering],
    schedule: Schedule,
    *,
    arguments: int,
    hidden: int,
    results: Sequence[tuple[tuple[int, ...], str]],
) -> StepProgram:
    """Instruction lists of one step.

    Args:
        stages: by number; worker `s` runs stage `s`.
        schedule: compute actions; the rank of a stage is its number.
        arguments: number of argument leaves; leaves from there on are closed-over arrays.
        hidden: number of those; constants of the micro graph follow them.
        results: shape and dtype name of each result; those that are literals are no stage's.

    Raises:
        ScheduleError: the order of the schedule cannot be followed.
    """
    looped = _looped_receives(stages)
    writer = _Writer([_Worker(s, arguments, hidden, looped[s.stage.stage]) for s in stages])
    writer.start()
    writer.loop(schedule)
    writer.finish()
    workers = [worker.program() for worker in writer.workers]
    uses: list[list[ArgumentUse]] = [[] for _ in range(arguments)]
    for worker in writer.workers:
        for leaf, use in worker.uses:
            uses[leaf].append(use)
    sources = {
        number: ResultSource(worker.rank, name, *results[number])
        for worker in writer.workers
        for number, name in worker.fetched
    }
    return StepProgram(
        schedule.micro_batches,
        tuple(workers),
        tuple(map(tuple, uses)),
        tuple(sources[number] for number in sorted(sources)),
    )


Out = tuple[Exit, Slot, str]
"""An exit, the slot that leaves, and the task that makes it: none for an argument as it lies."""


def _exits(lowering: StageLowering) -> tuple[Out, ...]:
    """What a stage hands out."""
    made: dict[tuple[Slot, bool], str] = {}
    for task in lowering.tasks:
        for slot in task.outputs:
            made[slot, task.name in LOOPED] = task.name
    found = []
    graph = lowering.stage.graph
    entries = zip(graph.inputs, lowering.inputs, strict=True)
    given = {Slot(entry.value, sharding) for entry, sharding in entries}
    sides = zip(lowering.stage.exits, graph.returned, lowering.outputs, strict=True)
    for exit_, value, sharding in sides:
        slot = Slot(value, sharding)
        looped = exit_.kind == "recv" and (slot, True) in made
        found.append((exit_, slot, "" if slot in given else made[slot, looped]))
    return tuple(found)


def _looped_receives(stages: Sequence[StageLowering]) -> list[frozenset[int]]:
    """Per stage, the ports that receive another array in each micro-batch."""
    looped = {
        (lowering.stage.stage, exit_.target)
        for lowering in stages
        for exit_, _, task in _exits(lowering)
        if exit_.kind == "recv" and task in LOOPED
    }
    return [
        frozenset(
            number
            for number, port in enumerate(lowering.stage.ports)
            if port.kind == "recv" and (port.stage, port.source) in looped
        )
        for lowering in stages
    ]


@dataclass
class _Worker:
    """The list of one worker while it is written."""

    lowering: StageLowering
    arguments: int
    num_hidden: int
    looped_receives: frozenset[int]
    code: list[Instruction] = field(default_factory=list)
    specs: dict[str, BufferSpec] = field(default_factory=dict)
    names: dict[tuple[Slot, bool], str] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)
    hidden: dict[str, int] = field(default_factory=dict)
    transfers: dict[TilePlan, int] = field(default_factory=dict)
    uses: list[tuple[int, ArgumentUse]] = field(default_factory=list)
    fetched: list[tuple[int, str]] = field(default_factory=list)
    fed: set[str] = field(default_factory=set)
    grown: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tasks = {task.name: task for task in self.lowering.tasks}
        self.exits = _exits(self.lowering)
        entries = zip(self.graph.inputs, self.lowering.inputs, strict=True)
        self.ports = tuple(Slot(entry.value, sharding) for entry, sharding in entries)
        for number, slot in enumerate(self.ports):
            self.names[slot, self.is_looped_port(number)] = f"p{number}"
        variants: dict[int, int] = {}
        for task in self.lowering.tasks:
            looped = task.name in LOOPED
            for slot in task.outputs:
                key = (slot, looped and not slot.gather)
                if key in self.names:
                    continue
                count = variants.get(slot.value, 0)
                name = f"a{slot.value}" if slot.gather else f"v{slot.value}" + "abcdefgh"[:count]
                variants[slot.value] = count + (not slot.gather)
                self.names[key] = name

    @property
    def rank(self) -> int:
        return self.lowering.stage.stage

    @property
    def graph(self) -> OpGraph:
        return self.lowering.stage.graph

    def leaf_port(self, leaf: int) -> int:
        """The port of a leaf that this stage keeps."""
        ports = self.lowering.stage.ports
        return next(n for n, p in enumerate(ports) if p.kind == "whole" and p.source == leaf)

    def is_looped_port(self, number: int) -> bool:
        """Whether a port is another array in each micro-batch."""
        port = self.lowering.stage.ports[number]
        return port.kind in ("micro", "index") or number in self.looped_receives

    def name(self, slot: Slot, micro: int) -> str:
        """The buffer of a slot, in a micro-batch or (WHOLE) outside the loop."""
        if micro != WHOLE and (slot, True) in self.names:
            return f"{self.names[slot, True]}.{micro}"
        name = self.names[slot, False]
        return f"{name}.{self.grown[name]}" if slot.gather else name

    def define(self, slot: Slot, micro: int) -> str:
        """The same, with its spec noted."""
        name = self.name(slot, micro)
        if name not in self.specs:
            value, mesh = self.graph.values[slot.value], self.lowering.mesh
            form = outside(value.shape, value.dtype, slot.sharding, mesh, wide=slot.wide)
            self.specs[name] = _spec(form)
        return name

    def transfer(self, plan: TilePlan) -> int:
        return self.transfers.setdefault(plan, len(self.transfers))

    def bring(self, number: int, micro: int) -> None:
        """Have the buffer of an argument, constant or closed-over array at hand."""
        port, slot = self.lowering.stage.ports[number], self.ports[number]
        looped = self.is_looped_port(number)
        name = self.define(slot, micro if looped else WHOLE)
        if name in self.fed or port.kind in ("recv", "total"):
            return
        self.fed.add(name)
        if port.kind == "index":
            self.constants[name] = micro
        elif port.kind == "constant":
            self.hidden[name] = self.num_hidden + port.source
        elif port.source >= self.arguments:
            self.hidden[name] = port.source - self.arguments
        else:
            at = port.position
            which = micro if port.kind == "micro" else WHOLE
            self.code.append(Feed(name, port.source, which))
            position = (at.dim, at.inner) if at is not None and which != WHOLE else None
            donated = self.graph.inputs[number].donated and which == WHOLE
            use = ArgumentUse(self.rank, name, which, position, donated)
            self.uses.append((port.source, use))

    def run(self, task: StageTask, micro: int) -> None:
        """Append a task, with the arguments it is the first to read."""
        place = {slot: number for number, slot in enumerate(self.ports)}
        for slot in task.all_inputs:
            if slot in place:
                self.bring(place[slot], micro)
        for position, kind in task.gathers:
            name = self.names[task.outputs[position], False]
            if kind != LAST and name not in self.grown:
                self.grown[name] = 0
                self.code.append(Zero(self.define(task.outputs[position], micro)))
        inputs = tuple(self.define(slot, micro) for slot in task.all_inputs)
        for position, _ in task.gathers:
            name = self.names[task.outputs[position], False]
            self.grown[name] = self.grown.get(name, -1) + 1
        outputs = tuple(self.define(slot, micro) for slot in task.outputs)
        self.code.append(Run(task.name, inputs, outputs))

    # --- the finished list ---------------------------------------------------------------------

    def program(self) -> WorkerProgram:
        """The worker's program, with what is no longer used freed at once."""
        tasks = tuple(self._task(task) for task in self.lowering.tasks if self._runs(task))
        donated = {task.name: task.donated for task in tasks}
        code = _with_frees(self.code, donated, {*self.constants, *self.hidden})
        used = {name for item in code for name in _buffers(item)}
        return WorkerProgram(
            self.rank,
            f"stage {self.rank}",
            self.lowering.mesh,
            tasks,
            tuple((name, spec) for name, spec in self.specs.items() if name in used),
            tuple(self.constants.items()),
            tuple(self.hidden.items()),
            tuple(self.transfers),
            tuple(code),
        )

    def _runs(self, task: StageTask) -> bool:
        return any(isinstance(item, Run) and item.task == task.name for item in self.code)

    def _task(self, task: StageTask) -> Task:
        ins, outs = (tuple(map(_spec, side)) for side in task.forms())
        first = len(task.inputs)
        grown = range(first, first + len(task.grown))
        return Task(task.name, ins, outs, (*self._updated_in_place(task), *grown))

    def _updated_in_place(self, task: StageTask) -> tuple[int, ...]:
        """Arguments the caller gives away whose next value the task makes, in the same form."""
        found = []
        later = self.lowering.tasks[self.lowering.tasks.index(task) + 1 :]
        outputs = list(zip(self.graph.returned, self.lowering.outputs, strict=True))
        for number, (entry, slot) in enumerate(zip(self.graph.inputs, self.ports, strict=True)):
            if not entry.donated or entry.tied_output < 0 or slot not in task.inputs:
                continue
            value, sharding = outputs[entry.tied_output]
            made = Slot(value, sharding) in task.outputs
            same = sharding == slot.sharding
            last = not any(slot in other.inputs for other in later)
            whole = not self.is_looped_port(number) and task.name not in LOOPED
            if made and same and last and whole:
                old, new = self.graph.values[entry.value], self.graph.values[value]
                if (old.shape, old.dtype) == (new.shape, new.dtype):
                    found.append(task.inputs.index(slot))
        return tuple(sorted(found))


def _spec(form: Outside) -> BufferSpec:
    return BufferSpec(form.shape, str(form.dtype), form.sharding)


def _buffers(item: Instruction) -> tuple[str, ...]:
    if isinstance(item, Run):
        return (*item.inputs, *item.outputs)
    return () if isinstance(item, Mark) else (item.buffer,)


def _with_frees(
    code: Sequence[Instruction], donated: dict[str, tuple[int, ...]], kept: set[str]
) -> list[Instruction]:
    """Free each buffer after its last use; donated, handed out and persistent ones are not."""
    made: list[Instruction] = []
    later: set[str] = set(kept)
    for item in reversed(code):
        names = dict.fromkeys(_buffers(item))
        gone: set[str] = set()
        if isinstance(item, Run):
            gone = {item.inputs[p] for p in donated[item.task]}
        elif isinstance(item, Fetch):
            gone = set(names)
        made += [Free(name) for name in names if name not in later and name not in gone]
        made.append(item)
        later.update(names)
    return made[::-1]


class _Writer:
    """Writes all lists at once, in one global order."""

    def __init__(self, workers: list[_Worker]) -> None:
        self.workers = workers
        self.tags: dict[tuple[int, int], int] = {}
        self.made = {
            (worker.rank, exit_.kind, exit_.target): task
            for worker in workers
            for exit_, _, task in worker.exits
        }
        self.readers: dict[tuple[int, str, int], list[tuple[_Worker, int]]] = {}
        for worker in workers:
            for number, port in enumerate(worker.lowering.stage.ports):
                key = (port.stage, port.kind, port.source)
                self.readers.setdefault(key, []).append((worker, number))
        self.plans: dict[tuple[int, BufferSpec, int, BufferSpec], TilePlan] = {}

    def _sender_task(self, worker: _Worker, number: int) -> str:
        """The task of another stage that makes what a port receives; empty for a leaf."""
        port = worker.lowering.stage.ports[number]
        return self.made.get((port.stage, port.kind, port.source), "")

    def start(self) -> None:
        """Arguments that other stages keep, and what runs before the loop."""
        for worker in self.workers:
            worker.code.append(Mark("start"))
        for receiver in self.workers:
            for number, port in enumerate(receiver.lowering.stage.ports):
                if port.kind == "recv" and not self._sender_task(receiver, number):
                    self._send_leaf(receiver, number)
        for worker in self.workers:
            if BEFORE_ALL in worker.tasks:
                self._run(worker, BEFORE_ALL, WHOLE)

    def _send_leaf(self, receiver: _Worker, number: int) -> None:
        """A leaf that lives on one stage and is read on another."""
        port = receiver.lowering.stage.ports[number]
        sender = self.workers[port.stage]
        place = sender.leaf_port(port.leaf)
        sender.bring(place, WHOLE)
        self._move(sender, sender.ports[place], receiver, number, WHOLE)

    def loop(self, schedule: Schedule) -> None:
        """All micro-batches, in an order that respects what needs what."""
        queues = [[a for a in row if isinstance(a, Action)] for row in schedule.ranks]
        done: set[tuple[int, str, int]] = set()
        at = [0] * len(queues)
        while any(place < len(queue) for place, queue in zip(at, queues, strict=True)):
            moved = False
            for rank, queue in enumerate(queues):
                if at[rank] == len(queue):
                    continue
                action = queue[at[rank]]
                if action.kind in LOOPED and not self._ready(action, done):
                    continue
                if action.kind in LOOPED:
                    self._act(action)
                    done.add((action.stage, action.kind, action.micro))
                at[rank] += 1
                moved = True
            if not moved:
                waiting = [str(q[i]) for i, q in zip(at, queues, strict=True) if i < len(q)]
                raise ScheduleError(
                    "the schedule stands still", got=f"next on each rank: {', '.join(waiting)}"
                )

    def _ready(self, action: Action, done: set[tuple[int, str, int]]) -> bool:
        if action.kind == BACKWARD_TASK and (action.stage, FORWARD_TASK, action.micro) not in done:
            return False
        worker = self.workers[action.stage]
        task = worker.tasks.get(action.kind)
        read = set(task.inputs) if task is not None else set()
        for number, slot in enumerate(worker.ports):
            if slot in read and number in worker.looped_receives:
                port = worker.lowering.stage.ports[number]
                sender = self._sender_task(worker, number)
                if (port.stage, sender, action.micro) not in done:
                    return False
        return True

    def _act(self, action: Action) -> None:
        worker = self.workers[action.stage]
        worker.code.append(Mark(str(action)))
        if action.kind in worker.tasks:
            self._run(worker, action.kind, action.micro)

    def finish(self) -> None:
        """What runs after the loop, exchange by exchange; then results are handed out."""
        for worker in self.workers:
            worker.code.append(Mark("update"))
        names = {name for worker in self.workers for name in worker.tasks if name[0] == "U"}
        for name in sorted(names, key=lambda name: int(name[1:])):
            for worker in self.workers:
                if name in worker.tasks:
                    self._run(worker, name, WHOLE)
        for worker in self.workers:
            for exit_, slot, task in worker.exits:
                if exit_.kind == "result":
                    if not task:
                        worker.bring(worker.ports.index(slot), WHOLE)
                    name = worker.name(slot, WHOLE)
                    worker.code.append(Fetch(name, exit_.target))
                    worker.fetched.append((exit_.target, name))

    def _run(self, worker: _Worker, name: str, micro: int) -> None:
        worker.run(worker.tasks[name], micro)
        for exit_, slot, task in worker.exits:
            if task == name and exit_.kind != "result":
                key = (worker.rank, exit_.kind, exit_.target)
                for receiver, number in self.readers.get(key, ()):
                    self._move(worker, slot, receiver, number, micro)

    def _move(
        self, sender: _Worker, slot: Slot, receiver: _Worker, number: int, micro: int
    ) -> None:
        """One array from worker to worker: a send here, a receive there."""
        source = sender.define(slot, micro)
        target = receiver.define(receiver.ports[number], micro)
        here, there = sender.specs[source], receiver.specs[target]
        way = (sender.rank, here, receiver.rank, there)
        if way not in self.plans:  # every micro-batch goes the same way
            self.plans[way] = plan_tiles(
                here.shape,
                here.dtype,
                sender.lowering.mesh,
                here.sharding,
                receiver.lowering.mesh,
                there.sharding,
            )
        plan = self.plans[way]
        pair = (sender.rank, receiver.rank)
        tag = self.tags[pair] = self.tags.get(pair, -1) + 1
        sender.code.append(Send(source, receiver.rank, sender.transfer(plan), tag))
        receiver.code.append(Recv(target, sender.rank, receiver.transfer(plan), tag))
