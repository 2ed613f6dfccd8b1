"""FLOPs of the dots and convolutions in HLO, from their shapes.

A multiply-add is two FLOPs. A dot has ``output elements x contracted size`` multiply-adds.
A convolution is counted by the (output position, kernel tap) pairs that meet an element of the
input: taps in the padding or in the holes of a dilated input multiply by a zero nobody wrote, and
are left out. So a convolution and its two gradients count the same (each multiply-add of the
forward pass is one in either gradient), however XLA writes them: swapped operands, dilated inputs,
feature groups as one more spatial dim. Without padding and dilation this is
``2 x output elements x kernel taps x input features / groups``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autopar.report.hlo_text import Computation, Instruction, Shape

_DIMS = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_MATMUL = re.compile(r"matmul|gemm", re.IGNORECASE)
_CONVOLUTION = re.compile(r"\$conv", re.IGNORECASE)
_CONTRACTION = re.compile(r"matmul|gemm|conv|\bdot", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _WindowDim:
    """One spatial dim of a convolution's window; ``low`` is the padding before the input."""

    stride: int
    low: int
    input_dilation: int
    kernel_dilation: int


def contraction_flops(instruction: Instruction, computation: Computation) -> int | None:
    """FLOPs of one run of a dot, a convolution, or a library call that is one of them.

    0 for every other instruction; None for a library call that looks like a matrix
    multiplication or a convolution but whose operands do not tell its size.
    """
    if instruction.opcode not in _COUNTERS:
        return 0
    operands = tuple(
        computation.instructions[name].shapes[0]
        for name in instruction.operands
        if name in computation.instructions and computation.instructions[name].shapes
    )
    return _COUNTERS[instruction.opcode](instruction, operands)


def _dot(instruction: Instruction, operands: tuple[Shape, ...]) -> int | None:
    found = _DIMS.search(instruction.attributes)
    dims = [int(dim) for dim in found.group(1).split(",") if dim] if found else []
    contracted = math.prod(operands[0].dims[dim] for dim in dims)
    return 2 * instruction.shapes[0].elements * contracted


def _convolution(instruction: Instruction, operands: tuple[Shape, ...]) -> int | None:
    return _window_flops(instruction, (operands[0], operands[1], instruction.shapes[0]))


def _custom_call(instruction: Instruction, operands: tuple[Shape, ...]) -> int | None:
    """A library call: oneDNN, cuBLAS and cuDNN name what they do in the target."""
    found = _TARGET.search(instruction.attributes)
    target = found.group(1) if found else ""
    if not _CONTRACTION.search(target):
        return 0
    if len(operands) < 2 or not instruction.shapes:
        return None
    first, second, result = operands[0], operands[1], instruction.shapes[0]
    if _MATMUL.search(target):
        return _matmul(first, second, result)
    if not _CONVOLUTION.search(target):
        return None
    # window and labels of the gradient calls are those of the forward convolution
    if "BackwardInput" in target:
        return _window_flops(instruction, (result, second, first))
    if "BackwardFilter" in target:
        return _window_flops(instruction, (first, result, second))
    return _window_flops(instruction, (first, second, result))


def _matmul(first: Shape, second: Shape, result: Shape) -> int | None:
    """FLOPs of a (batched) matrix product from element counts, whichever operand is transposed.

    With batch size b: [b,m,k] x [b,k,n] -> [b,m,n], so first * second / result = b k^2.
    """
    batch = math.prod(result.dims[:-2])
    divisor = batch * result.elements
    if divisor == 0:
        return 0
    contracted = math.isqrt(first.elements * second.elements // divisor)
    if contracted * contracted * divisor != first.elements * second.elements:
        return None
    return 2 * result.elements * contracted


def _window_flops(instruction: Instruction, shapes: tuple[Shape, Shape, Shape]) -> int | None:
    """FLOPs of a convolution given its (input, kernel, output), in the order of dim_labels."""
    labels = _LABELS.search(instruction.attributes)
    if labels is None:
        return None
    image, kernel, output = (
        _labelled(labels.group(place), shape) for place, shape in enumerate(shapes, start=1)
    )
    flops = 2 * output["b"] * output["f"] * kernel["i"]
    for position, window in enumerate(_window(instruction, len(output) - 2)):
        dim = str(position)
        flops *= _meetings(window, image[dim], kernel[dim], output[dim])
    return flops


def _labelled(labels: str, shape: Shape) -> dict[str, int]:
    return dict(zip(labels, shape.dims, strict=True))


def _window(instruction: Instruction, rank: int) -> tuple[_WindowDim, ...]:
    found = _WINDOW.search(instruction.attributes)
    fields = dict(item.split("=", 1) for item in found.group(1).split()) if found else {}

    def values(name: str, default: str) -> list[str]:
        return fields[name].split("x") if name in fields else [default] * rank

    return tuple(
        _WindowDim(int(stride), int(pad.split("_")[0]), int(input_dilation), int(kernel_dilation))
        for stride, pad, input_dilation, kernel_dilation in zip(
            values("stride", "1"),
            values("pad", "0_0"),
            values("lhs_dilate", "1"),
            values("rhs_dilate", "1"),
            strict=True,
        )
    )


def _meetings(window: _WindowDim, image: int, kernel: int, output: int) -> int:
    """Pairs (output position, kernel tap) of one dim that meet an element of the input."""
    extent = (image - 1) * window.input_dilation + 1
    count = 0
    for tap in range(kernel):
        offset = tap * window.kernel_dilation - window.low
        places = (offset + position * window.stride for position in range(output))
        count += sum(0 <= place < extent and not place % window.input_dilation for place in places)
    return count


_COUNTERS: Mapping[str, Callable[[Instruction, tuple[Shape, ...]], int | None]] = {
    "dot": _dot,
    "ragged-dot": _dot,
    "scaled-dot": _dot,
    "convolution": _convolution,
    "custom-call": _custom_call,
}
