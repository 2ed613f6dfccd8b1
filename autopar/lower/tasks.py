"""The programs of one stage: its graph under its decisions, cut into tasks.

A value that one task makes and a later one reads lies in between as the first left it (pending sums
included), so that nothing is moved that the plan does not say. What the loop gathers is gathered
that way too, block by block and without communication: the gradients' one reduction is part of the
first task after the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from autopar.ir.graph import Input, Literal, Op, OpGraph
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import Step
from autopar.ir.sharding import Sharding
from autopar.layers.stage_graph import BEFORE_ALL, LOOPED, StageGraph, update_task
from autopar.lower.boundary import Outside, outside
from autopar.lower.program import Decisions, Program, StepsOf, write_program
from autopar.lower.spmd import AnyMesh, local_function, map_blocks
from autopar.rules.rule import Rule
from autopar.trace.micro_graph import LAST, STACKED, SUMMED


@dataclass(frozen=True, slots=True)
class Slot:
    """A value of the stage as it lies between tasks.

    Attributes:
        value: of the stage graph.
        sharding: layout, pending sums included.
        gather: how it is gathered over the micro-batches, if this is what is gathered.
    """

    value: int
    sharding: Sharding
    gather: str = ""

    @property
    def wide(self) -> bool:
        """Whether 16-bit floats are held as 32-bit ones: they are being added up."""
        return self.gather == SUMMED


@dataclass(frozen=True, slots=True)
class StageTask:
    """One program of a stage.

    Attributes:
        name: P, F, B, U0, ...
        program: its ops; inputs and outputs in the order of the slots.
        rules: of its ops.
        inputs, outputs: what it reads and leaves.
        gathers: (output, kind) of outputs that are gathered over the micro-batches; the task takes
            what was summed and stacked so far as further inputs, in this order.
        index: the slot of the micro-batch's number, if stacking needs it; the last input.
        times: how often it runs in a step.
    """

    name: str
    program: Program
    rules: tuple[Rule, ...]
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    gathers: tuple[tuple[int, str], ...]
    index: Slot | None
    times: int

    @property
    def grown(self) -> tuple[tuple[int, str], ...]:
        """The gathers that add to what is there; of the others the last one counts."""
        return tuple(entry for entry in self.gathers if entry[1] != LAST)

    def forms(self) -> tuple[tuple[Outside, ...], tuple[Outside, ...]]:
        """Forms of all inputs (slots, gathered so far, index) and of all outputs."""
        mesh, values = self.program.mesh, self.program.graph.values
        entries = [entry.value for entry in self.program.graph.inputs]
        ins = [
            outside(values[v].shape, values[v].dtype, slot.sharding, mesh, wide=slot.wide)
            for v, slot in zip(entries, self.inputs, strict=True)
        ]
        graph = self.program.graph
        outs = [
            outside(graph.shape_of(o), graph.dtype_of(o), slot.sharding, mesh, wide=slot.wide)
            for o, slot in zip(graph.outputs, self.outputs, strict=True)
        ]
        ins += [outs[position] for position, _ in self.grown]
        if self.index is not None:
            ins.append(outside((), jnp.dtype(jnp.int32), self.index.sharding, mesh))
        return tuple(ins), tuple(outs)

    @property
    def all_inputs(self) -> tuple[Slot, ...]:
        """Slots of all inputs: those it reads, those it adds to, the index."""
        gathered = tuple(self.outputs[position] for position, _ in self.grown)
        return (*self.inputs, *gathered, *([self.index] if self.index is not None else []))


def stage_tasks(
    stage: StageGraph,
    rules: Sequence[Rule],
    mesh: Mesh,
    decisions: Decisions,
    steps_of: StepsOf,
) -> tuple[StageTask, ...]:
    """Cut a decided stage into its tasks; those with nothing to do are left out.

    Args:
        stage: the graph.
        rules: of its ops.
        mesh: of the stage.
        decisions: for the whole graph.
        steps_of: chooses the steps of a reshard, by the stage graph's values.
    """
    writer = _Writer(stage, tuple(rules), mesh, decisions, steps_of)
    names = dict.fromkeys((BEFORE_ALL, *LOOPED, update_task(0), *stage.tasks))
    updates = sorted((n for n in names if n not in (BEFORE_ALL, *LOOPED)), key=lambda n: int(n[1:]))
    made = [writer.write(name, updates) for name in (BEFORE_ALL, *LOOPED, *updates)]
    return tuple(task for task in made if task is not None)


class _Writer:
    """Writes task after task; `held` says how each value lies after those written so far."""

    def __init__(
        self,
        stage: StageGraph,
        rules: tuple[Rule, ...],
        mesh: Mesh,
        decisions: Decisions,
        steps_of: StepsOf,
    ) -> None:
        self.stage, self.graph, self.rules, self.mesh = stage, stage.graph, rules, mesh
        self.decisions, self.steps_of = decisions, steps_of
        self.settled = dict(decisions.settled)
        self.gathered = dict(stage.gathered)
        self.totals: dict[int, Slot] = {}
        self.task_of = {v: stage.tasks[op.index] for op in self.graph.ops for v in op.outputs}
        self.held = {
            entry.value: Slot(entry.value, sharding)
            for entry, sharding in zip(self.graph.inputs, decisions.inputs, strict=True)
        }
        # A result that is an argument as it lies is handed on; no task makes it.
        self.given = frozenset(self.held.values())
        self.index = next(
            (
                entry.value
                for entry, port in zip(self.graph.inputs, stage.ports, strict=True)
                if port.kind == "index"
            ),
            None,
        )

    def write(self, name: str, updates: Sequence[str]) -> StageTask | None:
        """One task, or None if it would do nothing."""
        ops = [op for op in self.graph.ops if self.stage.tasks[op.index] == name]
        finished: dict[int, Sharding] = {}
        if name == updates[0]:
            self.held.update(self.totals)
            finished = {v: self.settled[v] for v in self.totals if v in self.settled}
        made = self._made(ops, name)
        after = {**made, **{v: Slot(v, sharding) for v, sharding in finished.items()}}
        later = self._read_later(name, updates)
        totals = self._totals(ops) if name in LOOPED else {}
        wanted = [slot for v, slot in sorted(after.items()) if v in later]
        outputs = tuple(dict.fromkeys([*wanted, *self._exits(name), *totals.values()]))
        if not outputs and not any(op.effects for op in ops):
            return None
        task = self._task(name, ops, outputs, finished)
        self.held.update(after)
        self.totals.update(totals)
        return task

    def _made(self, ops: Sequence[Op], name: str) -> dict[int, Slot]:
        """How what the task makes lies afterwards; sums that are gathered are not settled yet."""
        held = {}
        for op in ops:
            for value, sharding in zip(op.outputs, self.decisions.ops[op.index].outs, strict=True):
                late = name in LOOPED and value in self.gathered
                held[value] = Slot(value, sharding if late else self.settled.get(value, sharding))
        return held

    def _totals(self, ops: Sequence[Op]) -> dict[int, Slot]:
        return {
            value: Slot(value, sharding, self.gathered[value])
            for op in ops
            for value, sharding in zip(op.outputs, self.decisions.ops[op.index].outs, strict=True)
            if value in self.gathered
        }

    def _exits(self, name: str) -> list[Slot]:
        sides = zip(self.stage.exits, self.graph.returned, self.decisions.outputs, strict=True)
        return [
            Slot(value, sharding)
            for exit_, value, sharding in sides
            if self._exit_task(value, exit_.kind) == name
            and Slot(value, sharding) not in self.given
        ]

    def _read_later(self, name: str, updates: Sequence[str]) -> set[int]:
        """Values that later tasks read as this one leaves them."""
        order = [BEFORE_ALL, *LOOPED, *updates]
        after = set(order[order.index(name) + 1 :])
        if name in LOOPED:
            after &= set(LOOPED)
        return {v for op in self.graph.ops if self.stage.tasks[op.index] in after for v in op.reads}

    def _exit_task(self, value: int, kind: str) -> str:
        """The task that hands a value out: the one that makes it, or the first after the loop."""
        task = self.task_of.get(value, update_task(0))
        return update_task(0) if task in LOOPED and kind != "recv" else task

    def _task(
        self,
        name: str,
        ops: Sequence[Op],
        outputs: tuple[Slot, ...],
        finished: dict[int, Sharding],
    ) -> StageTask:
        graph = self.graph
        made = {value for op in ops for value in op.outputs}
        read = {value for op in ops for value in op.reads}
        read |= {slot.value for slot in outputs} | set(finished)
        inputs = tuple(self.held[v] for v in sorted(read - made))
        number: dict[int, int] = {}
        for value in [*(slot.value for slot in inputs), *(v for op in ops for v in op.outputs)]:
            number[value] = len(number)
        old = {new: value for value, new in number.items()}
        small = OpGraph(
            name=f"{graph.name}/{name}",
            values=tuple(replace(graph.values[value], id=new) for value, new in number.items()),
            inputs=tuple(Input(number[s.value], graph.values[s.value].name) for s in inputs),
            num_hidden=0,
            ops=tuple(
                replace(
                    op,
                    index=place,
                    inputs=tuple(o if isinstance(o, Literal) else number[o] for o in op.inputs),
                    outputs=tuple(number[v] for v in op.outputs),
                )
                for place, op in enumerate(ops)
            ),
            outputs=tuple(number[slot.value] for slot in outputs),
            output_names=tuple(f"v{slot.value}" for slot in outputs),
        )

        def steps(value: int, source: Sharding, target: Sharding) -> tuple[Step, ...]:
            return self.steps_of(old[value], source, target)

        late = set(self.gathered) if name in LOOPED else set()
        settled = {v: s for v, s in self.settled.items() if v in made - late}
        decided = Decisions(
            tuple(slot.sharding for slot in inputs),
            tuple(self.decisions.ops[op.index] for op in ops),
            tuple((number[v], s) for v, s in {**settled, **finished}.items()),
            tuple(slot.sharding for slot in outputs),
        )
        gathers = tuple((n, slot.gather) for n, slot in enumerate(outputs) if slot.gather)
        stacks = any(kind == STACKED for _, kind in gathers)
        return StageTask(
            name,
            write_program(small, self.mesh, decided, steps),
            tuple(self.rules[op.index] for op in ops),
            inputs,
            outputs,
            gathers,
            self.held[self.index] if stacks and self.index is not None else None,
            self.stage.count if name in LOOPED else 1,
        )


def task_function(task: StageTask, mesh: AnyMesh) -> Callable[..., tuple[Any, ...]]:
    """The task on arrays in their outside forms: all inputs in order to all outputs."""
    local = local_function(task.program, task.rules)
    ins, outs = task.forms()
    entries = {entry.value for entry in task.program.graph.inputs}
    passed = [o in entries for o in task.program.graph.outputs]
    count = len(task.inputs)

    def run(*blocks: Any) -> tuple[Any, ...]:
        given = zip(ins[:count], blocks[:count], strict=True)
        results = list(local(*(form.enter(block) for form, block in given)))
        # A result that is an argument must not share its memory.
        results = [jnp.copy(r) if p else r for r, p in zip(results, passed, strict=True)]
        left = [form.leave(result) for form, result in zip(outs, results, strict=True)]
        for number, (place, kind) in enumerate(task.grown):
            sums = outs[place].sums
            left[place] = _gather(kind, blocks[count + number], left[place], blocks[-1], sums)
        return tuple(left)

    return map_blocks(run, mesh, ins, outs)


def _gather(kind: str, so_far: Any, new: Any, index: Any, dim: int) -> Any:
    """What is gathered with one more micro-batch; stacks have the micro-batches at `dim`."""
    if kind == SUMMED:
        return so_far + new
    entry = jax.lax.index_in_dim(new, 0, dim, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(so_far, entry, index, dim)
