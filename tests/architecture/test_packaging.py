"""What people install: one top-level package, with the linked rooms and the data files in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGED = (".py", ".json", ".j2")


def _sources() -> list[str]:
    """Tracked and new files and links, as paths from the root."""
    listed = subprocess.run(
        ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"),
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    names = sorted(set(listed.stdout.split("\0")) - {""})
    return [name for name in names if (ROOT / name).exists()]


def _build(tree: Path, what: str, out: Path) -> Path:
    """Runs one hook of the build back-end, offline, with the installed setuptools."""
    program = f"import sys; from setuptools import build_meta as b; b.build_{what}(sys.argv[1])"
    result = subprocess.run(
        (sys.executable, "-c", program, str(out)),
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with their links: a build leaves folders behind."""
    copy = tmp_path_factory.mktemp("tree")
    for name in _sources():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tree, "wheel", tmp_path_factory.mktemp("wheel"))


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def _expected(tree: Path) -> set[str]:
    """Every module and data file of the three rooms, where the wheel must have it."""
    found = {"autopar/py.typed"}
    for room in ("autopar", "solver", "runtime"):
        inside = (path for path in (tree / room).rglob("*") if path.suffix in PACKAGED)
        names = (path.relative_to(tree).as_posix() for path in inside)
        found.update(name if room == "autopar" else f"autopar/{name}" for name in names)
    return found


def test_wheel_holds_every_module_and_data_file(tree: Path, wheel: Path) -> None:
    expected = _expected(tree)
    assert {"autopar/solver/__init__.py", "autopar/runtime/__init__.py"} <= expected
    assert any(name.endswith(".json") for name in expected), "no cluster preset among the sources"
    assert _names(wheel) == expected


def test_wheel_has_one_top_level_package(wheel: Path) -> None:
    assert {name.partition("/")[0] for name in _names(wheel)} == {"autopar"}


def test_wheel_carries_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


def test_source_archive_builds_the_same_wheel(tree: Path, wheel: Path, tmp_path: Path) -> None:
    for folder in ("archive", "unpacked", "wheel"):
        (tmp_path / folder).mkdir()
    archive = _build(tree, "sdist", tmp_path / "archive")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    rebuilt = _build(unpacked, "wheel", tmp_path / "wheel")
    assert _names(rebuilt) == _names(wheel)


def test_wheel_imports_away_from_the_sources(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = (
        "import autopar, autopar.solver, autopar.runtime; "
        "print(autopar.__file__, autopar.solver.__file__, autopar.runtime.__file__)"
    )
    result = subprocess.run(
        (sys.executable, "-c", program),
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(Path(path).is_relative_to(tmp_path) for path in result.stdout.split())
