"""The file of a pipeline plan: versioned JSON with one plan object a stage."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from autopar.cluster import Cluster
from autopar.errors import AutoparError, PlanError
from autopar.files import write_atomically
from autopar.plan.pipeline import PIPELINE_VERSION, PipelinePlan, StagePlan, TransferCost
from autopar.plan.plan import CostSummary, SolverReport
from autopar.plan.schedule import Schedule, parse_action, validate
from autopar.plan.serialize import (
    boundary_from_json,
    boundary_to_json,
    fold,
    plan_from_json,
    plan_to_json,
    unfold,
)

KEY = "autopar_pipeline"
"""Holds the version; also what tells the two kinds of plan file apart."""


def pipeline_to_json(plan: PipelinePlan) -> dict[str, Any]:
    """The plan as JSON values."""
    return {
        KEY: PIPELINE_VERSION,
        "function": plan.function,
        "jax_version": plan.jax_version,
        "fingerprint": plan.fingerprint,
        "method": plan.method,
        "cluster": plan.cluster.to_json(),
        "cost": {
            "compute_seconds": plan.cost.compute_seconds,
            "communication_seconds": plan.cost.communication_seconds,
            "peak_bytes": plan.cost.peak_bytes,
        },
        "solver": {
            "name": plan.solver.name,
            "objective": plan.solver.objective,
            "lower_bound": plan.solver.lower_bound,
            "gap": plan.solver.gap,
            "seconds": plan.solver.seconds,
            "notes": plan.solver.notes,
        },
        "notes": plan.notes,
        "batch": plan.batch,
        "num_hidden": plan.num_hidden,
        "inputs": [boundary_to_json(entry) for entry in plan.inputs],
        "outputs": [boundary_to_json(entry) for entry in plan.outputs],
        "signatures": fold(plan.signatures),
        "schedule": {
            "name": plan.schedule.name,
            "stages": plan.schedule.stages,
            "micro_batches": plan.schedule.micro_batches,
            "ranks": [
                ["" if action is None else str(action) for action in row]
                for row in plan.schedule.ranks
            ],
        },
        "transfers": [[t.source, t.target, t.kind, t.bytes, t.seconds] for t in plan.transfers],
        "stages": [_stage(stage) for stage in plan.stages],
    }


_FIGURES = (
    "start",
    "devices",
    "forward_seconds",
    "backward_seconds",
    "update_seconds",
    "base_bytes",
    "activation_bytes",
    "workspace_bytes",
)


def _stage(stage: StagePlan) -> dict[str, Any]:
    figures = {name: getattr(stage, name) for name in _FIGURES}
    return {**figures, "plan": plan_to_json(stage.plan)}


def pipeline_from_json(data: Mapping[str, Any], *, file: str = "plan") -> PipelinePlan:
    """Read a pipeline plan.

    Raises:
        PlanError: naming the file and what is wrong with it.
    """
    if data.get(KEY) != PIPELINE_VERSION:
        raise PlanError(
            "this file is not a pipeline plan that this version reads",
            where=file,
            got=f"{KEY} = {data.get(KEY)!r}",
            why=f"this version reads {PIPELINE_VERSION}",
            remedy="make the plan again",
        )
    try:
        return _read(data, file)
    except AutoparError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise PlanError(
            "a plan file is damaged",
            where=file,
            got=f"{type(error).__name__}: {error}",
            remedy="make the plan again",
        ) from error


def _read(data: Mapping[str, Any], file: str) -> PipelinePlan:
    solver = dict(data["solver"])
    return PipelinePlan(
        function=data["function"],
        jax_version=data["jax_version"],
        fingerprint=data["fingerprint"],
        signatures=unfold(data["signatures"]),
        cluster=Cluster.from_json(data["cluster"], file=file),
        method=data["method"],
        batch=tuple((int(position), int(dim)) for position, dim in data["batch"]),
        inputs=tuple(boundary_from_json(row) for row in data["inputs"]),
        outputs=tuple(boundary_from_json(row) for row in data["outputs"]),
        num_hidden=data["num_hidden"],
        schedule=_schedule(data["schedule"]),
        stages=tuple(_read_stage(stage, file) for stage in data["stages"]),
        transfers=tuple(TransferCost(*row) for row in data["transfers"]),
        cost=CostSummary(**data["cost"]),
        solver=SolverReport(**{**solver, "notes": tuple(solver["notes"])}),
        notes=tuple(data["notes"]),
    )


def _schedule(data: Mapping[str, Any]) -> Schedule:
    made = Schedule(
        data["name"],
        data["stages"],
        data["micro_batches"],
        tuple(tuple(parse_action(cell) if cell else None for cell in row) for row in data["ranks"]),
    )
    validate(made)
    return made


def _read_stage(data: Mapping[str, Any], file: str) -> StagePlan:
    figures = {name: data[name] for name in _FIGURES}
    figures["devices"] = tuple(figures["devices"])
    return StagePlan(plan=plan_from_json(data["plan"], file=file), **figures)


def save_pipeline(plan: PipelinePlan, path: str | os.PathLike[str]) -> None:
    """Write the plan; the file is complete or absent, never half-written."""
    text = json.dumps(pipeline_to_json(plan), separators=(",", ":")) + "\n"
    write_atomically(path, text, kind=PlanError)
