"""The frozen plan: decisions, their price list, and the fingerprint of the function they are for.

No program is in it. `lower` takes (plan, jaxpr); a function with another fingerprint is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import Step
from autopar.ir.sharding import Sharding

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True)
class CostSummary:
    """Predicted figures of one step on each device.

    Attributes:
        compute_seconds: roofline time of all ops.
        communication_seconds: of all collectives.
        peak_bytes: most bytes alive at once, inputs and outputs included.
    """

    compute_seconds: float
    communication_seconds: float
    peak_bytes: int

    @property
    def step_seconds(self) -> float:
        """Compute and communication, one after the other."""
        return self.compute_seconds + self.communication_seconds


@dataclass(frozen=True, slots=True)
class SolverReport:
    """How the decisions were found.

    Attributes:
        name: solver or strategy.
        objective: seconds of the steady-state step as the solver priced it.
        lower_bound: no plan of the searched space costs less.
        gap: (objective - lower_bound) / objective; 0 is proven optimal.
        seconds: wall-clock time spent; not part of the plan's identity.
        notes: what a reader should know.
    """

    name: str
    objective: float
    lower_bound: float
    gap: float
    seconds: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Boundary:
    """One leaf of the arguments or results under the plan.

    Attributes:
        name: path.
        shape: global shape.
        dtype: its name.
        sharding: layout, nothing pending.
        donated: (arguments) whether the buffer is given away.
        tied: (arguments) index of the result that is its next value, or -1.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding
    donated: bool = False
    tied: int = -1


@dataclass(frozen=True, slots=True)
class ReshardChoice:
    """The steps chosen for one value between two shardings."""

    value: int
    source: Sharding
    target: Sharding
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class PricedCollective:
    """A line of the price list; equal lines are folded.

    Attributes:
        kind: all-reduce, reduce-scatter, all-gather or all-to-all.
        axes: mesh axes.
        elements: of the full tensor on these axes.
        bytes: of the same.
        times: how often a step runs it.
        seconds: of one run.
        source: the user's line.
        name: parameter path or op name.
        reduction: `sum`, `max`, ..., or empty.
    """

    kind: str
    axes: tuple[str, ...]
    elements: int
    bytes: int
    times: int
    seconds: float
    source: str
    name: str
    reduction: str = ""


@dataclass(frozen=True, slots=True)
class FrozenPlan:
    """A complete plan.

    Attributes:
        function: name of the planned function.
        jax_version: that traced it.
        fingerprint: of equations, wiring, shapes and JAX version.
        signatures: per op, what it is (`mul f32[4] f32[4] -> f32[4]`), for naming a difference.
        cluster, mesh: hardware and logical mesh.
        method: how it was asked for.
        inputs, outputs: boundary leaves; closed-over arrays are the last `num_hidden` inputs.
        strategies: per op, `x:b y:k` text (see rules.strategy).
        settled: (value, layout) of sums finished once for several uses.
        reshards: steps of every reshard, in execution order.
        collectives: price list.
        cost, solver: predicted figures and where they come from.
        notes: replicated ops and other remarks.
    """

    function: str
    jax_version: str
    fingerprint: str
    signatures: tuple[str, ...]
    cluster: Cluster
    mesh: Mesh
    method: str
    inputs: tuple[Boundary, ...]
    outputs: tuple[Boundary, ...]
    num_hidden: int
    strategies: tuple[str, ...]
    settled: tuple[tuple[int, Sharding], ...]
    reshards: tuple[ReshardChoice, ...]
    collectives: tuple[PricedCollective, ...]
    cost: CostSummary
    solver: SolverReport
    notes: tuple[str, ...] = ()
