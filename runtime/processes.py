"""What starts and ends the processes of workers, for drivers that do not know how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from autopar.lower.instructions import WorkerProgram
from autopar.runtime.board import Board, Positions
from autopar.runtime.transport.base import Transport


class Processes(Protocol):
    """The processes of the workers: started, told about each other, and ended elsewhere."""

    def start(
        self, rank: int, worker: WorkerProgram, secret: bytes, board: str, timeout: float
    ) -> None:
        """Start the process of a worker."""

    def connect(self, secret: bytes, timeout: float) -> Transport:
        """Connect all workers with each other and with the driver, whose end is returned."""

    def load(self, rank: int, program: str, code: Mapping[str, bytes]) -> None:
        """Begin to compile."""

    def loaded(self, timeout: float) -> list[int]:
        """Wait until all have compiled, and let them serve; their process ids."""

    def positions(self, board: Board) -> Positions:
        """Where the workers are: on the board, if they are on this host."""

    def last_words(self, timeout: float) -> dict[int, str]:
        """What workers that have ended had to say: JSON, or `DIED` and why; others are left out."""

    def end(self) -> None:
        """End all processes; may be called twice."""
