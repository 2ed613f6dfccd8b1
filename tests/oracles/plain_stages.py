"""Stages run by a plain interpreter: one device, every op bound as it comes, GPipe order.

It shares nothing with the lowering: no tasks, no layouts, no instruction lists. What it proves is
that the division into stages computes the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar.ir.graph import Literal, Op
from autopar.layers.divide import Staged
from autopar.layers.stage_graph import StageGraph
from autopar.trace.microbatch import micro_slice

Env = dict[int, Any]


def _run(op: Op, env: Env) -> None:
    operands = [
        np.asarray(o.value, o.dtype) if isinstance(o, Literal) else env[o] for o in op.inputs
    ]
    results = op.primitive.bind(*operands, **op.primitive.get_bind_params(dict(op.params)))
    env.update(
        zip(op.outputs, results if op.primitive.multiple_results else [results], strict=True)
    )


def _run_task(stage: StageGraph, task: str, env: Env) -> None:
    for op, name in zip(stage.graph.ops, stage.tasks, strict=True):
        if name == task:
            _run(op, env)


class _Interpreter:
    def __init__(self, staged: Staged, args: Sequence[Any]) -> None:
        self.staged, self.args = staged, args
        self.micro = staged.divided.micro
        count = self.micro.count
        self.once: list[Env] = [{} for _ in staged.graphs]
        self.loops: list[list[Env]] = [[{} for _ in range(count)] for _ in staged.graphs]
        for stage in staged.graphs:
            self._arguments(stage)

    def _arguments(self, stage: StageGraph) -> None:
        once, loops = self.once[stage.stage], self.loops[stage.stage]
        for entry, port in zip(stage.graph.inputs, stage.ports, strict=True):
            if port.kind == "whole":
                once[entry.value] = self.args[port.source]
            elif port.kind == "constant":
                once[entry.value] = self.micro.constants[port.source]
            elif port.kind == "recv" and port.leaf >= 0:
                once[entry.value] = self.args[port.leaf]
            for number, env in enumerate(loops):
                if port.kind == "index":
                    env[entry.value] = jnp.int32(number)
                if port.kind == "micro":
                    assert port.position is not None
                    whole = self.args[port.source]
                    env[entry.value] = micro_slice(whole, port.position, len(loops), number)

    def _deliver(self, stage: StageGraph, task: str, number: int | None) -> None:
        """What a task of a stage sends, to whoever receives it."""
        made = {
            v: t for op, t in zip(stage.graph.ops, stage.tasks, strict=True) for v in op.outputs
        }
        source = self.once[stage.stage] if number is None else self.loops[stage.stage][number]
        for exit_, operand in zip(stage.exits, stage.graph.outputs, strict=True):
            assert not isinstance(operand, Literal)
            sent = exit_.kind == "total" if task == "total" else made.get(operand) == task
            if exit_.kind == "result" or not sent or (task != "total" and exit_.kind == "total"):
                continue
            for other in self.staged.graphs:
                for entry, port in zip(other.graph.inputs, other.ports, strict=True):
                    key = (port.kind, port.source, port.stage)
                    if key == (exit_.kind, exit_.target, stage.stage):
                        target = self.once if number is None else None
                        env = (
                            target[other.stage] if target else self.loops[other.stage][number or 0]
                        )
                        env[entry.value] = source[operand]

    def run(self) -> list[Any]:
        graphs, count = self.staged.graphs, self.micro.count
        for stage in graphs:
            _run_task(stage, "P", self.once[stage.stage])
        for task, order in (("F", graphs), ("B", graphs[::-1])):
            for number in range(count):
                for stage in order:
                    env = self.loops[stage.stage][number]
                    env.update({**self.once[stage.stage], **env})
                    _run_task(stage, task, env)
                    self._deliver(stage, task, number)
        for stage in graphs:
            self._gather(stage)
        for stage in graphs:
            self._deliver(stage, "total", None)
        names = {task for stage in graphs for task in stage.tasks if task[0] == "U"}
        for task in sorted(names, key=lambda name: int(name[1:])):
            for stage in graphs:
                _run_task(stage, task, self.once[stage.stage])
                self._deliver(stage, task, None)
        return self._results()

    def _gather(self, stage: StageGraph) -> None:
        for value, kind in stage.gathered:
            terms = [env[value] for env in self.loops[stage.stage]]
            if kind == "sum":
                total = terms[0]
                for term in terms[1:]:
                    total = total + term
            elif kind == "stack":
                total = jnp.stack([term[0] for term in terms])
            else:
                total = terms[-1]
            self.once[stage.stage][value] = total

    def _results(self) -> list[Any]:
        found: dict[int, Any] = {}
        for stage in self.staged.graphs:
            for exit_, operand in zip(stage.exits, stage.graph.outputs, strict=True):
                if exit_.kind == "result":
                    assert not isinstance(operand, Literal)
                    found[exit_.target] = self.once[stage.stage][operand]
        return [
            np.asarray(where.value, where.dtype) if isinstance(where, Literal) else found[where]
            for where in self.staged.divided.results
        ]


def run_stages(staged: Staged, args: Sequence[Any]) -> list[Any]:
    """The step's results, stage by stage and micro-batch by micro-batch.

    Args:
        staged: the step in stages.
        args: argument leaves, then closed-over arrays.
    """
    return _Interpreter(staged, args).run()
