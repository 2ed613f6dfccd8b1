"""What a compiled program does: its collectives and its contraction FLOPs, from HLO text.

The text (optimised, after SPMD partitioning) is one device's program. A walk over the call graph
gives each computation the number of times it runs in one execution: a loop body runs its trip
count, every branch of a conditional counts once, and a computation with several callers adds them.

Sizes are read from operands alone, so a collective and its asynchronous ``-start`` form, whose
result also holds its operand, read the same.
"""

from __future__ import annotations

import graphlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.report.hlo_flops import contraction_flops
from autopar.report.hlo_groups import (
    Groups,
    axes_of_groups,
    axes_of_pairs,
    parse_groups,
    parse_pairs,
)
from autopar.report.hlo_text import Computation, HloModule, Instruction, parse_module

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_UNREAD_KINDS = ("ragged-all-to-all", "collective-broadcast")
_TRIP_COUNT = re.compile(r'"known_trip_count":\s*\{"n":\s*"(\d+)"\}')
_INDEX = re.compile(r"\bindex=(\d+)")


@dataclass(frozen=True, slots=True)
class HloMember:
    """One tensor that a collective carries.

    Attributes:
        elements: of the full tensor on the group: the output of an all-gather, the input of a
            reduce-scatter, the local tensor of the other kinds.
        dtype: as HLO names it; XLA for CPU widens bf16 to f32.
        op_name: JAX's name of the operation that asked for it, named scopes included. XLA's
            joint name of a merged collective, which holds the scopes of all its members, where
            their own are lost (its tuple is the program's result as it stands).
    """

    elements: int
    dtype: str
    op_name: str


@dataclass(frozen=True, slots=True)
class HloCollective:
    """One collective instruction.

    Attributes:
        kind: one of ``KINDS``.
        members: the tensors it carries; several when XLA has merged collectives into one.
        groups: device numbers that take part together; (source, target) for a permute.
        times: how often it runs in one execution of the program.
        op_name: JAX's name of the operation; of a merged one, XLA's joint name.
        computation: the HLO computation it stands in.
        name: the HLO instruction's name.
    """

    kind: str
    members: tuple[HloMember, ...]
    groups: Groups
    times: int
    op_name: str
    computation: str
    name: str

    @property
    def elements(self) -> int:
        """Elements of all members together."""
        return sum(member.elements for member in self.members)

    @property
    def dtype(self) -> str:
        """The members' dtype; joined by ``+`` when they differ."""
        return "+".join(dict.fromkeys(member.dtype for member in self.members))

    def axes(self, names: Sequence[str], sizes: Sequence[int]) -> tuple[str, ...] | None:
        """The axes of the mesh (``names``, ``sizes``) it spans; None if they do not fit it."""
        find = axes_of_pairs if self.kind == "collective-permute" else axes_of_groups
        return find(self.groups, names, sizes)


@dataclass(frozen=True, slots=True)
class HloProgram:
    """What one device does in one execution.

    Attributes:
        collectives: in the order of the text.
        dot_flops: FLOPs of dots and convolutions, trip counts included. XLA turns products with
            one contracted or one output element into elementwise code, which is not counted.
        notes: what could not be read exactly, one sentence each.
    """

    collectives: tuple[HloCollective, ...]
    dot_flops: float
    notes: tuple[str, ...]


def read_hlo(text: str) -> HloProgram:
    """Read the text of a compiled module, ``compiled.as_text()``.

    Raises:
        AuditError: the text is no HLO module, or a collective's groups cannot be read.
    """
    module = parse_module(text)
    times, notes = _run_counts(module)
    collectives: list[HloCollective] = []
    flops = 0
    for computation in module.computations.values():
        count = times.get(computation.name, 0)
        if count == 0:
            continue
        for instruction in computation.instructions.values():
            found = contraction_flops(instruction, computation)
            if found is None or instruction.opcode.removesuffix("-start") in _UNREAD_KINDS:
                notes.append(f"{instruction.name} in {computation.name} could not be sized")
            flops += count * (found or 0)
            if instruction.opcode.removesuffix("-start") in KINDS:
                collectives.append(_collective(instruction, computation, module.devices, count))
    return HloProgram(tuple(collectives), float(flops), tuple(notes))


def parallel_share(single: HloProgram, planned: HloProgram, devices: int) -> float:
    """How much of the contraction work is shared out: 1 is all of it, 1/devices none.

    The FLOPs of the one-device program over ``devices`` times those of one device of the planned
    one. 1 where the one-device program has no contraction; infinity where only the planned one
    has none.
    """
    if single.dot_flops == 0:
        return 1.0
    if planned.dot_flops == 0:
        return math.inf
    return single.dot_flops / (devices * planned.dot_flops)


