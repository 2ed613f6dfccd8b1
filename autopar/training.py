"""The run of `autopar demo`: the same training on a mesh and on one device, held side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import numpy as np

from autopar import demo
from autopar.api import ParallelFunction, parallelize
from autopar.cluster import Cluster
from autopar.methods import Method
from autopar.plans import Plan
from autopar.report.audit import AuditReport
from autopar.staged import StagedPlan

LARGEST_DIFFERENCE = 1e-4
"""Of the two losses of a step, relative to the one of a single device."""

LEAST_SHARE = 0.8
"""Parallel share of the plan that ran; 1 is perfectly parallel."""

LEAST_STAGE_SHARE = 0.7
"""The same for each stage of a pipeline, which has fewer rows of a batch to share out."""

RECORDED_STEP = 10
"""The step whose timeline is measured, if one is wanted: everything is warm by then."""

LAST = 20
"""Steps whose mean loss says whether the model has learned."""

LEARNED = (1.0, 2.3)
"""Bounds, in nats, on that mean after the default run."""

Watch = Callable[[int, float], None]
"""Told (steps done, loss of the last one)."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What a run showed.

    Attributes:
        config: of the run.
        parallel: loss of each step on the mesh.
        single: loss of each step on one device.
        share: parallel share of the plan that ran; of the least parallel stage, if it has stages.
        least: what the share must be.
        audit: compiled against planned.
    """

    config: demo.DemoConfig
    parallel: tuple[float, ...]
    single: tuple[float, ...]
    share: float
    audit: AuditReport
    least: float = LEAST_SHARE

    @property
    def largest_difference(self) -> float:
        """Largest relative difference of the two losses over all steps."""
        one = np.asarray(self.single)
        return float(np.max(np.abs(np.asarray(self.parallel) - one) / np.abs(one)))

    def mean_last(self, losses: tuple[float, ...]) -> float:
        """Mean of the last `LAST` losses."""
        return float(np.mean(losses[-LAST:]))

    def failures(self) -> tuple[str, ...]:
        """What was not as it should be; a run that passes has none."""
        found = []
        difference = self.largest_difference
        if not difference <= LARGEST_DIFFERENCE:
            found.append(
                f"the losses differ by up to {difference:.2g}, allowed {LARGEST_DIFFERENCE:g}"
            )
        if not self.share >= self.least:
            found.append(f"parallel share {self.share:.3f}, wanted {self.least} at least")
        if not self.audit.ok:
            found.append("the compiled program is not the planned one")
        found += (
            self._not_learned() if self.config == demo.DemoConfig(seed=self.config.seed) else []
        )
        return tuple(found)

    def _not_learned(self) -> list[str]:
        low, high = LEARNED
        means = (("parallel", self.parallel), ("single device", self.single))
        return [
            f"{name}: mean loss of the last {LAST} steps {self.mean_last(losses):.3f}, "
            f"wanted within {low} and {high}"
            for name, losses in means
            if not low < self.mean_last(losses) < high
        ]


@dataclass(frozen=True, slots=True)
class Demo:
    """The demo on a mesh, planned and ready to run."""

    config: demo.DemoConfig
    step: ParallelFunction
    plan: Plan

    def train_parallel(self, watch: Watch = lambda steps, loss: None) -> tuple[float, ...]:
        """Train on the mesh; the loss of each step."""
        return _train(self.step, self.config, watch)

    def train_single(self, watch: Watch = lambda steps, loss: None) -> tuple[float, ...]:
        """Train on one device with plain JAX; the loss of each step."""
        return _train(jax.jit(demo.make_step(self.config)), self.config, watch)

    def measure(self) -> list[list[Mapping[str, Any]]]:
        """The events of RECORDED_STEP more steps of a pipeline, per worker; the state is fresh."""
        params, opt_state = demo.init_state(self.config)
        batches = demo.batches(self.config)
        runtime = self.step.runtime(params, opt_state, next(batches))
        runtime.record(on=True)
        for batch in islice(batches, RECORDED_STEP):
            params, opt_state, loss = self.step(params, opt_state, batch)
            float(loss)
        events: list[list[Mapping[str, Any]]] = runtime.record(on=False)
        return events

    def result(self, parallel: tuple[float, ...], single: tuple[float, ...]) -> DemoResult:
        """Both runs, with what the compiled plan was found to be."""
        audit, share = self.plan.verify()
        least = LEAST_STAGE_SHARE if isinstance(self.plan, StagedPlan) else LEAST_SHARE
        return DemoResult(self.config, parallel, single, share, audit, least)


def plan_demo(
    config: demo.DemoConfig,
    *,
    devices: int,
    method: Method | None = None,
    cluster: Cluster | None = None,
) -> Demo:
    """Plan the demo's train step.

    Args:
        config: model, data, optimiser.
        devices: how many of this process to take, if there is no cluster.
        method: how to search.
        cluster: where it will run.
    """
    where = cluster or Cluster.local(devices)
    step = parallelize(demo.make_step(config), cluster=where, method=method, batch_argnums=(2,))
    arguments = (*demo.init_state(config), next(demo.batches(config)))
    return Demo(config, step, step.plan(*arguments))


def _train(step: Callable[..., Any], config: demo.DemoConfig, watch: Watch) -> tuple[float, ...]:
    params, opt_state = demo.init_state(config)
    losses = []
    for batch in islice(demo.batches(config), config.steps):
        # Reading the loss awaits the step: no more than one may be in flight on CPU devices.
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
        if not math.isfinite(losses[-1]):
            losses += [math.nan] * (config.steps - len(losses))
            break
        watch(len(losses), losses[-1])
    return tuple(losses)
