"""A schedule for people: its grid, and what it takes if a backward takes twice its forward."""

from __future__ import annotations

from autopar.plan.schedule import Schedule, grid_text
from autopar.solver.schedules.communicate import communicate
from autopar.solver.schedules.registry import make_schedule
from autopar.solver.schedules.simulate import Durations, simulate


def show_schedule(
    name: str, stages: int, micro_batches: int, *, sends: bool
) -> tuple[Schedule, str]:
    """The schedule, and a text about it.

    Raises:
        ArgumentError: there is no such schedule.
    """
    made = make_schedule(name, stages, micro_batches)
    durations = Durations((1.0,) * stages, (2.0,) * stages)
    timeline = simulate(made, durations)
    work = max(sum(e.end - e.start for e in timeline.events if e.rank == r) for r in range(stages))
    live = ", ".join(map(str, timeline.peak_live))
    shown = communicate(made) if sends else made
    lines = [
        grid_text(shown),
        f"with F = 1 and B = 2 it takes {timeline.makespan:g}, of which a rank works {work:g}",
        f"activations held at most, by rank: {live}",
    ]
    return shown, "\n".join(lines)
