"""The environment of every test, the options of the run, and the ledger of a resumable one."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

# JAX reads these at its first backend use, so they are set before any test module imports it.
# Cheap compiles: tests hold numbers and programs, never speed. NPROC sizes the CPU client's thread
# pool: with fewer than two threads a device, a collective can starve and abort the process.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = "32"
os.environ["XLA_FLAGS"] = " ".join(
    (
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    )
)

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
SOURCES = ("autopar", "solver", "runtime", "tests", "benchmarks", "examples", "pyproject.toml")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("autopar")
    group.addoption("--full", action="store_true", help="the whole matrix in place of the sample")
    group.addoption(
        "--ledger",
        type=Path,
        metavar="FILE",
        help="append a JSON line per finished case; skip those FILE has as passed on these sources",
    )
    group.addoption("--update-golden", action="store_true", help="rewrite tests/golden")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--ledger")
    worker_input = getattr(config, "workerinput", None)
    if worker_input is not None:
        passed = frozenset(worker_input.get("ledger_passed", ()))
        config.pluginmanager.register(_Selection(config, passed), "autopar-selection")
        return
    if path is None:
        config.pluginmanager.register(_Selection(config, frozenset()), "autopar-selection")
        return
    digest = _source_digest(full=config.getoption("--full"))
    ledger = _Ledger(path.resolve(), digest)
    config.pluginmanager.register(ledger, "autopar-ledger")
    config.pluginmanager.register(_Selection(config, ledger.passed), "autopar-selection")


@pytest.fixture
def full(pytestconfig: pytest.Config) -> bool:
    """Whether the whole matrix is asked for, in place of the seeded sample."""
    return bool(pytestconfig.getoption("--full"))


@pytest.fixture
def golden(pytestconfig: pytest.Config) -> Callable[[str, str], None]:
    """A function that holds a text against the file of that name in tests/golden."""
    update = bool(pytestconfig.getoption("--update-golden"))

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"no golden file {name}; make it with --update-golden", pytrace=False)
        expected = path.read_text(encoding="utf-8")
        if expected != text:
            diff = difflib.unified_diff(
                expected.splitlines(keepends=True),
                text.splitlines(keepends=True),
                fromfile=f"golden/{name}",
                tofile="this run",
            )
            pytest.fail("".join(diff), pytrace=False)

    return compare


class _Selection:
    """Deselects what the sample leaves out and what the ledger has as passed."""

    def __init__(self, config: pytest.Config, passed: frozenset[str]) -> None:
        self._full = bool(config.getoption("--full"))
        self._passed = passed

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        kept: list[pytest.Item] = []
        left_out: list[pytest.Item] = []
        for item in items:
            beyond_sample = not self._full and item.get_closest_marker("full") is not None
            skip = beyond_sample or item.nodeid in self._passed
            (left_out if skip else kept).append(item)
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = kept


class _Ledger:
    """Writes one line per finished case, and knows those that passed on the same sources.

    Lives in the controlling process only: workers of pytest-xdist get the passed cases by value, so
    that all of them, restarted ones too, collect the same list.
    """

    def __init__(self, path: Path, digest: str) -> None:
        self._path = path
        self._digest = digest
        self._unfinished: dict[str, tuple[str, float]] = {}
        self._recorded = 0
        self.passed = frozenset(_passed_cases(path, digest))

    @pytest.hookimpl(optionalhook=True)  # of pytest-xdist
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["ledger_passed"] = sorted(self.passed)

    def pytest_report_header(self) -> str:
        return f"ledger: {len(self.passed)} cases already passed on sources {self._digest[:12]}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome, seconds = self._unfinished.pop(report.nodeid, ("passed", 0.0))
        if outcome == "passed":
            outcome = report.outcome
        seconds += report.duration
        if report.when in ("setup", "call"):
            self._unfinished[report.nodeid] = (outcome, seconds)
            return
        self._append(report.nodeid, outcome, seconds)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        nothing_left = session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
        if nothing_left and self.passed:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(
            f"ledger: {len(self.passed)} cases passed before, {self._recorded} recorded now"
        )

    def _append(self, case: str, outcome: str, seconds: float) -> None:
        line = json.dumps(
            {"case": case, "outcome": outcome, "seconds": round(seconds, 3), "digest": self._digest}
        )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # One write to a file opened for appending: a cut-off run leaves whole lines.
        handle = os.open(self._path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o644)
        try:
            size = os.fstat(handle).st_size
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            os.write(handle, (b"\n" if torn else b"") + line.encode() + b"\n")
        finally:
            os.close(handle)
        self._recorded += 1


def _passed_cases(path: Path, digest: str) -> Iterator[str]:
    """The cases whose latest line on the same sources says passed."""
    if not path.exists():
        return
    latest: dict[str, str] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # the torn last line of a run that was killed while writing
            continue
        if isinstance(line, dict) and line.get("digest") == digest:
            latest[str(line["case"])] = str(line["outcome"])
    yield from (case for case, outcome in latest.items() if outcome == "passed")


def _source_digest(*, full: bool) -> str:
    """A digest of every file a test can depend on, the two versions, and the size of the run."""
    listed = subprocess.run(
        ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *SOURCES),
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    digest = hashlib.sha256(f"{platform.python_version()} {version('jax')} full={full}".encode())
    for name in sorted(set(listed.stdout.split("\0"))):
        path = ROOT / name
        if path.is_file():
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
