"""HLO text into frozen values: modules, computations, instructions, shapes.

The text is what ``compiled.as_text()`` prints. Only its line structure is read::

    ENTRY %main (p: f32[8,4]) -> f32[8,8] {                    a computation
      %p = f32[8,4]{1,0} parameter(0)
      ROOT %d = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, ...
            name  shape      opcode operands     attributes
    }

Operands print with or without their shapes and with or without ``%``, depending on the XLA
version, so shapes are always looked up at the instruction that defines the operand.
Attributes stay text: each reader picks what it needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import AuditError

_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(\(.*)?\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(ROOT\s+)?%?([\w.\-]+)\s+=\s+")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")
_PAREN = re.compile(r"[()]")
_BRACKET = re.compile(r"[()\[\]{},]")
_NAME = re.compile(r"%?([\w.\-]+)\s*$")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_CALLEE = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation"
    r"|called_computations|select|scatter|comparator)=(\{[^}]*\}|%?[\w.\-]+)"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_DEVICE_COUNTS = re.compile(r"\b(?:replica_count|num_partitions)=(\d+)")


@dataclass(frozen=True, slots=True)
class Shape:
    """One array shape: ``f32[8,4]`` is ``Shape("f32", (8, 4))``."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of elements; 1 for a scalar."""
        return math.prod(self.dims)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: the value it defines, without ``%``.
        opcode: as printed, e.g. ``all-reduce-start``.
        shapes: the leaves of the result's shape, one for an array.
        operands: names of the operands; for ``parameter`` and ``constant`` their literal text.
        attributes: everything after the operands, as text.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str

    @property
    def op_name(self) -> str:
        """The name JAX gave the operation (``metadata={op_name=...}``), or ``""``."""
        found = _OP_NAME.search(self.attributes)
        return found.group(1) if found else ""

    def callees(self) -> tuple[tuple[str, str], ...]:
        """Pairs (role, computation) of the computations it calls, in the order printed."""
        pairs: list[tuple[str, str]] = []
        for role, target in _CALLEE.findall(_STRING.sub('""', self.attributes)):
            pairs += [(role, name) for name in re.findall(r"[\w.\-]+", target)]
        return tuple(pairs)


@dataclass(frozen=True, slots=True)
class Computation:
    """A computation: its instructions by name, in printed order, and the name of its root."""

    name: str
    instructions: Mapping[str, Instruction]
    root: str


@dataclass(frozen=True, slots=True)
class HloModule:
    """A parsed module: computations by name, the entry's name, and the number of devices."""

    computations: Mapping[str, Computation]
    entry: str
    devices: int


def parse_module(text: str) -> HloModule:
    """Read the HLO text of one module.

    Raises:
        AuditError: there is no entry computation in the text.
    """
    computations: dict[str, Computation] = {}
    entry = ""
    body: dict[str, Instruction] = {}
    name = root = ""
    for line in _COMMENT.sub("", text).splitlines():
        header = None if line[:1].isspace() else _HEADER.match(line)
        if header and not line.startswith("HloModule"):
            name, root, body = header.group(2), "", {}
            entry = name if header.group(1) else entry
        elif name and line.startswith("}"):
            computations[name] = Computation(name, body, root)
            name = ""
        elif name and (start := _INSTRUCTION.match(line)):
            instruction = _instruction(line, start)
            body[instruction.name] = instruction
            root = instruction.name if start.group(1) or not root else root
    if entry not in computations:
        raise AuditError(
            "no entry computation in the HLO text",
            got=text[:80].replace("\n", " "),
            remedy="pass the text of jax.jit(f).lower(...).compile().as_text()",
        )
    counts = _DEVICE_COUNTS.findall(text.split("\n", 1)[0] if text else "")
    return HloModule(computations, entry, math.prod(int(count) for count in counts))


def shapes_in(text: str) -> tuple[Shape, ...]:
    """All array shapes in a piece of text, in order: ``(f32[2], s32[])`` gives two."""
    return tuple(
        Shape(dtype, tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim))
        for dtype, dims in _ARRAY.findall(text)
    )


def _instruction(line: str, start: re.Match[str]) -> Instruction:
    """Split one instruction line after its ``name =``; the line was matched by the caller."""
    begin = start.end()
    shape_end = _closing(line, begin) if line[begin] == "(" else line.find(" ", begin)
    opcode = _OPCODE.match(line, shape_end)
    if opcode is None:
        raise AuditError(
            "an HLO instruction could not be read", got=line.strip()[:160], why="no opcode found"
        )
    end = _closing(line, opcode.end() - 1)
    operands = line[opcode.end() : end - 1]
    return Instruction(
        name=start.group(2),
        opcode=opcode.group(1),
        shapes=shapes_in(line[begin:shape_end]),
        operands=_operands(operands, opcode.group(1)),
        attributes=line[end:],
    )


def _closing(text: str, start: int) -> int:
    """The position after the parenthesis that closes the one at ``start``."""
    depth = 0
    for paren in _PAREN.finditer(text, start):
        depth += 1 if paren.group() == "(" else -1
        if depth == 0:
            return paren.end()
    return len(text)


def _operands(text: str, opcode: str) -> tuple[str, ...]:
    """Operand names: the last word of each part between top-level commas."""
    if opcode in ("constant", "parameter"):
        return (text.strip(),)
    parts: list[str] = []
    depth = begin = 0
    for mark in _BRACKET.finditer(text):
        if mark.group() == "," and depth == 0:
            parts.append(text[begin : mark.start()])
            begin = mark.end()
        elif mark.group() != ",":
            depth += 1 if mark.group() in "([{" else -1
    parts.append(text[begin:])
    names = (_NAME.search(part) for part in parts)
    return tuple(name.group(1) for name in names if name)
