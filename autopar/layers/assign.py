"""Which stage each op of a micro graph belongs to.

Forward ops lie on the line, which is cut. The rest follows by dataflow:

- What needs no parameter, and what runs before the loop, is nobody's: who needs it makes it.
- A backward op runs as late a stage as its cotangents come from, but not later than the stages that
  hold what else it reads: `dW = x' dy` where `x` and `W` are. What reads cotangents alone moves
  down to the stage that takes its result, if nothing more has to be sent for that.
- The update of a leaf is where its parameter is first used. What adds up whole arrays of several
  stages (a tied weight's gradients) is moved out of the loop, so that it happens once a step.
- Scalars of several stages (a global norm) are worked out on one of them, the coordinator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.graph import Op, OpGraph
from autopar.layers.hoist import hoist_sums
from autopar.layers.line import Line
from autopar.rules.rule import Rule
from autopar.trace.backward import FORWARD
from autopar.trace.batch import AFTER, BEFORE, LOOP
from autopar.trace.micro_graph import MicroGraph

ANYWHERE = -1
"""The stage of ops that whoever needs them runs."""

COORDINATOR = 0
"""The stage of scalars that several stages have a part in: the first ends its backward last."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Every op in its stage.

    Attributes:
        micro: the graph; sums of several stages are moved behind its loop.
        stages: their number.
        of: per op its stage, or ANYWHERE.
        homes: per graph input, the stage that keeps it; ANYWHERE for what any stage is given.
    """

    micro: MicroGraph
    stages: int
    of: tuple[int, ...]
    homes: tuple[int, ...]


def assign(
    micro: MicroGraph, rules: Sequence[Rule], line: Line, starts: Sequence[int]
) -> Assignment:
    """Put every op into a stage.

    Args:
        micro, rules: the step.
        line: its forward line.
        starts: first position on the line of each stage.
    """
    work = _Work(micro, tuple(rules), len(starts))
    work.place_forward(line, starts)
    work.place_backward()
    work.settle_homes()
    work.move_down()
    work.hoist()
    work.place_after()
    return Assignment(work.micro, len(starts), tuple(work.of), work.final_homes())


@dataclass
class _Work:
    """The state of one `assign`; each method is one pass."""

    micro: MicroGraph
    rules: tuple[Rule, ...]
    stages: int
    of: list[int] = field(default_factory=list)
    maker: dict[int, Op] = field(default_factory=dict)
    users: dict[int, list[Op]] = field(default_factory=dict)
    homes: dict[int, int] = field(default_factory=dict)
    held: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.of = [ANYWHERE] * len(self.graph.ops)
        self.maker = {value: op for op in self.graph.ops for value in op.outputs}
        for op in self.graph.ops:
            for operand in dict.fromkeys(op.reads):
                self.users.setdefault(operand, []).append(op)

    @property
    def graph(self) -> OpGraph:
        return self.micro.graph

    def in_loop(self, op: Op) -> bool:
        return self.micro.phases[op.index] == LOOP

    def nobodys(self, op: Op) -> bool:
        """Whether whoever needs the op's results makes them."""
        return self.micro.phases[op.index] == BEFORE or (
            self.in_loop(op) and self.micro.free.issuperset(op.outputs)
        )

    def stage_of(self, value: int) -> int:
        """Stage that makes a value; ANYWHERE for inputs and what is nobody's."""
        op = self.maker.get(value)
        return ANYWHERE if op is None else self.of[op.index]

    # --- forward -------------------------------------------------------------------------------

    def place_forward(self, line: Line, starts: Sequence[int]) -> None:
        """Cut the line; then note which stages hold each value in the forward."""
        bounds = [*starts, len(line.ops)]
        for stage in range(self.stages):
            for index in line.ops[bounds[stage] : bounds[stage + 1]]:
                self.of[index] = stage
        forward = set(line.ops)
        for op in reversed(self.graph.ops):
            if op.index in forward:
                for value in (*op.outputs, *op.reads):
                    self._hold(value, self.of[op.index], self.of[op.index])
            elif self.nobodys(op):
                spans = [self.held[v] for v in op.outputs if v in self.held]
                for low, high in spans:
                    for value in op.reads:
                        self._hold(value, low, high)

    def _hold(self, value: int, low: int, high: int) -> None:
        known = self.held.get(value, (low, high))
        self.held[value] = (min(known[0], low), max(known[1], high))

    # --- backward ------------------------------------------------------------------------------

    def place_backward(self) -> None:
        """No later than where the cotangents come from, nor than where the rest is held.

        What the forward makes never goes back to an earlier stage, though: an op that reads values
        of several stages (the backward of a scan whose forward was hoisted) runs on the last.
        """
        for op in self.graph.ops:
            if not self.in_loop(op) or self.of[op.index] >= 0 or self.nobodys(op):
                continue
            held, cotangents, least = self.stages - 1, self.stages - 1, 0
            for value in op.reads:
                maker = self.maker.get(value)
                if maker is not None and self._is_backward(maker):
                    cotangents = min(cotangents, self.of[maker.index])
                elif value in self.held:
                    held = min(held, self.held[value][1])
                    least = max(least, self.stage_of(value))
            self.of[op.index] = min(cotangents, max(held, least))

    def _is_backward(self, op: Op) -> bool:
        return self.in_loop(op) and not self.nobodys(op) and self.micro.regions[op.index] != FORWARD

    def move_down(self) -> None:
        """Ops that only read cotangents go where their result is wanted, if it costs nothing."""
        gathered = dict(self.micro.gathered)
        for op in reversed(self.graph.ops):
            if not self._is_backward(op):
                continue
            wanted = {self.of[user.index] for v in op.outputs for user in self.users.get(v, [])}
            wanted |= {self.homes[v] for v in op.outputs if v in gathered and v in self.homes}
            wanted.discard(ANYWHERE)
            here, there = self.of[op.index], max(wanted, default=ANYWHERE)
            if 0 <= there < here and self._can_move(op, there, gathered):
                self.of[op.index] = there

    def _can_move(self, op: Op, there: int, gathered: Mapping[int, str]) -> bool:
        here, fresh = self.of[op.index], 0
        for value in op.reads:
            maker = self.maker.get(value)
            if maker is None or not self._is_backward(maker):
                low, high = self.held.get(value, (0, self.stages - 1))
                if not low <= there <= high:
                    return False
            elif self.of[maker.index] == here and not any(
                self.of[user.index] == there for user in self.users[value] if user is not op
            ):
                fresh += self.graph.values[value].nbytes
        once = all(value in gathered for value in op.outputs)
        return fresh <= (0 if once else sum(self.graph.values[v].nbytes for v in op.outputs))

    # --- homes ---------------------------------------------------------------------------------

    def settle_homes(self) -> None:
        """Parameters live where the forward first uses them; what becomes them is wanted there."""
        entries = self.graph.inputs
        for entry in entries:
            if entry.value in self.held and entry.tied_output >= 0:
                self.homes[entry.value] = self.held[entry.value][0]
        wanted: dict[int, int] = {}
        for entry in entries:
            result = self.graph.outputs[entry.tied_output] if entry.tied_output >= 0 else None
            if entry.value in self.homes and isinstance(result, int):
                wanted.setdefault(result, self.homes[entry.value])
        for op in reversed(self.graph.ops):
            stage = next((wanted[v] for v in op.outputs if v in wanted), None)
            if stage is None or self.micro.phases[op.index] != AFTER:
                continue
            size = self.graph.values[op.outputs[0]].size
            for value in op.reads:
                if self.graph.values[value].size == size > 1:
                    wanted.setdefault(value, stage)
        self.homes = {**wanted, **self.homes}

    def hoist(self) -> None:
        """Run after the loop what adds up arrays of several stages."""
        self.micro, moved = hoist_sums(self.micro, self.rules, self.of)
        for number in moved:
            self.of[number] = ANYWHERE

    # --- after the loop ------------------------------------------------------------------------

    def place_after(self) -> None:
        """Updates at home, sums of whole arrays with most of their bytes, scalars together."""
        after = [op for op in self.graph.ops if self.micro.phases[op.index] == AFTER]
        for op in after:
            at_home = [self.homes[v] for v in op.outputs if v in self.homes]
            self.of[op.index] = at_home[0] if at_home else self._by_operands(op)
        for op in reversed(after):
            if self.of[op.index] == ANYWHERE:
                later = [
                    self.of[user.index]
                    for v in op.outputs
                    for user in self.users.get(v, [])
                    if self.of[user.index] >= 0
                ]
                sized = any(self.graph.values[v].size > 1 for v in op.outputs)
                self.of[op.index] = later[0] if later and sized else COORDINATOR
        for entry in self.graph.inputs:
            result = self.graph.outputs[entry.tied_output] if entry.tied_output >= 0 else None
            if isinstance(result, int) and self.stage_of(result) != ANYWHERE:
                self.homes.setdefault(entry.value, self.stage_of(result))
        for op in after:
            for value in op.reads:
                if value not in self.maker:
                    self.homes.setdefault(value, self.of[op.index])

    def _by_operands(self, op: Op) -> int:
        bytes_at: dict[int, int] = {}
        scalars: set[int] = set()
        for value in op.reads:
            stage = (
                self.homes.get(value, ANYWHERE) if value not in self.maker else self.stage_of(value)
            )
            if stage < 0:
                continue
            if self.graph.values[value].size > 1:
                bytes_at[stage] = bytes_at.get(stage, 0) + self.graph.values[value].nbytes
            else:
                scalars.add(stage)
        if bytes_at:
            return max(bytes_at, key=lambda stage: (bytes_at[stage], -stage))
        if not scalars:
            return ANYWHERE
        return scalars.pop() if len(scalars) == 1 else COORDINATOR

    def final_homes(self) -> tuple[int, ...]:
        """The stage that keeps each input that is state; the others are given to who needs them."""
        return tuple(
            self.homes.get(entry.value, COORDINATOR) if entry.tied_output >= 0 else ANYWHERE
            for entry in self.graph.inputs
        )
