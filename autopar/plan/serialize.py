"""The plan's file: versioned JSON, written atomically, with repeated texts stored once."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autopar.cluster import Cluster
from autopar.errors import AutoparError, PlanError
from autopar.files import write_atomically
from autopar.ir.mesh import Mesh
from autopar.ir.reshard import parse_step
from autopar.ir.sharding import parse_sharding
from autopar.plan.plan import (
    PLAN_VERSION,
    Boundary,
    CostSummary,
    FrozenPlan,
    PricedCollective,
    ReshardChoice,
    SolverReport,
)

KEY = "autopar_plan"
"""Holds the version."""


def fold(texts: Sequence[str]) -> dict[str, Any]:
    """A list of few distinct texts as a table and positions."""
    table = list(dict.fromkeys(texts))
    position = {text: number for number, text in enumerate(table)}
    return {"table": table, "rows": [position[text] for text in texts]}


def unfold(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Read `fold` back."""
    return tuple(data["table"][row] for row in data["rows"])


def plan_to_json(plan: FrozenPlan) -> dict[str, Any]:
    """The plan as JSON values."""
    return {
        KEY: PLAN_VERSION,
        "function": plan.function,
        "jax_version": plan.jax_version,
        "fingerprint": plan.fingerprint,
        "method": plan.method,
        "mesh": [plan.mesh.names, plan.mesh.sizes],
        "cluster": plan.cluster.to_json(),
        "cost": asdict(plan.cost),
        "solver": asdict(plan.solver),
        "notes": plan.notes,
        "num_hidden": plan.num_hidden,
        "inputs": [boundary_to_json(entry) for entry in plan.inputs],
        "outputs": [boundary_to_json(entry) for entry in plan.outputs],
        "signatures": fold(plan.signatures),
        "strategies": fold(plan.strategies),
        "settled": [[value, str(sharding)] for value, sharding in plan.settled],
        "reshards": {
            "values": [choice.value for choice in plan.reshards],
            "how": fold([_reshard_text(choice) for choice in plan.reshards]),
        },
        "collectives": [
            [c.kind, c.axes, c.elements, c.bytes, c.times, c.seconds, c.source, c.name, c.reduction]
            for c in plan.collectives
        ],
    }


def boundary_to_json(entry: Boundary) -> list[Any]:
    """One leaf as a row."""
    tail = [int(entry.donated), entry.tied]
    return [entry.name, entry.shape, entry.dtype, str(entry.sharding), *tail]


def _reshard_text(choice: ReshardChoice) -> str:
    return f"{choice.source} {choice.target} {' '.join(str(step) for step in choice.steps)}"


def _read_reshard(value: int, text: str) -> ReshardChoice:
    source, target, *steps = text.split()
    return ReshardChoice(
        value, parse_sharding(source), parse_sharding(target), tuple(map(parse_step, steps))
    )


def boundary_from_json(row: Sequence[Any]) -> Boundary:
    """Read a row back."""
    name, shape, dtype, sharding, donated, tied = row
    return Boundary(name, tuple(shape), dtype, parse_sharding(sharding), bool(donated), tied)


def solver_from_json(data: Mapping[str, Any]) -> SolverReport:
    """Read `asdict` of a report back."""
    return SolverReport(**{**data, "notes": tuple(data["notes"])})


@contextlib.contextmanager
def reading(data: Mapping[str, Any], key: str, version: int, file: str) -> Iterator[None]:
    """What is read inside is a plan of that version, under that key.

    Raises:
        PlanError: it is not, or is damaged.
    """
    if data.get(key) != version:
        raise PlanError(
            "this file is not a plan that this version reads",
            where=file,
            got=f"{key} = {data.get(key)!r}",
            why=f"this version reads {version}",
            remedy="make the plan again",
        )
    try:
        yield
    except AutoparError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise PlanError(
            "a plan file is damaged",
            where=file,
            got=f"{type(error).__name__}: {error}",
            remedy="make the plan again",
        ) from error


def plan_from_json(data: Mapping[str, Any], *, file: str = "plan") -> FrozenPlan:
    """Read a plan.

    Raises:
        PlanError: naming the file and what is wrong with it.
    """
    with reading(data, KEY, PLAN_VERSION, file):
        return _read_plan(data, file)


def _read_plan(data: Mapping[str, Any], file: str) -> FrozenPlan:
    names, sizes = data["mesh"]
    how = unfold(data["reshards"]["how"])
    reshards = zip(data["reshards"]["values"], how, strict=True)
    return FrozenPlan(
        function=data["function"],
        jax_version=data["jax_version"],
        fingerprint=data["fingerprint"],
        signatures=unfold(data["signatures"]),
        cluster=Cluster.from_json(data["cluster"], file=file),
        mesh=Mesh(tuple(names), tuple(sizes)),
        method=data["method"],
        inputs=tuple(boundary_from_json(row) for row in data["inputs"]),
        outputs=tuple(boundary_from_json(row) for row in data["outputs"]),
        num_hidden=data["num_hidden"],
        strategies=unfold(data["strategies"]),
        settled=tuple((value, parse_sharding(text)) for value, text in data["settled"]),
        reshards=tuple(_read_reshard(value, text) for value, text in reshards),
        collectives=tuple(
            PricedCollective(row[0], tuple(row[1]), *row[2:]) for row in data["collectives"]
        ),
        cost=CostSummary(**data["cost"]),
        solver=solver_from_json(data["solver"]),
        notes=tuple(data["notes"]),
    )


def save_plan(plan: FrozenPlan, path: str | os.PathLike[str]) -> None:
    """Write the plan; the file is complete or absent, never half-written."""
    write_object(plan_to_json(plan), path)


def write_object(data: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a JSON object; the file is complete or absent, never half-written."""
    text = json.dumps(data, separators=(",", ":")) + "\n"
    write_atomically(path, text, kind=PlanError)


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the JSON object of a plan file.

    Raises:
        PlanError: the file is missing, or holds no JSON object.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError("a plan file cannot be read", where=str(path), why=str(error)) from error
    except ValueError as error:
        raise PlanError("a plan file is no JSON", where=str(path), why=str(error)) from error
    if not isinstance(data, dict):
        raise PlanError("a plan file holds no object", where=str(path))
    return data
