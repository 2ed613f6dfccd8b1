"""The graph's text form: one line an op, stable across runs and processes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.ir.graph import Literal, Op, Operand, OpGraph

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def short_type(shape: tuple[int, ...], dtype: Any) -> str:
    """`f32[2,3]` and the like."""
    name = str(dtype)
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("complex", "c")):
        name = name.replace(long, short)
    name = name.replace("int", "i")
    return f"{name}[{','.join(map(str, shape))}]"


def params_text(params: Mapping[str, Any]) -> str:
    """Parameters in name order, without memory addresses or empty ones."""
    shown = []
    for key in sorted(params):
        value = params[key]
        empty = value is None or (isinstance(value, tuple) and not value)
        if empty or key in ("sharding", "out_sharding"):
            continue
        text = getattr(value, "__name__", None) if callable(value) else None
        shown.append(f"{key}={_ADDRESS.sub('', text or str(value))}")
    return " ".join(" ".join(shown).split())


def operand_text(graph: OpGraph, operand: Operand) -> str:
    """`v12:f32[4]` or the literal's value."""
    if isinstance(operand, Literal):
        return f"{operand.value}:{short_type(operand.shape, operand.dtype)}"
    return f"v{operand}:{short_type(graph.values[operand].shape, graph.values[operand].dtype)}"


def wires_text(operands: Sequence[Operand]) -> str:
    """Which values they are, and what the literals say: `3 =1.0 4`."""
    return " ".join(f"={o.value}" if isinstance(o, Literal) else str(o) for o in operands)


def signature(graph: OpGraph, op: Op) -> str:
    """What an op is, without which values it uses: `mul f32[4] f32[4] -> f32[4]`."""
    ins = " ".join(_signature_operand(graph, operand) for operand in op.inputs)
    outs = " ".join(short_type(graph.values[v].shape, graph.values[v].dtype) for v in op.outputs)
    params = params_text(op.params)
    return f"{op.name} {ins} -> {outs}" + (f" {{{params}}}" if params else "")


def _signature_operand(graph: OpGraph, operand: Operand) -> str:
    if isinstance(operand, Literal):
        return f"{operand.value}:{short_type(operand.shape, operand.dtype)}"
    return short_type(graph.values[operand].shape, graph.values[operand].dtype)


def graph_text(graph: OpGraph, *, sources: Mapping[str, str] | None = None) -> str:
    """The whole graph as text.

    Args:
        graph: a verified graph.
        sources: how to print source locations (full text to short text); none are printed if None.
    """
    lines = [f"graph {graph.name}"]
    for entry in graph.inputs:
        notes = " donated" if entry.donated else ""
        notes += f" tied->{entry.tied_output}" if entry.tied_output >= 0 else ""
        lines.append(f"  in  {operand_text(graph, entry.value)} {entry.name}{notes}")
    for op in graph.ops:
        outs = ", ".join(operand_text(graph, v) for v in op.outputs)
        ins = ", ".join(str(o.value) if isinstance(o, Literal) else f"v{o}" for o in op.inputs)
        params = params_text(op.params)
        line = f"  {outs} = {op.name}({ins})" + (f" {{{params}}}" if params else "")
        lines.append(line + (f"  # {sources[op.source]}" if sources and op.source else ""))
    for name, operand in zip(graph.output_names, graph.outputs, strict=True):
        lines.append(f"  out {operand_text(graph, operand)} {name}")
    return "\n".join([*lines, *(f"  note {note}" for note in graph.notes)]) + "\n"
