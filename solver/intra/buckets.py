"""Bucket elimination proper: n-ary min-plus factors, one bucket per variable (Dechter 1999)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.intra.low_degree import Minimise
from autopar.solver.intra.problem import Array, Choices, Problem
from autopar.solver.intra.tables import Argmin

Scope = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Factor:
    """A table over some variables.

    Attributes:
        scope: the variables, ascending.
        table: seconds `[K_v for v in scope]`.
    """

    scope: Scope
    table: Array


class Buckets:
    """Factors that are still to be used, found by variable."""

    def __init__(self, problem: Problem) -> None:
        self._factors: dict[int, Factor] = {}
        self._by_variable: list[list[int]] = [[] for _ in problem.node_costs]
        self._next = 0
        for i, costs in enumerate(problem.node_costs):
            self.add(Factor((i,), costs))
        for edge in problem.edges:
            self.add(Factor((edge.a, edge.b), edge.costs))

    def add(self, factor: Factor) -> None:
        """Put a factor into the buckets of its variables."""
        self._factors[self._next] = factor
        for v in factor.scope:
            self._by_variable[v].append(self._next)
        self._next += 1

    def take(self, v: int) -> tuple[Factor, ...]:
        """Remove and return every factor that mentions `v`, oldest first."""
        alive = (i for i in self._by_variable[v] if i in self._factors)
        return tuple(self._factors.pop(i) for i in alive)


def joint_scope(scopes: Sequence[Scope], v: int) -> Scope:
    """All variables of `scopes` but `v`, ascending."""
    return tuple(sorted({a for scope in scopes for a in scope if a != v}))


def align(factor: Factor, axes: Sequence[int]) -> Array:
    """The table with one axis per variable of `axes`; size 1 where the factor has none."""
    ordered = sorted(range(len(factor.scope)), key=lambda i: axes.index(factor.scope[i]))
    index = tuple(slice(None) if a in factor.scope else None for a in axes)
    return factor.table.transpose(ordered)[index]


def eliminate(problem: Problem, order: Sequence[int], minimise: Minimise) -> tuple[Choices, float]:
    """Minimise over all nodes of `problem`, in `order`.

    Returns:
        The optimal choices and their cost in seconds; `inf` if no choice is finite.
    """
    buckets = Buckets(problem)
    steps: list[tuple[int, Scope, Argmin]] = []
    constants: list[float] = []
    for v in order:
        factors = buckets.take(v)
        scope = joint_scope([f.scope for f in factors], v)
        if not scope:
            total = np.sum([f.table for f in factors], axis=0)
            best = total.argmin()
            constants.append(float(total[best]))
            steps.append((v, (), np.asarray(best)))
            continue
        message = minimise([align(f, (v, *scope)) for f in factors])
        buckets.add(Factor(scope, message.table))
        steps.append((v, scope, message.argmin))
    choices = [0] * len(problem.node_costs)
    for v, scope, argmin in reversed(steps):
        choices[v] = int(argmin[tuple(choices[a] for a in scope)])
    return tuple(choices), math.fsum(constants)
