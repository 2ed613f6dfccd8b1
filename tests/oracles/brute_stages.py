"""Stage splits by brute force, timed by a small pipeline simulator of its own.

Knows nothing of the search: every cut of the layers, every sequence of submeshes, every way to lay
them on the mesh, and a step-by-step run of the schedule's rank orders.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from autopar.solver.inter.stage_problem import (
    Discipline,
    StageCost,
    StageProblem,
    StageSlice,
    gpipe_live,
    one_f_one_b_live,
)

Stages = tuple[StageSlice, ...]
Shape = tuple[int, int]
Order = Callable[[int, int, int], list[tuple[str, int]]]
"""(stages, stage, micro-batches) to the actions of that stage's rank, in order."""


def gpipe_order(stages: int, stage: int, micro_batches: int) -> list[tuple[str, int]]:
    return [(kind, i) for kind in "FB" for i in range(micro_batches)]


def one_f_one_b_order(stages: int, stage: int, micro_batches: int) -> list[tuple[str, int]]:
    warm = min(micro_batches, stages - 1 - stage)
    order = [("F", i) for i in range(warm)]
    for i in range(micro_batches - warm):
        order += [("F", warm + i), ("B", i)]
    return order + [("B", i) for i in range(micro_batches - warm, micro_batches)]


def random_orders(
    seed: int, caps: tuple[int, ...], micro_batches: int
) -> list[list[tuple[str, int]]]:
    """Rank orders of some schedule that keeps at most `caps[s]` micro-batches in flight on `s`.

    One action after the other is drawn from all that could run now: such orders never deadlock.
    """
    rng = np.random.default_rng(seed)
    count = len(caps)
    orders: list[list[tuple[str, int]]] = [[] for _ in caps]
    done: set[tuple[str, int, int]] = set()

    def ready(kind: str, s: int, i: int) -> bool:
        if (kind, s, i) in done:
            return False
        if kind == "B":
            return ("F", s, i) in done and (s == count - 1 or ("B", s + 1, i) in done)
        in_flight = sum(1 if kind == "F" else -1 for kind, _ in orders[s])
        return in_flight < caps[s] and (s == 0 or ("F", s - 1, i) in done)

    everything = list(itertools.product("FB", range(count), range(micro_batches)))
    while len(done) < len(everything):
        actions = [action for action in everything if ready(*action)]
        kind, s, i = actions[int(rng.integers(len(actions)))]
        done.add((kind, s, i))
        orders[s].append((kind, i))
    return orders


SCHEDULES = {
    "gpipe": (gpipe_order, gpipe_live, Discipline.FORWARDS_FIRST),
    "1f1b": (one_f_one_b_order, one_f_one_b_live, Discipline.CAPPED),
}


def simulate(problem: StageProblem, order: Order, stages: Stages) -> float:
    """The end of the last action, each as early as its rank and its inputs allow."""
    count, m = len(stages), problem.micro_batches
    chosen = [problem.cost(*stage) for stage in stages]
    assert all(cost is not None for cost in chosen)
    costs = [cost for cost in chosen if cost is not None]
    transfer_back = problem.transfer_back or problem.transfer
    queues = [order(count, s, m) for s in range(count)]
    ends: dict[tuple[str, int, int], float] = {}
    clocks = [0.0] * count

    def arrival(kind: str, s: int, i: int) -> float | None:
        if kind == "F":
            if s == 0:
                return 0.0
            move = problem.transfer(stages[s].first, stages[s - 1].submesh, stages[s].submesh)
            end = ends.get(("F", s - 1, i))
        elif s == count - 1:
            move, end = 0.0, ends.get(("F", s, i))
        else:
            after = stages[s + 1]
            move = transfer_back(after.first, after.submesh, stages[s].submesh)
            end = ends.get(("B", s + 1, i))
        return None if end is None else end + move

    while any(queues):
        moved = False
        for s, queue in enumerate(queues):
            while queue and (ready := arrival(queue[0][0], s, queue[0][1])) is not None:
                kind, i = queue.pop(0)
                seconds = costs[s].forward if kind == "F" else costs[s].backward
                clocks[s] = max(clocks[s], ready) + seconds
                ends[kind, s, i] = clocks[s]
                moved = True
        assert moved, "deadlock"
    return max(clock + cost.update for clock, cost in zip(clocks, costs, strict=True))


def closed_formula(problem: StageProblem, stages: Stages) -> float:
    costs = [problem.cost(*stage) for stage in stages]
    times = [cost.forward + cost.backward for cost in costs if cost is not None]
    transfer_back = problem.transfer_back or problem.transfer
    moves = sum(
        problem.transfer(b.first, a.submesh, b.submesh)
        + transfer_back(b.first, b.submesh, a.submesh)
        for a, b in itertools.pairwise(stages)
    )
    return sum(times) + moves + (problem.micro_batches - 1) * max(times)


