"""Waits for workers that may be at work for long, and tells those that hang."""

from __future__ import annotations

import time
from collections.abc import Sequence

from autopar.errors import TransportError
from autopar.runtime.board import Board
from autopar.runtime.processes import Processes
from autopar.runtime.transport.base import Request, Transport

HANG_SECONDS = 300.0
"""When no worker's position has changed for so long, one of them hangs."""

POLL_SECONDS = 0.5


class Watch:
    """Waits as long as somebody moves.

    Args:
        processes, board: of the workers.
        ranks: theirs.
        hang_seconds: nobody may stand still for longer, all together.
    """

    def __init__(
        self, processes: Processes, board: Board, ranks: Sequence[int], hang_seconds: float
    ) -> None:
        self.hang_seconds = hang_seconds
        self._processes = processes
        self._board = board
        self._ranks = tuple(ranks)

    def wait(self, transport: Transport, requests: Sequence[Request]) -> None:
        """Wait in slices; between them look whether anybody still moves.

        Raises:
            TransportError: a transfer failed, a worker has ended, or nobody has moved for long.
        """
        seen: list[tuple[int, int] | None] = []
        since = time.monotonic()
        while True:
            try:
                transport.wait(requests, timeout=POLL_SECONDS)
                return
            except TransportError:
                if not self._only_slow(requests):
                    raise
            now = self.positions()
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self.hang_seconds:
                raise TransportError(f"no worker has moved for {self.hang_seconds:g} s")

    def positions(self) -> list[tuple[int, int] | None]:
        """Where each worker is."""
        positions = self._processes.positions(self._board)
        return [positions.where(rank) for rank in self._ranks]

    def _only_slow(self, requests: Sequence[Request]) -> bool:
        """Whether a wait failed for want of time alone."""
        try:
            for request in requests:
                if request.done():
                    request.result()
        except TransportError:
            return False
        return not self._processes.last_words(0.0)
