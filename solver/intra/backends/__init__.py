"""ILP back-ends, each named in one registry and loaded on use.

A back-end is a function `solve(model, seconds) -> Outcome`: it solves a `pulp.LpProblem` within
`seconds`, leaves the values in the model's variables, and reports the solver's own status and
dual bound. To add one: one file here, one line in `BACKENDS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.errors import SolveError

BACKENDS = {
    "highs": "autopar.solver.intra.backends.highs:solve",
    "cbc": "autopar.solver.intra.backends.cbc:solve",
}

# Stop only when the bound meets the answer to nine digits, relative and absolute; models are
# scaled to a median cost of 1. The solvers' defaults (1e-4 and 1e-6) are far too coarse.
MIP_GAP = 1e-9
RANDOM_SEED = 1
THREADS = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a back-end found.

    Attributes:
        status: the solver's own words.
        feasible: whether the model's variables hold a feasible integer answer.
        infeasible: whether the solver proved that there is none.
        bound: proven lower bound on the objective, in the model's units; `-inf` if unknown.
    """

    status: str
    feasible: bool
    infeasible: bool
    bound: float


Backend = Callable[[Any, float], Outcome]


def load_backend(location: str) -> Backend:
    """Import a back-end from "module:attribute".

    Raises:
        SolveError: the module, or the solver package that it needs, cannot be imported.
    """
    module, _, attribute = location.partition(":")
    try:
        backend: Backend = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SolveError(
            "an ILP back-end cannot be loaded",
            where=location,
            why=str(error),
            remedy='install pulp and highspy, or use solver="elimination"',
        ) from error
    return backend