def all_splits(problem: StageProblem) -> Iterator[Stages]:
    """Every split that runs, fits memory and tiles the mesh."""
    for count in range(1, problem.layers + 1):
        for cuts in itertools.combinations(range(1, problem.layers), count - 1):
            edges = (0, *cuts, problem.layers)
            for submeshes in _sequences(problem, count):
                stages = tuple(
                    StageSlice(first, stop - 1, submesh)
                    for first, stop, submesh in zip(edges, edges[1:], submeshes, strict=False)
                )
                if _fits(problem, stages):
                    yield stages


def _sequences(problem: StageProblem, count: int) -> Iterator[tuple[int, ...]]:
    for submeshes in itertools.product(range(len(problem.submeshes)), repeat=count):
        shapes = tuple(sorted(problem.submeshes[a] for a in submeshes))
        if sum(map(math.prod, shapes)) == problem.devices and tiles(problem.mesh, shapes):
            yield submeshes


def _fits(problem: StageProblem, stages: Stages) -> bool:
    if any(problem.cost(*stage) is None for stage in stages):
        return False
    return peak_bytes(problem, stages) <= problem.memory_bytes


@functools.cache
def tiles(mesh: Shape, shapes: tuple[Shape, ...]) -> bool:
    """Whether some choice of corners covers every cell once: all of them are tried."""

    def lay(index: int, free: frozenset[Shape]) -> bool:
        if index == len(shapes):
            return not free
        tall, wide = shapes[index]
        for row in range(mesh[0] - tall + 1):
            for column in range(mesh[1] - wide + 1):
                cells = {(row + i, column + j) for i in range(tall) for j in range(wide)}
                if cells <= free and lay(index + 1, free - cells):
                    return True
        return False

    return lay(0, frozenset(itertools.product(range(mesh[0]), range(mesh[1]))))


def random_problem(seed: int, schedule: str, *, memory: bool = False) -> StageProblem:
    """Up to 6 layers on up to 8 devices: uneven layers, imperfect scaling, absent stages."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(1, 7))
    mesh = ((1, 1), (1, 2), (1, 4), (1, 6), (2, 2), (2, 3), (1, 8), (2, 4))[int(rng.integers(8))]
    shapes = tuple(
        (h, d)
        for h in range(1, mesh[0] + 1)
        for d in range(1, mesh[1] + 1)
        if mesh[0] % h == 0 and mesh[1] % d == 0
    )
    scale = float(10.0 ** rng.integers(-6, 3))
    forward, backward = rng.uniform(0.5, 4, layers), rng.uniform(0.5, 8, layers)
    weights, activations = rng.uniform(1, 9, layers), rng.uniform(0.1, 3, layers)
    noise = rng.uniform(0.7, 1.3, (layers, layers, len(shapes)))
    absent = rng.random((layers, layers, len(shapes))) < 0.1
    power = rng.uniform(0.5, 1.1)
    moves = rng.uniform(0, 1, (layers + 1, len(shapes), len(shapes))) * rng.choice([0, 0.3, 5])
    updates = rng.uniform(0, 1) * rng.choice([0, 1, 20])

    def cost(first: int, last: int, submesh: int) -> StageCost | None:
        if absent[first, last, submesh] and (first, last) != (0, layers - 1):
            return None
        size = math.prod(shapes[submesh])
        speed = float(noise[first, last, submesh]) / size**power * scale
        part = slice(first, last + 1)
        return StageCost(
            forward=float(forward[part].sum()) * speed,
            backward=float(backward[part].sum()) * speed,
            update=float(weights[part].sum() * updates) / size * scale,
            base_bytes=float(weights[part].sum()) / size,
            activation_bytes=float(activations[part].sum()) / size,
            workspace_bytes=0.5,
        )

    def transfer(boundary: int, before: int, after: int) -> float:
        return float(moves[boundary, before, after]) * scale

    _, live, discipline = SCHEDULES[schedule]
    problem = StageProblem(
        layers=layers,
        mesh=mesh,
        submeshes=shapes,
        micro_batches=int(rng.integers(1, 9)),
        cost=cost,
        transfer=transfer,
        live=live,
        discipline=discipline if rng.random() < 0.8 else Discipline.ANY,
        memory_bytes=math.inf,
    )
    return _limited(problem, float(rng.uniform(0.05, 0.8))) if memory else problem


def _limited(problem: StageProblem, share: float) -> StageProblem:
    """The problem with a memory limit between the least and the greatest that splits need."""
    needs = sorted(peak_bytes(problem, stages) for stages in all_splits(problem))
    limit = needs[int(share * (len(needs) - 1))]
    return dataclasses.replace(problem, memory_bytes=limit)


def peak_bytes(problem: StageProblem, stages: Stages) -> float:
    """Bytes of the fullest device."""
    needs = []
    for index, stage in enumerate(stages):
        cost = problem.cost(*stage)
        assert cost is not None
        live = problem.live(len(stages), index, problem.micro_batches)
        needs.append(cost.base_bytes + live * cost.activation_bytes + cost.workspace_bytes)
    return max(needs)
