"""Plans on file: saved, loaded where there is no solver, the same in every process."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar as ap
from examples import mlp
from tests.models.small_models import MLP
from tests.oracles.hash_seeds import printed

WITHOUT_SOLVER = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[:2] == ["autopar", "solver"] or name in ("pulp", "highspy"):
            raise ModuleNotFoundError(f"blocked: {name}")

sys.meta_path.insert(0, Blocked())

import jax
import numpy as np
import autopar as ap
from examples import mlp
from tests.models.small_models import MLP

step, args, _ = mlp.build(MLP)
plan = ap.load_plan(sys.argv[1])
parallel = ap.parallelize(step, plan=plan)
found, expected = parallel(*args), step(*args)
np.testing.assert_allclose(found[2], expected[2], rtol=1e-5)
for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6)
assert plan.summary()
assert parallel.plan(*args).frozen == plan.frozen
assert not any(name.startswith(("autopar.solver", "pulp", "highspy")) for name in sys.modules)
try:
    ap.parallelize(step)(*args)
except ModuleNotFoundError as error:
    print(error)
"""

MAKE_PLAN = """
import sys
import autopar as ap
from examples import gpt, mlp
from tests.models.small_models import GPT, MLP

name, _, stages = sys.argv[1].partition("-")
build, config = {"mlp": (mlp.build, MLP), "gpt": (gpt.build, GPT)}[name]
step, args, batch = build(config)
method = ap.PipeshardParallel(2, layers=ap.AutoLayers(4)) if stages else ap.Auto()
cluster = "abstract:2x2" if stages else "abstract:2x3"
plan = ap.make_plan(step, *args, cluster=cluster, method=method, batch_argnums=batch)
plan.save(sys.argv[2])
"""


def _cluster() -> ap.Cluster:
    return ap.Cluster.abstract(
        shape=(2, 4),
        alpha=(1e-9, 1e-9),
        beta=(1e-12, 1e-12),
        peak_flops=1e12,
        memory_bandwidth=1e12,
        memory_bytes=8e10,
    )


@pytest.fixture(scope="module")
def made() -> ap.Plan:
    step, args, batch = mlp.build(MLP)
    return ap.make_plan(step, *args, cluster=_cluster(), batch_argnums=batch)


def test_a_saved_plan_is_the_same_plan(made: ap.Plan, tmp_path: Path) -> None:
    made.save(tmp_path / "plan.json")
    loaded = ap.load_plan(tmp_path / "plan.json")
    assert loaded.frozen == made.frozen
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()


def test_a_loaded_plan_runs_where_the_solver_cannot_be_imported(
    made: ap.Plan, tmp_path: Path
) -> None:
    made.save(tmp_path / "plan.json")
    assert "blocked: autopar.solver" in printed(WITHOUT_SOLVER, str(tmp_path / "plan.json"))


def test_a_loaded_plan_knows_its_function_once_bound(made: ap.Plan, tmp_path: Path) -> None:
    made.save(tmp_path / "plan.json")
    loaded = ap.load_plan(tmp_path / "plan.json")
    with pytest.raises(ap.errors.PlanError, match="without its function"):
        loaded.program()
    step, args, _ = mlp.build(MLP)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    assert loaded.bind(step, *shapes).program().collectives == made.program().collectives
    with pytest.raises(ap.errors.PlanError, match="is not for this function"):
        loaded.bind(lambda *rest: step(*rest)[2], *shapes)


def test_partition_specs_are_by_path(made: ap.Plan) -> None:
    arguments, results = made.partition_specs()
    assert "params/0/kernel" in arguments
    assert arguments["params/0/kernel"] == results["out/0/0/kernel"]
    kernels = [spec for name, spec in arguments.items() if name.endswith("kernel")]
    assert any(any(spec) for spec in kernels)


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "mlp-stages",
        *(pytest.param(n, marks=pytest.mark.full) for n in ("gpt", "gpt-stages")),
    ],
)
def test_the_same_plan_under_any_hash_seed(name: str, tmp_path: Path) -> None:
    texts = []
    for seed in ("0", "4242"):
        path = tmp_path / f"{seed}.json"
        printed(MAKE_PLAN, name, str(path), seed=seed)
        plan = json.loads(path.read_text())
        for part in (plan, *(stage["plan"] for stage in plan.get("stages", ()))):
            assert part["solver"].pop("seconds") >= 0
        texts.append(json.dumps(plan))
    assert texts[0] == texts[1]


def test_data_parallel_and_zero_run() -> None:
    step, args, batch = mlp.build(MLP)
    expected = step(*args)
    for method in (ap.Zero2Parallel(), ap.Zero3Parallel(), ap.DataParallel()):
        parallel = ap.parallelize(step, cluster=_cluster(), method=method, batch_argnums=batch)
        found = parallel(*args)
        np.testing.assert_allclose(found[2], expected[2], rtol=5e-6)
        kernel = found[0][0]["kernel"]
        split = not isinstance(method, ap.DataParallel | ap.Zero2Parallel)
        assert kernel.sharding.is_fully_replicated is not split
        assert jnp.isfinite(kernel).all()
