"""Imports run one way, and importing autopar loads no optional back-end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LATE = ("ray", "cupy", "pulp", "highspy")


def test_import_contracts_hold() -> None:
    result = subprocess.run(
        (str(Path(sys.executable).with_name("lint-imports")), "--no-cache"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 broken" in result.stdout


def test_importing_autopar_loads_no_optional_back_end() -> None:
    """In a fresh interpreter: this one may have loaded them for other tests."""
    program = "import json, sys, autopar; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        (sys.executable, "-c", program), cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in json.loads(result.stdout)}
    assert "autopar" in loaded
    assert loaded.isdisjoint(LATE), sorted(loaded.intersection(LATE))
