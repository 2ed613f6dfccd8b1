"""From what is known after a fault to the one error that names who began it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.errors import WorkerError
from autopar.runtime.board import Positions
from autopar.runtime.peer import Peer

DIED = "died"

UNKNOWN = (-1, -1)

Words = Mapping[str, Any]
"""What a worker said at its end: `text`, `aborted` (it only followed another), or DIED."""


def diagnose(
    peers: Sequence[Peer],
    board: Positions,
    told: Mapping[int, Words],
    error: Exception,
    *,
    step: int,
) -> WorkerError:
    """The error for a step that failed: worker, stage, step, instruction, and all the others.

    Args:
        peers: all workers.
        board: where each of them was last.
        told: the last words of those that have ended; who hangs has none.
        error: what the driver saw.
        step: that was under way.
    """
    culprit, how, detail = _culprit(peers, board, told, error)
    at = board.where(culprit.rank)
    if at is None:
        place = "at an unknown instruction"
    elif at[0] < step:
        place = "before its first instruction"
    else:
        place = f"at instruction {at[1]}: {_text(culprit, board)}"
    lines = [_line(peer, board, told) for peer in peers if peer is not culprit]
    return WorkerError(
        f"worker {culprit.rank} ({culprit.stage}) {how} in step {step} {place}",
        got=detail,
        why="the others: " + ("; ".join(lines) or "there are none"),
        remedy="all workers were ended; call the step again to start new ones, with state from "
        "a checkpoint",
    )


def _culprit(
    peers: Sequence[Peer], board: Positions, told: Mapping[int, Words], error: Exception
) -> tuple[Peer, str, str]:
    """Who began it: one that died, one that raised, one that hangs, in this order."""
    for peer in peers:
        if told.get(peer.rank, {}).get(DIED):
            return peer, DIED, str(told[peer.rank]["text"])
    for peer in peers:
        words = told.get(peer.rank, {})
        if words and not words.get("aborted"):
            return peer, "failed", str(words["text"])
    silent = [peer for peer in peers if peer.rank not in told]
    # One that may wait for another silent one is not the one that hangs.
    ranks = {peer.rank for peer in silent}
    busy = [peer for peer in silent if not ranks & _waits(peer, board)]
    for peer in busy or silent:
        return peer, "hangs", str(error)
    return peers[0], "failed", str(error)


def _text(peer: Peer, board: Positions) -> str:
    _, position = board.where(peer.rank) or UNKNOWN
    return peer.texts[position] if 0 <= position < len(peer.texts) else ""


def _waits(peer: Peer, board: Positions) -> frozenset[int]:
    _, position = board.where(peer.rank) or UNKNOWN
    return peer.waits[position] if 0 <= position < len(peer.waits) else frozenset()


def _line(peer: Peer, board: Positions, told: Mapping[int, Words]) -> str:
    state = "" if peer.rank in told else ", still running"
    at = board.where(peer.rank)
    if at is None:
        return f"worker {peer.rank} at an unknown instruction{state}"
    where = _text(peer, board) or "between steps"
    return f"worker {peer.rank} in step {at[0]} at instruction {at[1]} `{where}`{state}"
