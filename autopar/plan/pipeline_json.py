"""The file of a pipeline plan: versioned JSON with one plan object a stage."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from autopar.cluster import Cluster
from autopar.plan.pipeline import PIPELINE_VERSION, PipelinePlan, StagePlan, TransferCost
from autopar.plan.plan import CostSummary
from autopar.plan.schedule import Schedule, cell_texts, parse_cell, validate
from autopar.plan.serialize import (
    boundary_from_json,
    boundary_to_json,
    fold,
    plan_from_json,
    plan_to_json,
    reading,
    solver_from_json,
    unfold,
    write_object,
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
        "cost": asdict(plan.cost),
        "solver": asdict(plan.solver),
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
            "ranks": cell_texts(plan.schedule),
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
    with reading(data, KEY, PIPELINE_VERSION, file):
        return _read(data, file)


def _read(data: Mapping[str, Any], file: str) -> PipelinePlan:
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
        solver=solver_from_json(data["solver"]),
        notes=tuple(data["notes"]),
    )


def _schedule(data: Mapping[str, Any]) -> Schedule:
    made = Schedule(
        data["name"],
        data["stages"],
        data["micro_batches"],
        tuple(tuple(map(parse_cell, row)) for row in data["ranks"]),
    )
    validate(made)
    return made


def _read_stage(data: Mapping[str, Any], file: str) -> StagePlan:
    figures = {name: data[name] for name in _FIGURES}
    figures["devices"] = tuple(figures["devices"])
    return StagePlan(plan=plan_from_json(data["plan"], file=file), **figures)


def save_pipeline(plan: PipelinePlan, path: str | os.PathLike[str]) -> None:
    """Write the plan; the file is complete or absent, never half-written."""
    write_object(pipeline_to_json(plan), path)
