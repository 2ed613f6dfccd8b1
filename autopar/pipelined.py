"""Runs a pipeline plan: on devices of this process, or on workers of a Ray cluster."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from autopar.errors import ClusterError
from autopar.ir.graph import Literal
from autopar.lower.boundary import key_impl
from autopar.lower.pipeline import LoweredPipeline, export_task, jit_task, lower_pipeline
from autopar.lower.spmd import jax_mesh
from autopar.lower.verify_instructions import verify_no_deadlock, verify_step
from autopar.plan.pipeline import PipelinePlan
from autopar.plans import Traced
from autopar.runtime.local import local_devices
from autopar.runtime.pipeline import LocalPipeline


class Runtime(Protocol):
    """What executes instruction lists: runtime.pipeline.LocalPipeline, or the Ray runtime."""

    @property
    def closed(self) -> bool:
        """Whether its workers were ended, by a fault or by `close`."""

    def place(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Put argument leaves where the step wants them."""

    def run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """One step."""

    def close(self) -> None:
        """End what was started."""


class PipelineProgram:
    """A lowered pipeline on its workers, compiled and connected.

    Keys travel as the integers they are made of; results that are literals never leave this
    process.
    """

    def __init__(self, plan: PipelinePlan, traced: Traced) -> None:
        self.lowered = lower_pipeline(plan, traced.graph, traced.rules)
        verify_step(self.lowered.step)
        verify_no_deadlock(self.lowered.step)
        self._dtypes = [traced.graph.dtype_of(o) for o in traced.graph.outputs]
        hidden = [_data(array) for array in traced.built.hidden]
        hidden += [_data(array) for array in self.lowered.staged.divided.micro.constants]
        self._plan, self._hidden = plan, hidden
        self._runtime = self._start()

    def _start(self) -> Runtime:
        start = start_ray if self._plan.cluster.kind == "ray" else start_local
        runtime: Runtime = start(self._plan, self.lowered, self._hidden)
        return runtime

    @property
    def runtime(self) -> Runtime:
        """The workers; new ones if those before were ended."""
        if self._runtime.closed:
            self._runtime = self._start()
        return self._runtime

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Put argument leaves where the step wants them; keys stay as they are."""
        placed = self.runtime.place([_data(leaf) for leaf in leaves])
        pairs = zip(leaves, placed, strict=True)
        return [leaf if _is_key(leaf) else there for leaf, there in pairs]

    def run(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """One step: flat argument leaves to flat results."""
        found = self.runtime.run([_data(leaf) for leaf in leaves])
        results = []
        for source, dtype in zip(self.lowered.results, self._dtypes, strict=True):
            if isinstance(source, Literal):
                results.append(jnp.asarray(source.value, source.dtype))
            elif jnp.issubdtype(dtype, jax.dtypes.prng_key):
                data = jnp.asarray(found[source])
                results.append(jax.random.wrap_key_data(data, impl=key_impl(dtype)))
            else:
                results.append(found[source])
        return tuple(results)

    def close(self) -> None:
        """End workers and connections."""
        if not self._runtime.closed:
            self._runtime.close()


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def start_local(
    plan: PipelinePlan, lowered: LoweredPipeline, hidden: Sequence[Any]
) -> LocalPipeline:
    """All stages on devices of this process.

    Raises:
        ClusterError: there are not enough devices.
    """
    devices = local_devices(plan.cluster.size, plan.cluster.device_ids)
    code, places = [], []
    for stage, lowering, worker in zip(
        plan.stages, lowered.stages, lowered.step.workers, strict=True
    ):
        mine = tuple(devices[number] for number in stage.devices)
        mesh = jax_mesh(worker.mesh, mine)
        used = {task.name for task in worker.tasks}
        places.append(mine)
        code.append({t.name: jit_task(t, mesh) for t in lowering.tasks if t.name in used})
    return LocalPipeline(lowered.step, code, places, hidden)


def start_ray(plan: PipelinePlan, lowered: LoweredPipeline, hidden: Sequence[Any]) -> Runtime:
    """One Ray worker a stage.

    Raises:
        ClusterError: Ray is not installed.
    """
    code = []
    for lowering, worker in zip(lowered.stages, lowered.step.workers, strict=True):
        used = {task.name for task in worker.tasks}
        code.append(
            {t.name: export_task(t, ("cpu", "cuda")) for t in lowering.tasks if t.name in used}
        )
    try:
        room = importlib.import_module("autopar.runtime.ray_runtime")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ClusterError(
            "a Ray cluster needs the package ray",
            got=str(plan.cluster),
            remedy='pip install "autopar[ray]"',
        ) from error
    runtime: Runtime = room.ray_pipeline(lowered.step, code, hidden, address=plan.cluster.address)
    return runtime
