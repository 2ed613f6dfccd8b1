"""The graph's verifier: passes may assume what it proves."""

from __future__ import annotations

from autopar.errors import VerifyError
from autopar.ir.graph import Literal, OpGraph


def verify_graph(graph: OpGraph) -> None:
    """Check numbering, definition before use, single definition, ties.

    Raises:
        VerifyError: naming the op or value.
    """
    for position, value in enumerate(graph.values):
        if value.id != position:
            raise VerifyError(f"value {value.id} stands at position {position}")
    defined = _verify_inputs(graph)
    _verify_ops(graph, defined)
    for operand in graph.outputs:
        if not isinstance(operand, Literal) and operand not in defined:
            raise VerifyError(f"output v{operand} is never made")


def _verify_ops(graph: OpGraph, defined: set[int]) -> None:
    """Check each op against what is defined before it; add what it makes to `defined`."""
    for position, op in enumerate(graph.ops):
        if op.index != position:
            raise VerifyError(f"op {op.index} stands at position {position}", where=op.source)
        for operand in op.inputs:
            if not isinstance(operand, Literal) and operand not in defined:
                raise VerifyError(
                    f"op {position} ({op.name}) uses v{operand} before it is made",
                    where=op.source,
                )
        for output in op.outputs:
            if output in defined:
                raise VerifyError(
                    f"op {position} ({op.name}) makes v{output} a second time", where=op.source
                )
            defined.add(output)


def _verify_inputs(graph: OpGraph) -> set[int]:
    defined: set[int] = set()
    tied: set[int] = set()
    for entry in graph.inputs:
        if entry.value in defined:
            raise VerifyError(f"input {entry.name} enters twice")
        defined.add(entry.value)
        if entry.tied_output < 0:
            continue
        if entry.tied_output in tied:
            raise VerifyError(f"output {entry.tied_output} is tied to two inputs")
        tied.add(entry.tied_output)
        operand = graph.outputs[entry.tied_output]
        if graph.shape_of(operand) != graph.values[entry.value].shape:
            raise VerifyError(f"input {entry.name} is tied to an output of another shape")
    return defined
