"""The part of a step that one stage runs, as a graph of its own.

It holds, in the order in which they run, the ops of the tasks

    P    once, before the micro-batches
    F    the forward of one micro-batch
    B    its backward, with what is made again from the values that are kept
    U0.. once, after the micro-batches; U1 needs what another stage makes in its U0

Ports are what comes in (arguments, micro-batches of them, values of other stages), exits what goes
out (results, values for other stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.graph import Input, Literal, Op, OpGraph, Value
from autopar.ir.verify import verify_graph
from autopar.layers.assign import ANYWHERE, COORDINATOR, Assignment
from autopar.layers.residuals import choose_kept
from autopar.rules.rule import Rule
from autopar.trace.backward import FORWARD
from autopar.trace.batch import AFTER, BEFORE, LOOP, Position
from autopar.trace.micro_graph import STACKED

BEFORE_ALL, FORWARD_TASK, BACKWARD_TASK = "P", "F", "B"
LOOPED = (FORWARD_TASK, BACKWARD_TASK)


def update_task(level: int) -> str:
    """Name of the task that runs `level` exchanges after the loop."""
    return f"U{level}"


@dataclass(frozen=True, slots=True)
class Port:
    """What an input of a stage is.

    Attributes:
        kind: `index`, `whole`, `micro`, `constant` as in trace.micro_graph.Role; `recv`: a value or
            leaf of another stage; `total`: what another stage has gathered over its loop.
        source: the leaf, the constant, or (recv, total) the micro graph's value.
        stage: for `recv` and `total`, who has it.
        position: for `micro`, how the slice is cut.
        leaf: for `recv` of a leaf, which.
    """

    kind: str
    source: int
    stage: int = ANYWHERE
    position: Position | None = None
    leaf: int = -1


@dataclass(frozen=True, slots=True)
class Exit:
    """What an output of a stage is.

    Attributes:
        kind: `result`; `recv` or `total`: the counterpart of a port of that kind.
        target: number of the result, or the micro graph's value.
    """

    kind: str
    target: int


@dataclass(frozen=True, slots=True)
class StageGraph:
    """One stage.

    Attributes:
        stage: its number.
        count: number of micro-batches.
        graph: its ops, grouped by task in the order in which the tasks run.
        tasks: per op, its task.
        origins: per op, the op of the micro graph.
        ports, exits: per input and output of the graph.
        gathered: (value, kind) of what its loop gathers for its updates.
    """

    stage: int
    count: int
    graph: OpGraph
    tasks: tuple[str, ...]
    origins: tuple[int, ...]
    ports: tuple[Port, ...]
    exits: tuple[Exit, ...]
    gathered: tuple[tuple[int, str], ...]

    @property
    def times(self) -> tuple[int, ...]:
        """How often each op runs in a step."""
        return tuple(self.count if task in LOOPED else 1 for task in self.tasks)

    def rules(self, rules: Sequence[Rule]) -> tuple[Rule, ...]:
        """The rules of its ops, from those of the micro graph."""
        return tuple(rules[origin] for origin in self.origins)


Need = tuple[int, bool]
"""A value of the micro graph, and whether all of it is meant: what the loop has gathered."""


def stage_graphs(assignment: Assignment, rules: Sequence[Rule]) -> tuple[StageGraph, ...]:
    """Every stage of an assignment.

    Args:
        assignment: ops and leaves in their stages.
        rules: of the micro graph's ops.
    """
    shared = _Shared(assignment, tuple(rules))
    received = [shared.received(stage) for stage in range(assignment.stages)]
    graphs = []
    for stage in range(assignment.stages):
        sends = {need for other, needs in enumerate(received) if other != stage for need in needs}
        own = sorted(n for n in sends if shared.owner(n[0]) == stage and not shared.is_leaf(n[0]))
        graphs.append(_Stage(shared, stage, tuple(own)).build())
    return tuple(graphs)


class _Shared:
    """What all stages look up."""

    def __init__(self, assignment: Assignment, rules: tuple[Rule, ...]) -> None:
        self.assignment = assignment
        self.rules = rules
        self.micro = assignment.micro
        self.graph = assignment.micro.graph
        self.maker = {value: op for op in self.graph.ops for value in op.outputs}
        self.port_of = {e.value: n for n, e in enumerate(self.graph.inputs)}
        self.gathered = dict(self.micro.gathered)
        self.levels = self._levels()
        self.constants = self._constants()

    def phase(self, op: Op) -> str:
        return self.micro.phases[op.index]

    def stage(self, op: Op) -> int:
        return self.assignment.of[op.index]

    def is_leaf(self, value: int) -> bool:
        return value in self.port_of

    def owner(self, value: int) -> int:
        """Stage that has a value; ANYWHERE where every stage gets or makes it itself."""
        if value in self.port_of:
            return self.assignment.homes[self.port_of[value]]
        return self.stage(self.maker[value])

    def _levels(self) -> dict[int, int]:
        """Per op after the loop, how many exchanges between stages it comes after."""
        levels: dict[int, int] = {}
        for op in self.graph.ops:
            if self.phase(op) != AFTER:
                continue
            level = 0
            for value in op.reads:
                maker = self.maker.get(value)
                if maker is None or self.stage(maker) == ANYWHERE:
                    continue
                apart = self.stage(maker) != self.stage(op)
                level = max(level, levels.get(maker.index, 0) + apart)
            levels[op.index] = level
        return levels

    def _constants(self) -> set[int]:
        """Ops before the loop that read no input at all: made where they are needed."""
        found: set[int] = set()
        for op in self.graph.ops:
            makers = [self.maker.get(v) for v in op.reads]
            if self.phase(op) == BEFORE and all(m is not None and m.index in found for m in makers):
                found.add(op.index)
        return found

    def ops_of(self, stage: int) -> list[Op]:
        return [op for op in self.graph.ops if self.stage(op) == stage]

    def need(self, value: int, *, late: bool) -> Need:
        """What a reader of `value` needs; `late` if it runs after the loop."""
        maker = self.maker.get(value)
        return value, late and maker is not None and self.phase(maker) == LOOP

    def received(self, stage: int) -> list[Need]:
        """What the stage's ops read of other stages, ops that are nobody's included."""
        found: dict[Need, None] = {}
        seen: set[Need] = set()
        todo = [
            self.need(v, late=self.phase(op) == AFTER)
            for op in self.ops_of(stage)
            for v in op.reads
        ]
        todo += [self.need(value, late=True) for _, value in self.results(stage)]
        while todo:
            need = todo.pop()
            if need in seen:
                continue
            seen.add(need)
            value, _ = need
            owner = self.owner(value)
            if owner not in (ANYWHERE, stage):
                found[need] = None
            elif owner == ANYWHERE and value in self.maker:
                todo += [self.need(v, late=False) for v in self.maker[value].reads]
        return sorted(found)

    def results(self, stage: int) -> list[tuple[int, int]]:
        """(number, value) of the step's results that this stage hands out; literals have none."""
        found: list[tuple[int, int]] = []
        tied = {e.tied_output: e.value for e in self.graph.inputs if e.tied_output >= 0}
        for number, operand in enumerate(self.graph.outputs):
            if isinstance(operand, Literal):
                continue
            owner = self.owner(operand)
            if owner == ANYWHERE:
                owner = self.owner(tied[number]) if number in tied else COORDINATOR
            if max(owner, 0) == stage:
                found.append((number, operand))
        return found


