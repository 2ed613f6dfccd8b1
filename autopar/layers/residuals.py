"""What a stage keeps of its forward for its backward: the fewest bytes, by a minimum cut.

A value that the backward reads is either kept or made again from values that are kept. Only ops
without contractions are run twice. Values are nodes with their bytes as capacity; every path from
what cannot be made again to what the backward reads has to be cut somewhere. Of several smallest
cuts the one next to the backward is taken, which repeats the least work.

The formulation is that of the min-cut recomputation of PyTorch's AOTAutograd
(https://dev-discuss.pytorch.org/t/467).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import networkx as nx

from autopar.ir.graph import Op, OpGraph
from autopar.rules.rule import Rule

_NEEDED, _FIXED = "needed", "fixed"


def choose_kept(
    graph: OpGraph,
    rules: Sequence[Rule],
    forward: Sequence[Op],
    needed: Collection[int],
    *,
    given: Mapping[int, bool],
) -> frozenset[int]:
    """Values to keep from the forward to the backward.

    Args:
        graph, rules: the ops and values.
        forward: the stage's forward ops, in order.
        needed: values the backward reads.
        given: values the forward has without making them; True: they must be kept to be at hand in
            the backward (received ones), False: they are at hand anyway (parameters, the batch).
    """
    made = {value for op in forward for value in op.outputs}
    wanted = [v for v in sorted(needed) if v in made or given.get(v, False)]
    if not wanted:
        return frozenset()
    flow = nx.DiGraph()
    flow.add_node(_FIXED)
    costly = {value for value, kept in given.items() if kept}
    # Edges run from the backward to what is fixed, so that the cut lies next to the backward.
    for value in sorted(made | costly):
        flow.add_edge(("out", value), ("in", value), capacity=float(graph.values[value].nbytes))
    for value in sorted(costly):
        flow.add_edge(("in", value), _FIXED)
    for op in forward:
        fixed = rules[op.index].flops > 0 or op.effects
        for value in op.outputs:
            if fixed:
                flow.add_edge(("in", value), _FIXED)
                continue
            for operand in op.reads:
                if operand in made or operand in costly:
                    flow.add_edge(("in", value), ("out", operand))
    for value in wanted:
        flow.add_edge(_NEEDED, ("out", value))
    _, (near, _) = nx.minimum_cut(flow, _NEEDED, _FIXED)
    return frozenset(
        value for value in made | costly if ("out", value) in near and ("in", value) not in near
    )
