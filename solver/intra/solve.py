"""The one way in: a pairwise problem, a solver's name, limits; out comes a priced answer.

"auto" eliminates exactly where the tables fit, which is nearly always. Where they do not, or where
resource limits leave a gap, it also asks the first ILP back-end, and keeps the better answer and
the better bound of the two.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

from autopar.errors import SolveError
from autopar.solver.intra.elimination import solve_elimination
from autopar.solver.intra.ilp_process import solve_ilp
from autopar.solver.intra.problem import Limits, Problem, Solution, make_solution


def solve_auto(problem: Problem, *, limits: Limits) -> Solution:
    """Elimination; if that is not proven optimal, the ILP too, and the best of both."""
    start = time.perf_counter()
    found: list[Solution] = []
    failures: list[SolveError] = []
    for solver in (solve_elimination, functools.partial(solve_ilp, backend="highs")):
        try:
            found.append(solver(problem, limits=limits))
        except SolveError as error:
            failures.append(error)
        if found and found[-1].gap == 0:
            break
    if not found:
        raise failures[0]
    best = min(found, key=lambda s: s.objective)
    notes = [f"{s.name}: {note}" for s in found for note in s.notes]
    return make_solution(
        problem,
        best.choices,
        lower_bound=max(s.lower_bound for s in found),
        name=best.name,
        seconds=time.perf_counter() - start,
        notes=notes + [str(error).splitlines()[0] for error in failures],
    )


SOLVERS: dict[str, Callable[..., Solution]] = {
    "auto": solve_auto,
    "elimination": solve_elimination,
    "ilp-highs": functools.partial(solve_ilp, backend="highs"),
    "ilp-cbc": functools.partial(solve_ilp, backend="cbc"),
}


def solve_problem(
    problem: Problem, *, solver: str = "auto", limits: Limits | None = None
) -> Solution:
    """Solve a pairwise problem.

    Args:
        problem: nodes, choices and pairwise costs in seconds.
        solver: a key of `SOLVERS`.
        limits: seconds and bytes; the defaults of `Limits` if None.

    Raises:
        SolveError: unknown solver, infeasible problem (the error names the first node or edge
            without a finite choice), or a failed back-end.
    """
    if solver not in SOLVERS:
        raise SolveError("unknown solver", got=repr(solver), remedy=f"one of {sorted(SOLVERS)}")
    return SOLVERS[solver](problem, limits=limits or Limits())
