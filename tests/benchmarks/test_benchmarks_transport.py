from __future__ import annotations

import threading

from autopar.runtime.transport.in_process import InProcessHub
from benchmarks.pairs import Interval
from benchmarks.transport import (
    Row,
    answer,
    compare,
    copies,
    message,
    passed,
    stop,
    table,
    within,
)


def test_the_far_side_answers_until_it_is_told_to_stop() -> None:
    hub = InProcessHub()
    near, far = hub.transport(0), hub.transport(1)
    near.connect({1: far.address}, timeout=1.0)
    thread = threading.Thread(target=answer, args=(far,))
    thread.start()
    try:
        assert message(near, 1000, 1000, 3)() > 0
        assert message(near, 100_000, 0, 1)() > 0
    finally:
        stop(near)
        thread.join(10.0)
    assert not thread.is_alive()
    near.close()
    far.close()


def test_a_row_compares_messages_with_copies() -> None:
    row = compare("slow", lambda: 1e6, lambda: 1e6, pairs=3, seed=0)
    assert row.share.median < 1e-3
    assert row.copies.median > 1e3
    assert row.share.pairs == 3


def test_a_copy_takes_time() -> None:
    assert copies(1 << 20, 2)() > 0


def test_ranks_of_one_process() -> None:
    run = within(InProcessHub(), 1000, 2)
    assert run() > 0


def test_the_target_is_the_lower_end_for_shared_memory() -> None:
    high, low = Interval(0.9, 0.71, 1.0, 9), Interval(0.9, 0.69, 1.0, 9)
    slow = Row("tcp", low, low)
    assert passed([Row("shared-memory", high, low), slow])
    assert not passed([Row("shared-memory", low, high), slow])
    text = table([Row("shared-memory", high, low), slow])
    assert "shared memory at least 0.7: True" in text
    assert "0.900 [0.710, 1.000]" in text
