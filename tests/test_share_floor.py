"""Contractions are divided among the devices: shares read from compiled HLO, with a floor.

Where communication costs nothing, the solver has no reason to leave a contraction replicated. The
floors are records: a share may not fall below its record by more than `SLACK`, and a rise is
recorded with `--update-golden`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from autopar.cluster import Cluster
from autopar.ir.mesh import Mesh
from autopar.lower.from_plan import program_of
from autopar.lower.spmd import jax_mesh, jit_program
from autopar.methods import ShardParallel
from autopar.report.hlo import HloProgram, parallel_share, read_hlo
from autopar.rules.registry import rules_of
from autopar.solver.assemble import assemble
from autopar.solver.solve import program_of_decisions, solve
from autopar.trace.build import build_graph
from autopar.trace.jaxpr import trace_function
from examples import convnet, gpt, mlp

FLOORS = Path(__file__).parent / "golden" / "parallel_share.json"
LEAST = 0.9
SLACK = 0.005

MODELS: dict[str, Callable[[], Any]] = {"mlp": mlp.make, "gpt": gpt.make, "convnet": convnet.make}
SHAPES = ((8,), (2, 4), (3,))


def _name(model: str, shape: tuple[int, ...]) -> str:
    return f"{model}-{'x'.join(map(str, shape))}"


def _cases() -> list[Any]:
    return [
        pytest.param(
            model,
            shape,
            id=_name(model, shape),
            marks=pytest.mark.full if shape == (3,) else (),
        )
        for model in MODELS
        for shape in SHAPES
    ]


def _free_network(shape: tuple[int, ...]) -> Cluster:
    return Cluster.abstract(
        shape=shape,
        alpha=(1e-12,) * len(shape),
        beta=(1e-16,) * len(shape),
        peak_flops=1e13,
        memory_bandwidth=1e12,
        memory_bytes=8e10,
    )


def _share(model: str, shape: tuple[int, ...]) -> float:
    step, args, _ = MODELS[model]()
    built = build_graph(trace_function(step, args, {}))
    rules = rules_of(built.graph)
    method = ShardParallel(logical_mesh=shape)
    plan = solve(built.graph, rules, _free_network(shape), method)
    program = program_of(plan, built.graph, rules)
    mesh = jax_mesh(program.mesh, jax.devices()[: program.mesh.size])
    leaves = (*jax.tree.leaves(args), *built.hidden)
    planned = _read(jit_program(program, rules, mesh), leaves)
    return parallel_share(_read(step, args), planned, program.mesh.size)


def _read(jitted: Any, args: Sequence[Any]) -> HloProgram:
    return read_hlo(jitted.lower(*args).compile().as_text())


def _record(case: str, share: float) -> None:
    known = json.loads(FLOORS.read_text(encoding="utf-8")) if FLOORS.exists() else {}
    known[case] = round(share, 4)
    FLOORS.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@pytest.mark.parametrize(("model", "shape"), _cases())
def test_share_of_the_solver_is_on_its_floor(
    model: str, shape: tuple[int, ...], pytestconfig: pytest.Config
) -> None:
    share = _share(model, shape)
    if pytestconfig.getoption("--update-golden"):
        _record(_name(model, shape), share)
    floor = json.loads(FLOORS.read_text(encoding="utf-8"))[_name(model, shape)]
    assert share >= LEAST
    assert share >= floor - SLACK
    assert share <= 1.0 + SLACK, "no device can do less than its part: the FLOPs are misread"


def test_every_case_has_a_floor_worth_the_name() -> None:
    floors = json.loads(FLOORS.read_text(encoding="utf-8"))
    assert set(floors) == {_name(model, shape) for model in MODELS for shape in SHAPES}
    assert min(floors.values()) >= LEAST


def test_a_replicated_plan_has_one_nth() -> None:
    step, args, _ = mlp.make()
    built = build_graph(trace_function(step, args, {}))
    rules = rules_of(built.graph)
    model = assemble(built.graph, rules, _free_network((8,)), Mesh.of(8))
    whole = model.decide([0] * len(model.nodes.sizes))
    assert all(strategy.work == 1 for strategy in whole.ops)
    program = program_of_decisions(model, whole)
    mesh = jax_mesh(program.mesh, jax.devices())
    planned = _read(jit_program(program, rules, mesh), jax.tree.leaves(args))
    assert parallel_share(_read(step, args), planned, 8) == pytest.approx(1 / 8)