def _collective(
    instruction: Instruction, computation: Computation, devices: int, times: int
) -> HloCollective:
    kind = instruction.opcode.removesuffix("-start")
    permute = kind == "collective-permute"
    groups = (
        parse_pairs(instruction.attributes)
        if permute
        else parse_groups(instruction.attributes, devices)
    )
    scale = len(groups[0]) if kind == "all-gather" else 1
    shapes = [
        shape for name in instruction.operands for shape in computation.instructions[name].shapes
    ]
    names = _member_names(instruction, computation)
    members = tuple(
        HloMember(scale * shape.elements, shape.dtype, names.get(index) or instruction.op_name)
        for index, shape in enumerate(shapes)
    )
    if kind == "all-to-all" and len(members) == len(groups[0]):
        # the tuple form: one operand for each device of the group, together one tensor
        whole = sum(member.elements for member in members)
        members = (HloMember(whole, members[0].dtype, instruction.op_name),)
    return HloCollective(
        kind, members, groups, times, instruction.op_name, computation.name, instruction.name
    )


def _member_names(instruction: Instruction, computation: Computation) -> dict[int, str]:
    """op_names by tuple index: a merged collective's elements keep those of their origins."""
    source = instruction.name
    if instruction.opcode.endswith("-start"):
        done = instruction.opcode.removesuffix("-start") + "-done"
        source = next(
            (
                other.name
                for other in computation.instructions.values()
                if other.opcode == done and other.operands[:1] == (source,)
            ),
            source,
        )
    return {
        int(index.group(1)): other.op_name
        for other in computation.instructions.values()
        if other.opcode == "get-tuple-element"
        and other.operands[:1] == (source,)
        and (index := _INDEX.search(other.attributes))
    }


def _run_counts(module: HloModule) -> tuple[dict[str, int], list[str]]:
    """How often each computation runs in one execution, and notes on what was assumed."""
    notes: list[str] = []
    calls: dict[str, list[tuple[str, int]]] = {name: [] for name in module.computations}
    order: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
    for computation in module.computations.values():
        order.add(computation.name)
        for instruction in computation.instructions.values():
            for callee, factor in _calls(instruction, computation, module, notes):
                calls[computation.name].append((callee, factor))
                order.add(callee, computation.name)
    times = dict.fromkeys(module.computations, 0)
    times[module.entry] = 1
    for caller in order.static_order():
        for callee, factor in calls.get(caller, ()):
            times[callee] = times.get(callee, 0) + times[caller] * factor
    return times, notes


def _calls(
    instruction: Instruction, computation: Computation, module: HloModule, notes: list[str]
) -> list[tuple[str, int]]:
    """(callee, runs per run of the caller) of one instruction."""
    if instruction.opcode.endswith(("-done", "-update")):  # the -start made the call
        return []
    callees = instruction.callees()
    if not callees or instruction.opcode != "while":
        return [(callee, 1) for _, callee in callees]
    known = _TRIP_COUNT.search(instruction.attributes)
    trips = int(known.group(1)) if known else _derived_trips(instruction, computation, module)
    where = f"{instruction.name} in {computation.name}"
    if trips is None:
        notes.append(f"the trip count of {where} is not known: its body counts once")
        return [(callee, 1) for _, callee in callees]
    if not known:
        notes.append(f"the trip count of {where} is {trips} if its counter moves in steps of 1")
    return [(callee, trips + (role == "condition")) for role, callee in callees]


def _derived_trips(loop: Instruction, computation: Computation, module: HloModule) -> int | None:
    """Trips of ``while (i < bound)`` with constant bound and start; None for other loops."""
    roles = dict(loop.callees())
    condition = module.computations.get(roles.get("condition", ""))
    start = computation.instructions.get(loop.operands[0]) if loop.operands else None
    if condition is None or start is None or start.opcode != "tuple":
        return None
    counter, bound = _compared(condition, module)
    if counter is None or counter.opcode != "get-tuple-element":
        return None
    index = _INDEX.search(counter.attributes)
    first = _follow(computation, start.operands[int(index.group(1))]) if index else None
    low, high = _integer(first), _integer(bound)
    return None if low is None or high is None else max(0, high - low)


def _compared(
    condition: Computation, module: HloModule
) -> tuple[Instruction | None, Instruction | None]:
    """What makes the two values whose LT comparison is the condition's result."""
    root = condition.instructions[condition.root]
    body = condition
    if root.opcode in ("fusion", "call") and root.callees():
        body = module.computations[root.callees()[0][1]]
    inner = body.instructions[body.root]
    if inner.opcode != "compare" or "direction=LT" not in inner.attributes:
        return None, None
    left, right = (_follow(body, name) for name in inner.operands)
    if body is condition:
        return left, right
    outer = [
        _follow(condition, root.operands[int(item.operands[0])])
        if item is not None and item.opcode == "parameter"
        else item
        for item in (left, right)
    ]
    return outer[0], outer[1]


def _follow(computation: Computation, name: str) -> Instruction | None:
    """The instruction that makes a value, looking through copies."""
    found = computation.instructions.get(name)
    while found is not None and found.opcode in ("copy", "bitcast"):
        found = computation.instructions.get(found.operands[0])
    return found


def _integer(instruction: Instruction | None) -> int | None:
    if instruction is None or instruction.opcode != "constant":
        return None
    literal = instruction.operands[0]
    return int(literal) if re.fullmatch(r"-?\d+", literal) else None
