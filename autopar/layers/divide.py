"""From the graph of a step to the graphs of its stages: everything a plan does not have to say.

What a plan says is the batch, the number of micro-batches, and where on the forward line the stages
begin. The rest follows from the function, the same on every host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.ir.graph import Literal, Operand, OpGraph
from autopar.layers.assign import Assignment, assign
from autopar.layers.line import Line, forward_line
from autopar.layers.stage_graph import StageGraph, stage_graphs
from autopar.rules.rule import Rule
from autopar.trace.backward import split_step
from autopar.trace.micro_graph import MicroGraph, micro_graph, micro_rules


@dataclass(frozen=True)
class Divided:
    """A step as one micro-batch of its loop.

    Attributes:
        micro: the graph; its results are distinct values.
        rules: of its ops.
        results: per result of the step, a position among the results of `micro`, or a literal.
    """

    micro: MicroGraph
    rules: tuple[Rule, ...]
    results: tuple[int | Literal, ...]

    @cached_property
    def line(self) -> Line:
        """The ops between which stages are cut."""
        return forward_line(self.micro, self.rules)


@dataclass(frozen=True, slots=True)
class Staged:
    """A step in stages.

    Attributes:
        divided: what was cut.
        assignment: which op is where.
        graphs: of the stages.
    """

    divided: Divided
    assignment: Assignment
    graphs: tuple[StageGraph, ...]

    def rules(self, stage: int) -> tuple[Rule, ...]:
        """The rules of a stage's ops."""
        return self.graphs[stage].rules(self.divided.rules)


def divide_step(
    graph: OpGraph, rules: Sequence[Rule], batch: Sequence[tuple[int, int]], count: int
) -> Divided:
    """Divide a step over micro-batches.

    Args:
        graph, rules: the step.
        batch: `(value, dim)` of the inputs that hold one row per example.
        count: number of micro-batches.

    Raises:
        MicrobatchError: the batch does not divide, or the division would not be exact.
    """
    micro = micro_graph(split_step(graph, rules, batch, count))
    distinct: dict[int, int] = {}
    results: list[int | Literal] = []
    for operand in micro.graph.outputs:
        if isinstance(operand, Literal):
            results.append(operand)
        else:
            results.append(distinct.setdefault(operand, len(distinct)))
    small = replace(
        micro.graph,
        outputs=tuple(distinct),
        output_names=tuple(_names(micro.graph, distinct)),
        inputs=tuple(
            replace(entry, tied_output=_position(results, entry.tied_output))
            for entry in micro.graph.inputs
        ),
    )
    micro = replace(micro, graph=small)
    return Divided(micro, micro_rules(micro), tuple(results))


def _position(results: Sequence[Operand], number: int) -> int:
    found = results[number] if number >= 0 else -1
    return -1 if isinstance(found, Literal) else found


def _names(graph: OpGraph, distinct: dict[int, int]) -> list[str]:
    first: dict[int, str] = {}
    for operand, name in zip(graph.outputs, graph.output_names, strict=True):
        if not isinstance(operand, Literal):
            first.setdefault(operand, name)
    return [first[value] for value in distinct]


def into_stages(divided: Divided, starts: Sequence[int]) -> Staged:
    """Cut a divided step into stages that begin at `starts` on its forward line."""
    assignment = assign(divided.micro, divided.rules, divided.line, starts)
    return Staged(divided, assignment, stage_graphs(assignment, divided.rules))
