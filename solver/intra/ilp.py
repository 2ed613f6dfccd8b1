"""The pairwise problem as an integer linear program (Zheng et al. 2022, "Alpa", section 4.2).

For each node `i` and choice `s` a binary `x[i,s]`; for each edge `e = (a,b)` and each pair `(s,t)`
with a finite cost a continuous `y[e,s,t]` in [0, 1]; impossible pairs have no variable.

    minimise    sum_i,s c_i[s] x[i,s]  +  sum_e,s,t E_e[s,t] y[e,s,t]      _objective
    subject to  sum_s x[i,s]   = 1          for each node i                 _one_choice
                sum_t y[e,s,t] = x[a,s]     for each edge e, choice s of a  _marginals
                sum_s y[e,s,t] = x[b,t]     for each edge e, choice t of b  _marginals
                sum_i,s w_r,i[s] x[i,s] <= limit_r   for each resource r    _resources

With `x` integral the marginals leave exactly `y[e,s,t] = x[a,s] x[b,t]`, so `y` needs no branching.
`formulate` writes the model, a back-end solves it, `decode` reads the choices; `solve` is the
three in a row. Costs are divided by their median non-zero magnitude: solvers' tolerances are
absolute, and unscaled costs of 1e-8 s come back "optimal" tens of percent too dear.

This module is loaded in the solver process only (see `ilp_process`). Node and edge numbers make
every name unique: CBC dies without a message on duplicates.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp

from autopar.solver.intra.backends import load_backend
from autopar.solver.intra.problem import Choices, Problem
from autopar.solver.intra.wire import Answer

# The least time a back-end gets when building the model has used up the limit.
MIN_SOLVE_SECONDS = 1.0

Pairs = dict[tuple[int, int], Any]


@dataclass(frozen=True, slots=True)
class Formulation:
    """A model and the meaning of its variables.

    Attributes:
        model: the `pulp.LpProblem`.
        x: node variables, `x[i][s]`; None where the choice is impossible.
        y: edge variables, `y[e][s, t]`.
        scale: seconds per unit of the model's objective.
    """

    model: Any
    x: tuple[tuple[Any | None, ...], ...]
    y: tuple[Pairs, ...]
    scale: float


def formulate(problem: Problem) -> Formulation:
    """Write the model of a problem with merged edges."""
    scale = cost_scale(problem)
    model = pulp.LpProblem("intra_op", pulp.LpMinimize)
    x = tuple(
        tuple(
            model.add_variable(f"x_{i}_{s}", cat=pulp.LpBinary) if finite else None
            for s, finite in enumerate(np.isfinite(costs))
        )
        for i, costs in enumerate(problem.node_costs)
    )
    y: tuple[Pairs, ...] = tuple(
        {
            (int(s), int(t)): model.add_variable(f"y_{e}_{s}_{t}", 0, 1)
            for s, t in np.argwhere(np.isfinite(edge.costs))
        }
        for e, edge in enumerate(problem.edges)
    )
    formulation = Formulation(model, x, y, scale)
    model.setObjective(_objective(problem, formulation))
    _one_choice(formulation)
    _marginals(problem, formulation)
    _resources(problem, formulation)
    return formulation


def cost_scale(problem: Problem) -> float:
    """The median magnitude of all finite non-zero costs, in seconds; 1 if there are none."""
    arrays = [*problem.node_costs, *(e.costs for e in problem.edges)]
    magnitudes = np.abs(np.concatenate([a.ravel() for a in arrays] or [np.empty(0)]))
    magnitudes = magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)]
    return float(np.median(magnitudes)) if len(magnitudes) else 1.0


def _objective(problem: Problem, formulation: Formulation) -> Any:
    terms = {
        variable: float(costs[s]) / formulation.scale
        for costs, variables in zip(problem.node_costs, formulation.x, strict=True)
        for s, variable in enumerate(variables)
        if variable is not None
    }
    for edge, pairs in zip(problem.edges, formulation.y, strict=True):
        terms.update((v, float(edge.costs[st]) / formulation.scale) for st, v in pairs.items())
    return pulp.LpAffineExpression(terms)


def _one_choice(formulation: Formulation) -> None:
    model = formulation.model
    for i, variables in enumerate(formulation.x):
        terms = {v: 1.0 for v in variables if v is not None}
        model += pulp.LpAffineExpression(terms) == 1, f"one_{i}"


def _marginals(problem: Problem, formulation: Formulation) -> None:
    model = formulation.model
    for e, (edge, pairs) in enumerate(zip(problem.edges, formulation.y, strict=True)):
        for side, node in enumerate((edge.a, edge.b)):
            rows: list[dict[Any, float]] = [{} for _ in formulation.x[node]]
            for pair, variable in pairs.items():
                rows[pair[side]][variable] = 1.0
            for s, (terms, variable) in enumerate(zip(rows, formulation.x[node], strict=True)):
                if variable is not None:
                    terms[variable] = -1.0
                if terms:
                    row = pulp.LpAffineExpression(terms) == 0
                    model += row, f"marginal_{e}_{side}_{s}"


def _resources(problem: Problem, formulation: Formulation) -> None:
    model = formulation.model
    for r, resource in enumerate(problem.resources):
        # Divided by the largest number in the row, for the same reason as costs are scaled.
        unit = max(abs(resource.limit), *(float(np.abs(w).max()) for w in resource.weights)) or 1.0
        terms = {
            variable: float(weights[s]) / unit
            for weights, variables in zip(resource.weights, formulation.x, strict=True)
            for s, variable in enumerate(variables)
            if variable is not None and weights[s]
        }
        row = pulp.LpAffineExpression(terms) <= resource.limit / unit
        model += row, f"resource_{r}"


def decode(formulation: Formulation) -> Choices:
    """The choice with the largest value per node; values are integral up to tolerance."""

    def value(variable: Any | None) -> float:
        return -1.0 if variable is None else float(variable.varValue or 0.0)

    return tuple(int(np.argmax([value(v) for v in variables])) for variables in formulation.x)


def solve(problem: Problem, backend: str, seconds: float) -> Answer:
    """Formulate, solve with the back-end at "module:attribute", decode.

    Args:
        problem: merged edges, at least one node.
        backend: location of the back-end.
        seconds: for building and solving together.
    """
    start = time.monotonic()
    run = load_backend(backend)
    formulation = formulate(problem)
    left = seconds - (time.monotonic() - start)
    outcome = run(formulation.model, max(MIN_SOLVE_SECONDS, left))
    choices = decode(formulation) if outcome.feasible else None
    bound = outcome.bound * formulation.scale
    return Answer(choices, bound, outcome.status, outcome.infeasible)
