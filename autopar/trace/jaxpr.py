"""From a Python function and its arguments to a ClosedJaxpr and the names of its leaves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from autopar._compat.source import user_line
from autopar._compat.static_args import static_positions
from autopar.errors import AutoparError, TraceError


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of the arguments or results.

    Attributes:
        argument: position or keyword of the argument (for results: position in a tuple, or "").
        path: path inside it, `blocks/0/q`.
        name: `params/blocks/0/q`, with the argument's name.
        aval: shape and dtype.
        donated: whether the caller gives the buffer away.
    """

    argument: int | str
    path: str
    name: str
    aval: Any
    donated: bool = False


@dataclass(frozen=True, slots=True)
class TracedFunction:
    """A traced function.

    Attributes:
        name: for people.
        jaxpr: the ClosedJaxpr, closed over its constants.
        inputs, outputs: leaves in flat order.
        in_tree: tree of `(args, kwargs)` without static arguments.
        out_tree: tree of the results.
        static: positions and keywords of static arguments.
    """

    name: str
    jaxpr: Any
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    in_tree: Any
    out_tree: Any
    static: frozenset[int | str] = frozenset()


def _key_text(key: Any) -> str:
    if isinstance(key, DictKey | FlattenedIndexKey):
        return str(key.key)
    if isinstance(key, SequenceKey):
        return str(key.idx)
    return str(key.name) if isinstance(key, GetAttrKey) else str(key).strip(".[]'")


def _path_text(path: Sequence[Any]) -> str:
    return "/".join(_key_text(key) for key in path)


def _argument_names(function: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [names[i] if i < len(names) else f"arg{i}" for i in range(count)]


def ensure_jitted(function: Callable[..., Any]) -> Any:
    """The function as a `jax.jit` object.

    Raises:
        TraceError: it is not callable, or is some other library's jit wrapper.
    """
    if not callable(function):
        raise TraceError(
            "only functions can be parallelised",
            got=repr(function)[:80],
            remedy="pass the train step itself, plain or wrapped in jax.jit",
        )
    module = type(function).__module__
    if module.startswith(("flax.", "equinox.")):
        raise TraceError(
            f"a {module.split('.')[0]} jit wrapper cannot be parallelised",
            got=f"{module}.{type(function).__qualname__}",
            why="it hides the arrays of the module from jax.jit",
            remedy="split the module into (graph definition, state) and pass a pure function",
        )
    if hasattr(function, "trace") and hasattr(function, "lower"):
        return function
    return jax.jit(function)


def trace_function(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> TracedFunction:
    """Trace `function` on arrays or ShapeDtypeStructs; nothing runs.

    Raises:
        TraceError: the function cannot be traced by `jax.jit`.
    """
    jitted = ensure_jitted(function)
    try:
        traced = jitted.trace(*args, **kwargs)
    except AutoparError:
        raise
    except Exception as error:
        raise TraceError(
            f"jax.jit cannot trace {getattr(function, '__name__', 'the function')}",
            where=user_line(error),
            why=str(error).splitlines()[0] if str(error) else type(error).__name__,
            remedy="make jax.jit(step)(...) work on one device first",
        ) from error
    inner = inspect.unwrap(function)
    infos = jax.tree_util.tree_flatten_with_path(traced.args_info)[0]
    names = _argument_names(inner, len(args))
    dynamic = _dynamic_positions(jitted, traced.args_info[0], args)
    inputs = tuple(_input_leaf(path, info, names, dynamic) for path, info in infos)
    flat_out, out_tree = jax.tree_util.tree_flatten_with_path(traced.out_info)
    outputs = tuple(_output_leaf(path, info) for path, info in flat_out)
    return TracedFunction(
        getattr(inner, "__name__", "function"),
        traced.jaxpr,
        inputs,
        outputs,
        jax.tree_util.tree_structure(traced.args_info),
        out_tree,
        frozenset(set(range(len(args))) - set(dynamic)) | (set(kwargs) - set(traced.args_info[1])),
    )


def _dynamic_positions(jitted: Any, dynamic: Sequence[Any], args: Sequence[Any]) -> list[int]:
    """Original positions of the arguments that are not static.

    Args:
        jitted: the `jax.jit` object.
        dynamic: what `args_info` says of the positional arguments; static ones are left out.
        args: all positional arguments.
    """
    static = static_positions(jitted, len(args))
    if static is not None and len(args) - len(static) == len(dynamic):
        return [position for position in range(len(args)) if position not in static]
    positions: list[int] = []
    for info in dynamic:
        start = positions[-1] + 1 if positions else 0
        fitting = (p for p in range(start, len(args)) if _fits(args[p], info))
        positions.append(next(fitting, start))
    return positions


def _fits(argument: Any, info: Any) -> bool:
    """Whether an argument has the tree and the shapes that `info` tells."""
    tree: Any = jax.tree_util.tree_structure(argument)
    if tree != jax.tree_util.tree_structure(info):
        return False
    leaves, wanted = jax.tree_util.tree_leaves(argument), jax.tree_util.tree_leaves(info)
    return all(
        not isinstance(leaf, str) and np.shape(leaf) == want.shape
        for leaf, want in zip(leaves, wanted, strict=True)
    )


def _input_leaf(
    path: Sequence[Any], info: Any, names: Sequence[str], positions: Sequence[int]
) -> Leaf:
    group, rest = path[0].idx, path[1:]
    aval = jax.ShapeDtypeStruct(info.shape, info.dtype)
    inner = _path_text(rest[1:])
    if group == 0:
        position = positions[rest[0].idx]
        argument: int | str = position
        label = names[position] if position < len(names) else f"arg{position}"
    else:
        argument = label = _key_text(rest[0])
    name = f"{label}/{inner}" if inner else label
    return Leaf(argument, inner, name, aval, bool(info.donated))


def _output_leaf(path: Sequence[Any], info: Any) -> Leaf:
    aval = jax.ShapeDtypeStruct(info.shape, info.dtype)
    text = _path_text(path)
    if path and isinstance(path[0], SequenceKey):
        return Leaf(path[0].idx, _path_text(path[1:]), f"out/{text}", aval)
    return Leaf("", text, f"out/{text}" if text else "out", aval)
