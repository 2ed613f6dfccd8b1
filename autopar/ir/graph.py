"""The op graph: a flat, typed list of equations between values.

Ops stand in execution order; a value is made once, by an op, or enters as an input or a constant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import dtypes


def is_number(dtype: Any) -> bool:
    """Whether values of `dtype` can be added: not booleans, keys, or the float0 of no gradient."""
    return bool(dtypes.issubdtype(dtype, np.number))


@dataclass(frozen=True, slots=True)
class Value:
    """One array.

    Attributes:
        id: position in `OpGraph.values`.
        shape: global shape.
        dtype: numpy dtype or JAX extended dtype (keys).
        name: parameter path for inputs (`params/blocks/0/q`), else empty.
    """

    id: int
    shape: tuple[int, ...]
    dtype: Any
    name: str = ""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole value."""
        return self.size * int(getattr(self.dtype, "itemsize", 4))

    @property
    def summable(self) -> bool:
        """Whether the value may be held as pending sums (numbers can, booleans and keys not)."""
        return is_number(self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """A scalar written into the program; two of them are never the same operand."""

    value: Any
    shape: tuple[int, ...]
    dtype: Any


Operand = int | Literal
"""A value's id, or a literal."""


@dataclass(frozen=True, slots=True)
class Op:
    """One equation.

    Attributes:
        index: position in `OpGraph.ops`.
        primitive: the JAX primitive.
        params: the equation's parameters, global.
        inputs: operands.
        outputs: value ids.
        source: `file.py:12 (function)`, the user's line.
        scope: the name stack, with the enclosing calls' prefixed.
        effects: whether it does something besides computing (prints, calls back).
    """

    index: int
    primitive: Any
    params: Mapping[str, Any]
    inputs: tuple[Operand, ...]
    outputs: tuple[int, ...]
    source: str = ""
    scope: str = ""
    effects: bool = False

    @property
    def name(self) -> str:
        """The primitive's name."""
        return str(self.primitive.name)

    @property
    def reads(self) -> tuple[int, ...]:
        """The values among its operands, in their order, one as often as it is read."""
        return tuple(operand for operand in self.inputs if not isinstance(operand, Literal))


@dataclass(frozen=True, slots=True)
class Input:
    """One leaf of the arguments, or a closed-over array.

    Attributes:
        value: the value's id.
        name: parameter path.
        donated: whether the caller gives the buffer away.
        tied_output: index into `OpGraph.outputs` of the next step's value of this leaf, or -1.
    """

    value: int
    name: str
    donated: bool = False
    tied_output: int = -1


@dataclass(frozen=True, slots=True)
class OpGraph:
    """A traced function.

    Attributes:
        name: the function's name.
        values: all values, by id.
        inputs: argument leaves in flat order, then hidden inputs (closed-over arrays).
        num_hidden: how many of `inputs`, at the end, are closed-over arrays.
        ops: equations in execution order.
        outputs: operands returned, in flat order.
        output_names: their paths.
        notes: what tracing had to say (an inlined remat, say).
    """

    name: str
    values: tuple[Value, ...]
    inputs: tuple[Input, ...]
    num_hidden: int
    ops: tuple[Op, ...]
    outputs: tuple[Operand, ...]
    output_names: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def returned(self) -> tuple[int, ...]:
        """The values among its outputs, in their order, one as often as it is returned."""
        return tuple(operand for operand in self.outputs if not isinstance(operand, Literal))

    def shape_of(self, operand: Operand) -> tuple[int, ...]:
        """Global shape of an operand."""
        return operand.shape if isinstance(operand, Literal) else self.values[operand].shape

    def dtype_of(self, operand: Operand) -> Any:
        """Dtype of an operand."""
        return operand.dtype if isinstance(operand, Literal) else self.values[operand].dtype
