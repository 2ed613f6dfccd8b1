"""Golden makespans, transfers against an independent simulation, and deadlocks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from autopar.errors import ArgumentError, ScheduleError
from autopar.plan.schedule import Action, Schedule
from autopar.solver.schedules.communicate import Edges, chain, communicate
from autopar.solver.schedules.deadlock import Channels, check_no_deadlock
from autopar.solver.schedules.registry import make_schedule
from autopar.solver.schedules.simulate import Durations, Memory, simulate

SIZES = ((4, 8), (4, 16), (8, 32))


def unit(stages: int, transfer: Callable[[int, int, str], float] | None = None) -> Durations:
    if transfer is None:
        return Durations((1.0,) * stages, (2.0,) * stages)
    return Durations((1.0,) * stages, (2.0,) * stages, transfer=transfer)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_golden_makespans(name: str) -> None:
    """F = 1, B = 2, no transfer time."""
    found = [simulate(make_schedule(name, p, m), unit(p)).makespan for p, m in SIZES]
    assert found == [33, 57, 117]


def test_golden_activations() -> None:
    assert simulate(make_schedule("gpipe", 4, 8), unit(4)).peak_live == (8, 8, 8, 8)
    assert simulate(make_schedule("1f1b", 4, 8), unit(4)).peak_live == (4, 3, 2, 1)
    assert simulate(make_schedule("1f1b", 4, 2), unit(4)).peak_live == (2, 2, 2, 1)
    memory = Memory((10.0,) * 4, (1.0, 2.0, 3.0, 4.0))
    timeline = simulate(make_schedule("1f1b", 4, 8), unit(4), memory)
    assert timeline.peak_bytes == (14, 16, 16, 14)


def test_inference_is_forward_only() -> None:
    assert simulate(make_schedule("inference", 4, 8), unit(4)).makespan == 11


def by_relaxation(schedule: Schedule, durations: Durations, edges: Edges) -> float:
    """The makespan as longest paths: every start is raised until nothing is violated.

    Transfers of a directed pair of ranks follow each other in the order in which they are ready.
    """
    ends: dict[tuple[str, int, int], float] = {}
    arrivals: dict[tuple[str, int, int, int], float] = {}
    rows = [[a for a in row if isinstance(a, Action)] for row in schedule.ranks]
    for _ in range(1000):
        before = dict(ends)
        for row in rows:
            clock = 0.0
            for action in row:
                needs = [clock]
                if action.kind == "B":
                    needs.append(ends.get(("F", action.stage, action.micro), 0.0))
                pairs = edges.forward if action.kind == "F" else edges.backward
                for a, b in pairs:
                    if b == action.stage:
                        key = (action.kind, a, b, action.micro)
                        needs.append(arrivals.get(key, 0.0))
                clock = max(needs) + durations.of(action)
                ends[action.kind, action.stage, action.micro] = clock
        for source, target in itertools.permutations(range(schedule.stages), 2):
            ready = sorted(
                (ends[kind, source, micro], number, kind, micro)
                for number, (kind, micro) in enumerate(
                    (kind, micro)
                    for kind in "FB"
                    for micro in range(schedule.micro_batches)
                    if (source, target) in (edges.forward if kind == "F" else edges.backward)
                )
            )
            free = 0.0
            for end, _, kind, micro in ready:
                free = max(free, end) + durations.transfer(source, target, kind)
                arrivals[kind, source, target, micro] = free
        if ends == before:
            break
    return max(ends.values())


@pytest.mark.parametrize("seed", range(30))
def test_transfers_as_in_an_independent_simulation(seed: int) -> None:
    rng = random.Random(seed)
    stages, count = rng.randint(1, 5), rng.randint(1, 7)
    skips = [(a, b) for a in range(stages) for b in range(a + 2, stages) if rng.random() < 0.3]
    plain = chain(stages)
    edges = Edges((*plain.forward, *skips), (*plain.backward, *((b, a) for a, b in skips)))
    seconds = {
        (a, b, kind): rng.choice([0.0, 0.25, 1.0, 3.0])
        for a in range(stages)
        for b in range(stages)
        for kind in "FB"
    }
    durations = Durations(
        tuple(rng.choice([1.0, 2.0, 0.5]) for _ in range(stages)),
        tuple(rng.choice([2.0, 4.0, 1.0]) for _ in range(stages)),
        transfer=lambda a, b, kind: seconds[a, b, kind],
    )
    for name in ("gpipe", "1f1b"):
        made = make_schedule(name, stages, count)
        assert simulate(made, durations, edges=edges).makespan == pytest.approx(
            by_relaxation(made, durations, edges)
        )


CASES = list(itertools.product(("gpipe", "1f1b", "inference"), (2, 4, 8), (4, 8, 16)))


@pytest.mark.parametrize("channels", Channels)
@pytest.mark.parametrize(("name", "stages", "count"), CASES)
def test_no_deadlock(name: str, stages: int, count: int, channels: Channels) -> None:
    check_no_deadlock(communicate(make_schedule(name, stages, count)), channels)


def deferred(schedule: Schedule) -> Schedule:
    """Each receive moved to just before the action that needs it."""
    rows = []
    for row in communicate(schedule).ranks:
        actions = [a for a in row if isinstance(a, Action)]
        receives = [a for a in actions if a.kind.startswith("RECV")]
        moved: list[Action] = []
        for action in actions:
            if action in receives:
                continue
            moved += [
                r
                for r in receives
                if (r.stage, r.kind[-1], r.micro) == (action.stage, action.kind, action.micro)
            ]
            moved.append(action)
        rows.append(tuple(moved))
    return Schedule(schedule.name, schedule.stages, schedule.micro_batches, tuple(rows))


def test_a_deferred_receive_deadlocks_under_rendezvous() -> None:
    made = deferred(make_schedule("1f1b", 4, 8))
    with pytest.raises(ScheduleError, match="wait for each other") as caught:
        check_no_deadlock(made, Channels.RENDEZVOUS)
    assert "rank 0 at" in str(caught.value)
    check_no_deadlock(made, Channels.BUFFERED)
    check_no_deadlock(deferred(make_schedule("gpipe", 4, 8)), Channels.RENDEZVOUS)


def test_unknown_schedule() -> None:
    with pytest.raises(ArgumentError, match="gpipe"):
        make_schedule("dualpipe", 2, 2)
    with pytest.raises(ArgumentError, match="at least one"):
        make_schedule("1f1b", 0, 2)
