"""The user's `FILE.py:make` or `module:make`: from a text to a function and its arguments."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

from autopar._compat.source import user_line
from autopar.errors import ArgumentError

DEFAULT_MAKE = "make"
"""The function called where the text names none."""

_FORMS = "FILE.py:make or module:make, where make() returns (step, args[, batch_argnums])"


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be planned.

    Attributes:
        name: short, for file names: the file's or module's last part.
        step: the function, plain or jitted.
        args: its arguments, arrays or ShapeDtypeStructs.
        batch_argnums: positions of those that hold examples; empty if not told.
    """

    name: str
    step: Callable[..., Any]
    args: tuple[Any, ...]
    batch_argnums: tuple[int, ...] = ()


def load_target(text: str) -> Target:
    """Import the file or module and call its function.

    The file's folder (for a module, the current one) is put on the import path first, as Python
    does for a script.

    Raises:
        ArgumentError: there is no such file, module or function, it raises, or it returns
            something else.
    """
    where, separator, function = text.rpartition(":")
    if not separator or function.endswith(".py"):
        where, function = text, DEFAULT_MAKE
    if not where or not function.isidentifier():
        raise ArgumentError("not a target", got=repr(text), remedy=_FORMS)
    from_file = where.endswith(".py") or "/" in where
    module = _module_of_file(Path(where)) if from_file else _module_named(where)
    make = getattr(module, function, None)
    if not callable(make):
        raise ArgumentError(f"{where} has no function {function!r}", remedy=_FORMS)
    try:
        made = make()
    except Exception as error:
        raise _user_error(f"{function}() raised", error) from error
    return _target(module.__name__.rpartition(".")[2], made, f"{where}:{function}")


def _target(name: str, made: Any, where: str) -> Target:
    parts = made if _is_tuple(made) else ()
    step, args, batch = (*parts, ())[:3] if len(parts) in (2, 3) else (None, None, None)
    if not callable(step) or not _is_tuple(args) or not _is_tuple(batch):
        kinds = [type(part).__name__ for part in made] if _is_tuple(made) else type(made).__name__
        raise ArgumentError(
            "the function returned something else than a step and its arguments",
            where=where,
            got=str(kinds),
            remedy="return (step, args) or (step, args, batch_argnums), args and batch_argnums "
            "being tuples",
        )
    return Target(name, step, args, batch)


def _is_tuple(value: Any) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(value, tuple)


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ArgumentError("there is no such file", got=str(path), remedy=_FORMS)
    path = path.resolve()
    name = path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ArgumentError("not a Python file", got=str(path), remedy=_FORMS)
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) != str(path):
        # A file named like a module that is loaded already must not take its place.
        spec = importlib.util.spec_from_file_location(f"target_{name}", path)
        assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _import_from(path.parent)
    # Dataclasses and pickles look their module up while its body runs.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise _user_error("the file cannot be loaded", error) from error
    return module


def _module_named(name: str) -> ModuleType:
    _import_from(Path.cwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise _user_error(f"the module {name!r} cannot be loaded", error) from error


def _import_from(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _user_error(what: str, error: Exception) -> ArgumentError:
    """An error of the user's code, with the last line of theirs that was running."""
    return ArgumentError(
        what,
        where=user_line(error),
        got=f"{type(error).__name__}: {error}",
        remedy="--traceback shows where it comes from",
    )
