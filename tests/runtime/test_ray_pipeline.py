"""Stages on Ray workers: equal results, arrays that stay, faults that end in one error.

One Ray serves the tests of this file, and every test ends its own workers.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar as ap
from autopar.errors import WorkerError
from autopar.runtime.arrays import DistributedArray
from autopar.runtime.ray_runtime import start_ray, stop_ray
from autopar.runtime.transport.tcp import TcpTransport
from tests.models.headed import headed_model
from tests.models.small_models import SmallModel, small_model
from tests.oracles.single_device import differences, run_single

pytestmark = pytest.mark.xdist_group("ray")

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module", autouse=True)
def one_ray() -> Iterator[None]:
    before = {name for name in os.environ if name.startswith("RAY_")}
    folder = start_ray(None)
    # What is left behind would change which Ray this process can speak with afterwards.
    assert {name for name in os.environ if name.startswith("RAY_")} == before
    yield
    stop_ray(folder)


def step_of(
    model: SmallModel,
    stages: int,
    count: int,
    schedule: str = "1f1b",
    address: str | None = None,
) -> Any:
    return ap.parallelize(
        jax.jit(model.step, donate_argnums=(0, 1)),
        cluster=ap.Cluster.ray(hosts=stages, devices_per_host=2, address=address),
        method=ap.PipeshardParallel(count, stages=ap.UniformStages(stages), schedule=schedule),
        batch_argnums=(2,),
    )


def runtime_of(step: Any) -> Any:
    (entry,) = step._entries.values()
    return entry.local.runtime


@pytest.mark.parametrize(
    ("name", "stages", "count", "schedule"),
    [
        ("gpt", 2, 4, "1f1b"),
        pytest.param("mlp", 3, 6, "gpipe", marks=pytest.mark.full),
        pytest.param("headed", 3, 6, "1f1b", marks=pytest.mark.full),
        pytest.param("headed", 2, 4, "gpipe", marks=pytest.mark.full),
    ],
)
def test_steps_on_workers_equal_the_single_device(
    name: str, stages: int, count: int, schedule: str
) -> None:
    model = headed_model() if name == "headed" else small_model(name)
    step = step_of(model, stages, count, schedule)
    given: Any = jax.tree.map(np.asarray, model.args)
    arguments = given
    fed = 0
    for number in range(3):
        expected = run_single(model, given)
        results = step(*arguments)
        assert all(isinstance(leaf, DistributedArray) for leaf in jax.tree.leaves(results))
        assert differences(model, given, expected, results) == []
        given = (*jax.tree.map(np.asarray, results[:2]), given[2])
        arguments = (*results[:2], given[2])
        runtime = runtime_of(step)
        if number:
            # Only the batch is moved: the state is passed back in where it lies.
            batch = sum(leaf.nbytes for leaf in jax.tree.leaves(given[2]))
            assert 0 < runtime.bytes_fed - fed <= batch * stages
        fed = runtime.bytes_fed
    step.close()


def test_nothing_leaks_and_what_is_given_away_is_gone() -> None:
    model = small_model("mlp")
    step = step_of(model, 2, 2)
    params, state, batch = model.args
    first = (params, state)
    seen = []
    for number in range(30):
        params, state, loss, _ = step(params, state, batch)
        if number in (5, 29):
            gc.collect()
            seen.append([stats["handles"] for stats in runtime_of(step).stats()])
    assert seen[0] == seen[1]
    leaf, first_leaf = jax.tree.leaves(params)[0], jax.tree.leaves(first[0])[0]
    assert (leaf.shape, leaf.dtype) == (first_leaf.shape, first_leaf.dtype)
    assert (leaf.ndim, leaf.nbytes) == (first_leaf.ndim, first_leaf.nbytes)
    assert "worker" in leaf.sharding
    assert leaf.block_until_ready() is leaf
    assert isinstance(jnp.asarray(leaf), jax.Array)
    np.testing.assert_array_equal(np.asarray(leaf), leaf.__array__())
    before = float(loss)
    kept = params
    step(params, state, batch)
    assert leaf.is_deleted()
    with pytest.raises(WorkerError, match="given away to a step"):
        np.asarray(jax.tree.leaves(kept)[0])
    assert float(loss) == before
    loss.delete()
    with pytest.raises(WorkerError, match="was deleted"):
        float(loss)
    step.close()


def test_placed_arguments_are_not_moved_again() -> None:
    model = small_model("mlp")
    step = step_of(model, 2, 2)
    params, state, batch = step.place(*model.args)
    assert all(isinstance(leaf, DistributedArray) for leaf in jax.tree.leaves(params))
    runtime = runtime_of(step)
    before = runtime.bytes_fed
    float(step(params, state, batch)[2])
    assert runtime.bytes_fed - before <= 2 * sum(x.nbytes for x in jax.tree.leaves(batch))
    step.close()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def left_behind(pids: tuple[int, ...], folder: Path, before: set[str]) -> list[str]:
    """Processes, folders and shared memory of a run, some seconds after its end."""
    end = time.monotonic() + 10
    while True:
        found = [f"process {pid}" for pid in pids if alive(pid)]
        found += [str(folder)] if folder.exists() else []
        mine = {path.name for path in SHARED_MEMORY.iterdir() if path.name.startswith("autopar")}
        found += sorted(mine - before)
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.1)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize(
    ("fault", "how", "limit"), [(kill, "died", 5.0), (stop, "hangs", 15.0)], ids=["kill", "hang"]
)
def test_a_lost_worker_is_one_error_and_nothing_is_left(
    fault: Callable[[int], None], how: str, limit: float
) -> None:
    model = small_model("mlp")
    step = step_of(model, 2, 2)
    before = {path.name for path in SHARED_MEMORY.iterdir()}
    params, state, batch = model.args
    for _ in range(2):
        params, state, _, _ = step(params, state, batch)
    runtime = runtime_of(step)
    runtime.settle()
    runtime.watch.hang_seconds = 3.0
    pids, folder = runtime.pids, runtime.folder
    start = time.monotonic()
    fault(pids[1])
    with pytest.raises(WorkerError) as caught:
        float(step(params, state, batch)[2])
    assert time.monotonic() - start < limit
    text = str(caught.value)
    assert f"worker 1 (stage 1) {how} in step 2" in text
    assert "instruction" in text
    assert "worker 0" in text
    assert left_behind(pids, folder, before) == []
    with pytest.raises(WorkerError, match=r"ended|given away"):
        np.asarray(jax.tree.leaves(params)[0])
    # From a checkpoint it goes on with new workers.
    assert np.isfinite(float(step(*model.args)[2]))
    step.close()


@pytest.mark.parametrize(
    ("fault", "how"),
    [(stop, "hangs"), pytest.param(kill, "died", marks=pytest.mark.full)],
    ids=["hang", "kill"],
)
def test_workers_of_a_running_ray_are_told_apart_over_tcp(
    fault: Callable[[int], None], how: str
) -> None:
    """As on several hosts: no shared memory, and no board to read positions from."""
    model = small_model("mlp")
    step = step_of(model, 2, 2, address="auto")
    given = jax.tree.map(np.asarray, model.args)
    expected = run_single(model, given)
    results = step(*given)
    assert differences(model, given, expected, results) == []
    runtime = runtime_of(step)
    assert isinstance(runtime._calls.transport, TcpTransport)
    assert runtime.watch.positions() == [(0, -1), (0, -1)]
    runtime.watch.hang_seconds = 3.0
    pids, folder = runtime.pids, runtime.folder
    fault(pids[1])
    with pytest.raises(WorkerError) as caught:
        float(step(*results[:2], given[2])[2])
    text = str(caught.value)
    assert f"worker 1 (stage 1) {how} in step 1 at an unknown instruction" in text
    assert "worker 0 in step 1 at instruction" in text
    assert left_behind(pids, folder, set()) == []
    step.close()


def test_an_exception_names_its_worker_and_instruction() -> None:
    model = small_model("mlp")
    step = step_of(model, 2, 2)
    params, state, batch = model.args
    params, state, _, _ = step(params, state, batch)
    runtime = runtime_of(step)
    runtime.settle()
    # A handle that the worker does not have any more: its step raises.
    leaf = next(x for x in jax.tree.leaves(params) if 1 in x.parts)
    lost = runtime._peers[1]
    lost.unwanted.append(leaf.parts[1])
    with pytest.raises(WorkerError) as caught:
        float(step(params, state, batch)[2])
    assert "worker 1 (stage 1) failed in step 1" in str(caught.value)
    assert f"handle {leaf.parts[1]}" in str(caught.value)
    step.close()
