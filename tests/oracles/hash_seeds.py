"""Runs a program under other hash seeds: sets and dicts of texts iterate differently."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def printed(program: str, *arguments: str, seed: str = "0", timeout: float = 300.0) -> str:
    """What a Python program prints under that PYTHONHASHSEED; a warning is an error."""
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    command = (sys.executable, "-W", "error", "-c", program, *arguments)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
