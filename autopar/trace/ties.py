"""Which result is the next step's value of which argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.trace.jaxpr import Leaf


def tie_state(
    inputs: Sequence[Leaf], outputs: Sequence[Leaf], state_argnums: Sequence[int] | None
) -> tuple[int, ...]:
    """Per input leaf, the index of the output leaf tied to it, or -1.

    A result is tied to an argument leaf of the same tree path, shape and dtype: first counting
    the position of the argument and of the result, `step(params, ...) -> (params, ...)`, then by
    the path inside them alone, `step(params, batch) -> (loss, params)`. First match, each once.

    Args:
        inputs: argument leaves.
        outputs: result leaves.
        state_argnums: arguments that may be tied; all of them if None.
    """
    tied = [-1] * len(inputs)
    taken: set[int] = set()

    def same(one: Leaf, other: Leaf) -> bool:
        return one.aval.shape == other.aval.shape and one.aval.dtype == other.aval.dtype

    def match(agrees: Callable[[Leaf, Leaf], bool]) -> None:
        for i, leaf in enumerate(inputs):
            allowed = state_argnums is None or leaf.argument in state_argnums
            if tied[i] >= 0 or not allowed:
                continue
            for o, result in enumerate(outputs):
                if o not in taken and same(leaf, result) and agrees(leaf, result):
                    tied[i] = o
                    taken.add(o)
                    break

    match(lambda leaf, result: (leaf.argument, leaf.path) == (result.argument, result.path))
    match(lambda leaf, result: leaf.path == result.path and (leaf.path != "" or state_argnums))
    return tuple(tied)
