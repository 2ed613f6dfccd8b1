"""Files are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from autopar.errors import AutoparError


def write_atomically(
    path: str | os.PathLike[str], text: str, *, kind: type[AutoparError] = AutoparError
) -> None:
    """Write a text file through a temporary file beside it.

    Args:
        path: the file; its folder must exist.
        text: what it will hold.
        kind: the error to raise.

    Raises:
        AutoparError: of that kind; nothing has changed then.
    """
    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(target)
    except OSError as error:
        raise kind(
            "a file cannot be written",
            where=str(path),
            why=str(error),
            remedy="a folder that exists and may be written to",
        ) from error
    finally:
        part.unlink(missing_ok=True)
