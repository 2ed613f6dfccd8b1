"""Contractions are divided among the devices: shares read from compiled HLO, with a floor.

Where communication costs nothing, the solver has no reason to leave a contraction replicated. The
floors are records: a share may not fall below its record by more than `SLACK`, and a rise is
recorded with `--update-golden`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from autopar.cluster import Cluster
from autopar.lower.from_plan import program_of
from autopar.lower.spmd import jax_mesh, jit_program
from autopar.methods import ShardParallel
from autopar.report.hlo import HloProgram, parallel_share, read_hlo
from autopar.rules.registry import rules_of
from autopar.solver.solve import solve
from autopar.trace.build import build_graph
from autopar.trace.jaxpr import trace_function
from examples import convnet, gpt, mlp

FLOORS = Path(__file__).parent / "golden" / "parallel_share.json"
LEAST = 0.9
SLACK = 0.005

MODELS: dict[str, Callable[[], tuple[object, ...]]] = {
    "mlp": mlp.make,
    "gpt": gpt.make,
    "convnet": convnet.make,
}


def _share(name: str, shape: tuple[int, ...]) -> float:
    step, args, _ = MODELS[name]()
    function = trace_function(step, args, {})
    built = build_graph(function)
    rules = rules_of(built.graph)
    cluster = Cluster.abstract(
        shape=shape,
        alpha=(1e-12,) * len(shape),
        beta=(1e-16,) * len(shape),
        peak_flops=1e13,
        memory_bandwidth=1e12,
        memory_bytes=8e10,
    )
    plan = solve(built.graph, rules, cluster, ShardParallel(logical_mesh=shape))
    program = program_of(plan, built.graph, rules)
    mesh = jax_mesh(program.mesh, jax.devices()[: program.mesh.size])
    planned = _compiled(jit_program(program, rules, mesh), [*jax.tree.leaves(args), *built.hidden])
    return parallel_share(_compiled(step, args), planned, program.mesh.size)
