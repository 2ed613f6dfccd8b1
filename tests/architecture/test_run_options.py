"""The options of the test run itself: the ledger it resumes from, the sample, the goldens."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
CASES = """
import pathlib
import pytest

HERE = pathlib.Path(__file__).parent

def test_steady():
    (HERE / "ran").open("a").write("steady ")

def test_mended():
    (HERE / "ran").open("a").write("mended ")
    assert (HERE.parent / "mended").exists()

@pytest.mark.full
def test_large(full):
    (HERE / "ran").open("a").write("large ")
    assert full

def test_text(golden):
    golden("text.txt", (HERE.parent / "text").read_text())
"""


@dataclass(frozen=True, slots=True)
class Project:
    """A project of its own with our conftest and four cases."""

    root: Path

    def run(self, *options: str) -> tuple[int, str, list[str]]:
        """Exit status, output, and the cases that ran."""
        ran = self.root / "tests" / "ran"
        ran.write_text("")
        result = subprocess.run(
            (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, "tests"),
            cwd=self.root,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # starts three times faster
            capture_output=True,
            text=True,
            check=False,
        )
        return result.returncode, result.stdout + result.stderr, ran.read_text().split()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "tests" / "golden").mkdir(parents=True)
    (tmp_path / "tests" / "golden" / "text.txt").write_text("as it was\n")
    (tmp_path / "text").write_text("as it was\n")
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = ["--import-mode=importlib", "--strict-markers"]\n'
        'markers = ["full: whole matrix"]\n'
    )
    (tmp_path / ".gitignore").write_text("ran\n__pycache__/\n")
    shutil.copy(CONFTEST, tmp_path / "tests" / "conftest.py")
    (tmp_path / "tests" / "test_cases.py").write_text(CASES)
    subprocess.run(("git", "init", "--quiet"), cwd=tmp_path, check=True)
    return Project(tmp_path)


@pytest.mark.parametrize(
    "workers", [(), ("-p", "xdist", "-n", "2")], ids=["one process", "two workers"]
)
def test_a_ledger_runs_only_what_has_not_passed(project: Project, workers: tuple[str, ...]) -> None:
    options = ("--ledger", "ledger.jsonl", *workers)
    status, _, ran = project.run(*options)
    assert (status, sorted(ran)) == (1, ["mended", "steady"])
    ledger = project.root / "ledger.jsonl"
    outcomes = {
        line["case"].partition("::")[2]: line["outcome"]
        for line in map(json.loads, ledger.read_text().splitlines())
    }
    expected = {"test_steady": "passed", "test_mended": "failed", "test_text": "passed"}
    assert outcomes == expected

    ledger.write_text(ledger.read_text() + '{"case": "tests/te')  # killed while writing
    (project.root / "mended").touch()
    status, output, ran = project.run(*options)
    assert (status, ran) == (0, ["mended"]), output
    assert "ledger: 2 cases passed before, 1 recorded now" in output

    status, output, ran = project.run(*options)
    assert (status, ran) == (0, []), output

    (project.root / "tests" / "test_cases.py").write_text(CASES + "\n# changed\n")
    status, _, ran = project.run(*options)
    assert (status, sorted(ran)) == (0, ["mended", "steady"])


def test_the_whole_matrix_is_another_run_than_the_sample(project: Project) -> None:
    (project.root / "mended").touch()
    options = ("--ledger", "ledger.jsonl")
    assert sorted(project.run(*options)[2]) == ["mended", "steady"]
    assert sorted(project.run(*options, "--full")[2]) == ["large", "mended", "steady"]


def test_a_golden_text_fails_with_the_difference_and_can_be_renewed(project: Project) -> None:
    (project.root / "text").write_text("as it is\n")
    status, output, _ = project.run("-k", "text")
    assert status == 1
    assert "-as it was" in output
    assert "+as it is" in output
    assert project.run("-k", "text", "--update-golden")[0] == 0
    golden = project.root / "tests" / "golden" / "text.txt"
    assert golden.read_text() == "as it is\n"
    golden.unlink()
    status, output, _ = project.run("-k", "text")
    assert status == 1
    assert "no golden file text.txt" in output