@dataclass
class _Stage:
    """Builds one stage; `env` maps the micro graph's values to the stage's, task by task."""

    shared: _Shared
    number: int
    sends: tuple[Need, ...]
    values: list[Value] = field(default_factory=list)
    inputs: dict[Need, int] = field(default_factory=dict)
    ports: list[Port] = field(default_factory=list)
    ops: list[tuple[str, Op, int]] = field(default_factory=list)
    env: dict[tuple[str, int], int] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()

    def build(self) -> StageGraph:
        shared, stage = self.shared, self.number
        own = shared.ops_of(stage)
        loop = [op for op in own if shared.phase(op) == LOOP]
        forward = [op for op in loop if shared.micro.regions[op.index] == FORWARD]
        backward = [op for op in loop if shared.micro.regions[op.index] != FORWARD]
        self.kept = self._keep(forward, backward)
        roots = {v for op in forward for v in op.outputs if v in shared.gathered}
        roots |= self.kept | {value for value, _ in self.sends}
        for op in _needed(forward, roots):
            self._emit(op, FORWARD_TASK)
        for op in backward:
            self._emit(op, BACKWARD_TASK)
        after = sorted(
            (op for op in own if shared.phase(op) == AFTER),
            key=lambda op: (shared.levels[op.index], op.index),
        )
        for op in after:
            self._emit(op, update_task(shared.levels[op.index]))
        exits = self._exits()
        return self._finished(exits)

    def _keep(self, forward: Sequence[Op], backward: Sequence[Op]) -> frozenset[int]:
        shared = self.shared
        needed = {v for op in backward for v in op.reads}
        given = {
            v: shared.owner(v) not in (ANYWHERE, self.number) and not shared.is_leaf(v)
            for op in forward
            for v in op.reads
            if v not in shared.maker or shared.stage(shared.maker[v]) != self.number
        }
        return choose_kept(shared.graph, shared.rules, forward, needed, given=given)

    # --- where a value comes from --------------------------------------------------------------

    def _resolve(self, value: int, task: str) -> int:
        """The stage's value for a value of the micro graph, as `task` sees it."""
        shared = self.shared
        if value in shared.port_of or shared.owner(value) not in (ANYWHERE, self.number):
            return self._port(shared.need(value, late=task not in (BEFORE_ALL, *LOOPED)))
        maker = shared.maker[value]
        if shared.phase(maker) == BEFORE:
            task = task if maker.index in shared.constants else BEFORE_ALL
        elif shared.phase(maker) == AFTER:
            task = update_task(shared.levels[maker.index])
        elif task not in LOOPED:
            task = BACKWARD_TASK if (BACKWARD_TASK, value) in self.env else FORWARD_TASK
            if shared.owner(value) != ANYWHERE:
                task = self._loop_task(maker)
        elif shared.owner(value) == self.number:
            own = self._loop_task(maker)
            if own == task or value in self.kept:
                task = own
        if (task, value) not in self.env:
            self._emit(maker, task)
        return self.env[task, value]

    def _loop_task(self, op: Op) -> str:
        forward = self.shared.micro.regions[op.index] == FORWARD
        return FORWARD_TASK if forward else BACKWARD_TASK

    def _port(self, need: Need) -> int:
        if need in self.inputs:
            return self.inputs[need]
        shared, (value, total) = self.shared, need
        owner = shared.owner(value)
        port = Port("total" if total else "recv", value, owner)
        if value in shared.port_of:
            role = shared.micro.roles[shared.port_of[value]]
            port = replace(port, leaf=role.leaf)
            if owner in (ANYWHERE, self.number):
                port = Port(role.kind, role.leaf, ANYWHERE, role.position)
        self.inputs[need] = self._value(value)
        self.ports.append(port)
        return self.inputs[need]

    def _value(self, value: int) -> int:
        self.values.append(replace(self.shared.graph.values[value], id=len(self.values)))
        return len(self.values) - 1

    def _emit(self, op: Op, task: str) -> None:
        if op.outputs and all((task, value) in self.env for value in op.outputs):
            return
        inputs = tuple(o if isinstance(o, Literal) else self._resolve(o, task) for o in op.inputs)
        outputs = tuple(self._value(value) for value in op.outputs)
        self.env.update(((task, v), new) for v, new in zip(op.outputs, outputs, strict=True))
        self.ops.append((task, replace(op, inputs=inputs, outputs=outputs), op.index))

    # --- what goes out -------------------------------------------------------------------------

    def _exits(self) -> list[tuple[Exit, str, int]]:
        found: list[tuple[Exit, str, int]] = []
        for number, value in self.shared.results(self.number):
            name = self.shared.graph.output_names[number]
            found.append((Exit("result", number), name, self._resolve(value, update_task(0))))
        for value, total in self.sends:
            maker = self.shared.maker[value]
            looped = self.shared.phase(maker) == LOOP and not total
            task = self._loop_task(maker) if looped else update_task(0)
            kind = "total" if total else "recv"
            found.append((Exit(kind, value), f"{kind}/v{value}", self._resolve(value, task)))
        return found

    def _finished(self, exits: Sequence[tuple[Exit, str, int]]) -> StageGraph:
        shared = self.shared
        gathered = [
            (self.env[task, value], kind)
            for value, kind in shared.micro.gathered
            for task in LOOPED
            if (task, value) in self.env and self._is_gathered_here(value, task)
        ]
        if any(kind == STACKED for _, kind in gathered):
            # Stacking needs to know which micro-batch it is.
            self._port((shared.graph.inputs[0].value, False))
        order = _task_order(self.ops)
        rank = {task: place for place, task in enumerate(order)}
        ops = sorted(self.ops, key=lambda entry: rank[entry[0]])
        results = {
            exit_.target: n for n, (exit_, _, _) in enumerate(exits) if exit_.kind == "result"
        }
        entries = []
        for (value, _), new in self.inputs.items():
            entry = Input(new, shared.graph.values[value].name)
            if value in shared.port_of and shared.owner(value) in (ANYWHERE, self.number):
                first = shared.graph.inputs[shared.port_of[value]]
                tie = results.get(first.tied_output, -1) if first.tied_output >= 0 else -1
                entry = Input(new, first.name, first.donated and tie >= 0, tie)
            entries.append(entry)
        graph = OpGraph(
            name=f"{shared.graph.name}/{self.number}",
            values=tuple(self.values),
            inputs=tuple(entries),
            num_hidden=0,
            ops=tuple(replace(op, index=n) for n, (_, op, _) in enumerate(ops)),
            outputs=tuple(operand for _, _, operand in exits),
            output_names=tuple(name for _, name, _ in exits),
        )
        verify_graph(graph)
        return StageGraph(
            self.number,
            shared.micro.count,
            graph,
            tuple(task for task, _, _ in ops),
            tuple(origin for _, _, origin in ops),
            tuple(self.ports),
            tuple(exit_ for exit_, _, _ in exits),
            tuple(sorted(gathered)),
        )

    def _is_gathered_here(self, value: int, task: str) -> bool:
        """Only what a later task or an exit of this stage reads is gathered."""
        new = self.env[task, value]
        late = any(t not in LOOPED and new in op.reads for t, op, _ in self.ops)
        handed = any(o == value for _, o in self.shared.results(self.number))
        return late or handed or (value, True) in self.sends


def _task_order(ops: Sequence[tuple[str, Op, int]]) -> list[str]:
    updates = {task for task, _, _ in ops if task not in (BEFORE_ALL, *LOOPED)}
    return [BEFORE_ALL, *LOOPED, *sorted(updates, key=lambda task: int(task[1:]))]


def _needed(ops: Sequence[Op], roots: set[int]) -> list[Op]:
    wanted, kept = set(roots), []
    for op in reversed(ops):
        if op.effects or wanted.intersection(op.outputs):
            kept.append(op)
            wanted.update(op.reads)
    return kept[::-1]
