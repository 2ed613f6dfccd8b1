"""Which result is the next step's value of which argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from autopar.trace.jaxpr import Leaf


def tie_state(
    inputs: Sequence[Leaf], outputs: Sequence[Leaf], state_argnums: Sequence[int] | None
) -> tuple[int, ...]:
    """Per input leaf, the index of the output leaf tied to it, or -1.

    Where as many results as arguments have the same tree of the same shapes and dtypes, they are
    tied in order: `step(params, average, batch) -> (loss, params, average)`. What is left is tied
    leaf by leaf, to a result of the same tree path, shape and dtype: first counting the position
    of the argument and of the result, `step(params, ...) -> (params, ...)`, then by the path
    inside them alone. First match, each once. Arguments that are one bare array are tied by
    position alone, unless `state_argnums` names them.

    Args:
        inputs: argument leaves.
        outputs: result leaves.
        state_argnums: arguments that may be tied; all of them if None.
    """
    tied = [-1] * len(inputs)
    taken: set[int] = set()

    def tie(source: int, result: int) -> None:
        tied[source] = result
        taken.add(result)

    def match(agrees: Callable[[Leaf, Leaf], bool]) -> None:
        for i, leaf in enumerate(inputs):
            if tied[i] >= 0 or not _allowed(leaf, state_argnums):
                continue
            for o, result in enumerate(outputs):
                if o not in taken and _same_type(leaf, result) and agrees(leaf, result):
                    tie(i, o)
                    break

    for source, result in _whole_trees(inputs, outputs, state_argnums):
        tie(source, result)
    match(lambda leaf, result: (leaf.argument, leaf.path) == (result.argument, result.path))
    bare = bool(state_argnums)
    match(lambda leaf, result: leaf.path == result.path and (leaf.path != "" or bare))
    return tuple(tied)


def _allowed(leaf: Leaf, state_argnums: Sequence[int] | None) -> bool:
    return state_argnums is None or leaf.argument in state_argnums


def _same_type(one: Leaf, other: Leaf) -> bool:
    return bool(one.aval.shape == other.aval.shape and one.aval.dtype == other.aval.dtype)


Signature = tuple[tuple[str, tuple[int, ...], Any], ...]


def _trees(leaves: Sequence[Leaf], wanted: Sequence[bool]) -> dict[Signature, list[list[int]]]:
    """Leaf positions of each argument or result, by its paths, shapes and dtypes."""
    groups: dict[int | str, list[int]] = {}
    for position, leaf in enumerate(leaves):
        if wanted[position]:
            groups.setdefault(leaf.argument, []).append(position)
    trees: dict[Signature, list[list[int]]] = {}
    for group in groups.values():
        avals = [(leaves[i].path, leaves[i].aval.shape, leaves[i].aval.dtype) for i in group]
        trees.setdefault(tuple(avals), []).append(group)
    return trees


def _whole_trees(
    inputs: Sequence[Leaf], outputs: Sequence[Leaf], state_argnums: Sequence[int] | None
) -> Iterator[tuple[int, int]]:
    results = _trees(outputs, [leaf.path != "" for leaf in outputs])
    wanted = [leaf.path != "" and _allowed(leaf, state_argnums) for leaf in inputs]
    for signature, arguments in _trees(inputs, wanted).items():
        found = results.get(signature, [])
        if len(found) == len(arguments):
            for one, other in zip(arguments, found, strict=True):
                yield from zip(one, other, strict=True)
