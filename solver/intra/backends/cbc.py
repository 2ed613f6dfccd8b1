"""CBC through PuLP: a program of its own, read from its solution file and its log.

PuLP reports "Optimal" after a time-out here too; `sol_status` tells integer answers from none,
and the bound stands only in the log.
"""

from __future__ import annotations

import math
import pathlib
import re
import tempfile
from typing import Any

import pulp

from autopar.solver.intra.backends import MIP_GAP, RANDOM_SEED, Outcome

_BOUND = re.compile(r"^Lower bound:\s+(\S+)", re.MULTILINE)
_POSSIBLE = re.compile(r"best possible (\S+)")
_RESULT = re.compile(r"^Result - (.+)$", re.MULTILINE)


def solve(model: Any, seconds: float) -> Outcome:
    """Solve `model` in place; see `autopar.solver.intra.backends`."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "cbc.log")
        solver = pulp.COIN_CMD(
            path=pulp.apis.coin_api.pulp_cbc_path,
            msg=False,
            timeLimit=seconds,
            gapRel=MIP_GAP,
            gapAbs=MIP_GAP,
            logPath=str(log),
            # `increment`: by default CBC passes over answers less than 1e-5 better.
            options=[
                f"increment {MIP_GAP}",
                f"randomSeed {RANDOM_SEED}",
                f"randomCbcSeed {RANDOM_SEED}",
            ],
        )
        model.solve(solver)
        text = log.read_text()
    result = _RESULT.search(text)
    optimal = model.sol_status == pulp.LpSolutionOptimal
    return Outcome(
        status=result.group(1).strip() if result else pulp.LpSolution[model.sol_status],
        feasible=optimal or model.sol_status == pulp.LpSolutionIntegerFeasible,
        # Not `sol_status`: PuLP does not know CBC's "Integer infeasible" there.
        infeasible=model.status == pulp.LpStatusInfeasible,
        bound=_optimal_bound(model) if optimal else read_bound(text),
    )


def _optimal_bound(model: Any) -> float:
    value = float(pulp.value(model.objective))
    return value - MIP_GAP * max(1.0, abs(value))


def read_bound(log: str) -> float:
    """The proven lower bound in a CBC log, `-inf` if there is none.

    CBC prints few digits, rounded to nearest: half a unit of the last digit is taken off.
    """
    found = _BOUND.findall(log) or _POSSIBLE.findall(log)
    if not found:
        return -math.inf
    text = found[-1].rstrip(",.)")
    digits, _, exponent = text.lower().partition("e")
    places = len(digits.partition(".")[2])
    bound = float(text) - 0.5 * 10.0 ** (int(exponent or 0) - places)
    # CBC's infinity: 1e50, or -1e50 before the first relaxation.
    return bound if abs(bound) < 1e49 else -math.inf
