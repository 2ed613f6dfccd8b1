"""Where an equation comes from. JAX has no public accessor for it; delete when it gets one."""

from __future__ import annotations

import os
import traceback
from typing import Any

import jax

_JAX_ROOT = os.path.dirname(jax.__file__) + os.sep
_OWN_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# What stands between a user's line and the equations of a parallelised function called there.
_OWN = tuple(os.path.join(_OWN_ROOT, name) for name in ("guard.py", "api.py", "lower" + os.sep))
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", "<frozen")


def _line(frame: Any) -> int:
    return int(getattr(frame, "line_num", 0) or getattr(frame, "start_line", 0))


def user_source(source_info: Any) -> str:
    """`folder/file.py:12 (function)`: the innermost frame outside installed libraries.

    Falls back to the innermost frame outside JAX, then to the empty string. Only the last two
    path components are kept, so that a plan reads the same on every host.
    """
    traceback = getattr(source_info, "traceback", None)
    if traceback is None:
        return ""
    fallback = ""
    for frame in traceback.frames:
        name = frame.file_name
        if name.startswith((_JAX_ROOT, *_OWN)) or "importlib" in name:
            continue
        text = f"{_short(name)}:{_line(frame)} ({frame.function_name})"
        if not any(part in name for part in _LIBRARIES):
            return text
        fallback = fallback or text
    return fallback


def _short(path: str) -> str:
    return "/".join(path.replace(os.sep, "/").split("/")[-2:])


def scope_of(source_info: Any) -> str:
    """The equation's own name stack, `jvp()/transpose(jvp())`, without its callers'."""
    return str(getattr(source_info, "name_stack", ""))


def user_line(error: BaseException) -> str:
    """`file.py:12`: the last line of the user's code that was running when `error` was raised."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OWN_ROOT, "<")) and "importlib" not in frame.filename
    ]
    theirs = [f for f in frames if not any(part in f.filename for part in _LIBRARIES)] or frames
    return f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""
