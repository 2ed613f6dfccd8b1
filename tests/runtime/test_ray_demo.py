"""The command `autopar demo --cluster ray:2x4` as users run it, with a worker killed midway."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.xdist_group("ray")]

COMMAND = "from autopar.cli import main; main()"
MARK = "AUTOPAR_TEST_MARK"
SHARED_MEMORY = Path("/dev/shm")


def marked(token: str) -> dict[int, str]:
    """Processes that inherited the mark: their ids and command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"{MARK}={token}".encode() in (entry / "environ").read_bytes():
                text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[int(entry.name)] = text
        except OSError:
            continue
    return found


@pytest.fixture
def own_folder() -> Iterator[Path]:
    """Where the command puts what is temporary; its path is short, for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as name:
        yield Path(name)


def test_a_killed_worker_ends_the_command(tmp_path: Path, own_folder: Path) -> None:
    token = secrets.token_hex(8)
    memory = {path.name for path in SHARED_MEMORY.iterdir()}
    environment = {**os.environ, MARK: token, "XLA_FLAGS": "", "NPROC": "32"}
    environment["TMPDIR"] = str(own_folder)
    output = tmp_path / "out.txt"
    with output.open("w", encoding="utf-8") as file:
        running = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "demo", "--cluster", "ray:2x4", "--steps", "5000"],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        end = time.monotonic() + 180
        while "step   50" not in output.read_text(encoding="utf-8"):
            assert running.poll() is None, output.read_text(encoding="utf-8")
            assert time.monotonic() < end
            time.sleep(0.2)
        workers = [pid for pid, text in marked(token).items() if "_Actor" in text]
        assert len(workers) == 2
        start = time.monotonic()
        os.kill(max(workers), signal.SIGKILL)
        text = ""
        while "died in step" not in text:
            assert time.monotonic() - start < 5, text
            text = output.read_text(encoding="utf-8")
            time.sleep(0.05)
        assert running.wait(30) == 2
    finally:
        running.kill()
        running.wait()
    text = output.read_text(encoding="utf-8")
    assert "error: worker " in text
    assert "instruction" in text
    end = time.monotonic() + 20
    while time.monotonic() < end and (marked(token) or any(own_folder.iterdir())):
        time.sleep(0.2)
    assert marked(token) == {}
    assert list(own_folder.iterdir()) == []
    left = {path.name for path in SHARED_MEMORY.iterdir()} - memory
    assert not [name for name in left if "autopar" in name or "plasma" in name]
