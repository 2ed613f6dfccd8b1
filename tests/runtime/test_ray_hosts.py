"""Stages on two hosts: network namespaces of this machine, with a cable between them.

A Ray node runs in each; nothing but the cable connects them. Needs root and iproute2, as making
namespaces does.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RAY = Path(sys.executable).with_name("ray")
ADDRESS = "10.77.0.1:6379"
CLEAN = {name: text for name, text in os.environ.items() if not name.startswith("RAY_")}

pytestmark = [
    pytest.mark.full,
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"
    ),
]

PROGRAM = """
import subprocess, sys, time
import jax
jax.config.update("jax_platforms", "cpu")
import numpy as np
import ray
import autopar as ap
from autopar.errors import WorkerError
from tests.models.small_models import small_model
from tests.oracles.single_device import differences, run_single

model = small_model("gpt")
step = ap.parallelize(
    jax.jit(model.step, donate_argnums=(0, 1)),
    cluster=ap.Cluster.ray(hosts=2, devices_per_host=2, address=sys.argv[1]),
    method=ap.PipeshardParallel(4, stages=ap.UniformStages(2)),
    batch_argnums=(2,),
)
given = jax.tree.map(np.asarray, model.args)
for _ in range(3):
    expected = run_single(model, given)
    results = step(*given)
    print("differences", differences(model, given, expected, results))
    given = (*jax.tree.map(np.asarray, results[:2]), given[2])
runtime = step.runtime(*given)
actors = runtime._processes._actors.values()
addresses = ray.get([actor.address.remote() for actor in actors])
print("hosts", *(address.split(":")[1] for address in addresses))
subprocess.run(sys.argv[2:], check=True)
start = time.monotonic()
try:
    float(step(*given)[2])
except WorkerError as error:
    print("seconds", time.monotonic() - start)
    print(error)
"""


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=60)


def inside(namespace: str, *words: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", namespace, *words)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces that reach each other, and nothing else."""
    names = (f"ap{os.getpid()}a", f"ap{os.getpid()}b")
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for number, name in enumerate(names, 1):
            run("ip", "link", "set", name, "netns", name)
            run(*inside(name, "ip", "addr", "add", f"10.77.0.{number}/24", "dev", name))
            for device in (name, "lo"):
                run(*inside(name, "ip", "link", "set", device, "up"))
        yield names
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)


@pytest.fixture
def nodes(hosts: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Ray node on each."""
    folder = Path("/tmp") / f"ap-{os.getpid()}"  # Ray's sockets need a short path
    common = ("--num-cpus=1", "--disable-usage-stats", "--object-store-memory=80000000", "--block")
    head = ("--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={folder}")
    started = []
    try:
        for number, (name, role) in enumerate(
            zip(hosts, (head, (f"--address={ADDRESS}",)), strict=True), 1
        ):
            words = (str(RAY), "start", *role, f"--node-ip-address=10.77.0.{number}", *common)
            with (tmp_path_factory.mktemp("ray") / name).open("w") as log:
                started.append(
                    subprocess.Popen(inside(name, *words), stdout=log, stderr=log, env=CLEAN)
                )
            wait_for_port(hosts[0])
        yield
    finally:
        for node in reversed(started):
            node.send_signal(signal.SIGTERM)
            node.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_port(namespace: str) -> None:
    """Until the head listens."""
    ask = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1)"
    host, port = ADDRESS.split(":")
    end = time.monotonic() + 60
    while subprocess.run(
        inside(namespace, sys.executable, "-c", ask, host, port), capture_output=True, check=False
    ).returncode:
        assert time.monotonic() < end, "Ray's head does not come up"
        time.sleep(0.5)


@pytest.mark.usefixtures("nodes")
def test_stages_on_two_hosts_and_a_cut_cable(hosts: tuple[str, str]) -> None:
    cut = ("ip", "link", "set", hosts[0], "down")
    done = subprocess.run(
        inside(hosts[0], sys.executable, "-c", PROGRAM, ADDRESS, *cut),
        cwd=ROOT,
        env=CLEAN,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("differences []") == 3
    assert "hosts 10.77.0.1 10.77.0.2" in lines
    seconds = next(float(line.split()[1]) for line in lines if line.startswith("seconds"))
    assert seconds < 60
    assert "worker 1 (stage 1) hangs in step 3 at an unknown instruction" in done.stdout
    assert "worker 0 in step 3 at instruction" in done.stdout
