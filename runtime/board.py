"""Where each worker of a host is, readable even after a worker was killed.

Each worker writes (step, position) into its own row of a small file that the driver has made and
mapped; what it wrote last stays when it dies.
"""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path
from typing import Any, Protocol

import numpy as np

ROW = 2
"""Numbers a worker: step, position in its instruction list."""


class Positions(Protocol):
    """Where workers are."""

    def where(self, rank: int) -> tuple[int, int] | None:
        """(step, position) of a worker; -1 where there was none yet; None if that is unknown."""


class Board:
    """The driver's side: makes the file and reads it.

    Args:
        folder: where; of the run alone.
        workers: their number.
    """

    def __init__(self, folder: Path, workers: int) -> None:
        self.path = folder / "board"
        self.path.write_bytes(np.full((workers, ROW), -1, np.int64).tobytes())
        self._map = map_board(self.path)
        self._rows: np.ndarray[Any, Any] = np.frombuffer(self._map, np.int64).reshape(workers, ROW)

    def where(self, rank: int) -> tuple[int, int]:
        """(step, position) of a worker; -1 where nothing was ever written."""
        step, position = self._rows[rank]
        return int(step), int(position)

    def close(self) -> None:
        """Give the memory back."""
        # The last view keeps the memory mapped; a later look finds where everybody was.
        self._rows = self._rows.copy()
        with contextlib.suppress(BufferError):
            self._map.close()


class BoardRow:
    """A worker's side."""

    def __init__(self, path: str, rank: int) -> None:
        numbers = memoryview(map_board(Path(path))).cast("q")
        self._row = numbers[rank * ROW : (rank + 1) * ROW]

    def write(self, step: int, position: int) -> None:
        """Say where the worker is."""
        self._row[0] = step
        self._row[1] = position


def map_board(path: Path) -> mmap.mmap:
    """The file as shared memory."""
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)
