"""HiGHS through PuLP.

PuLP reports "Optimal" after a time-out, so status and bound are read from HiGHS itself.
"""

from __future__ import annotations

import math
from typing import Any

import highspy
import pulp

from autopar.solver.intra.backends import MIP_GAP, RANDOM_SEED, THREADS, Outcome

# The tightest that HiGHS takes is 1e-10; its default of 1e-6 lets a binary be 1e-6 short.
TOLERANCE = 1e-9


def solve(model: Any, seconds: float) -> Outcome:
    """Solve `model` in place; see `autopar.solver.intra.backends`."""
    solver = pulp.HiGHS(
        msg=False,
        timeLimit=seconds,
        gapRel=MIP_GAP,
        gapAbs=MIP_GAP,
        threads=THREADS,
        random_seed=RANDOM_SEED,
        mip_feasibility_tolerance=TOLERANCE,
        primal_feasibility_tolerance=TOLERANCE,
        dual_feasibility_tolerance=TOLERANCE,
    )
    # The three steps of PuLP's own solve, less its reading of values, which fails when a
    # time-out leaves none.
    solver.createAndConfigureSolver(model)
    solver.buildSolverModel(model)
    solver.callSolver(model)
    highs = model.solverModel
    status, info = highs.getModelStatus(), highs.getInfo()
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    if feasible:
        values = highs.getSolution().col_value
        for variable in model.variables():
            variable.varValue = values[variable.index]
    bound = info.mip_dual_bound
    return Outcome(
        status=highs.modelStatusToString(status),
        feasible=feasible,
        infeasible=status == highspy.HighsModelStatus.kInfeasible,
        bound=bound if math.isfinite(bound) else -math.inf,
    )
