"""The command line: what it prints, what it leaves behind, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from autopar import cli, demo, training
from autopar.api import load_plan
from autopar.errors import ArgumentError
from autopar.methods import Auto, DataParallel, ShardParallel
from autopar.plans import Plan
from autopar.report.audit import AuditReport
from autopar.target import load_target

ROOT = Path(__file__).resolve().parents[1]

STEP = """
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Sizes:
    width: int = 64


def loss_of(w, x):
    return jnp.mean(jnp.tanh(x @ w["a"]) @ w["b"])


@jax.jit
def step(w, x):
    loss, grads = jax.value_and_grad(loss_of)(w, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss


def make(sizes=Sizes()):
    a, b = jnp.ones((sizes.width, 128)), jnp.ones((128, sizes.width))
    return step, ({"a": a, "b": b}, jnp.ones((256, sizes.width))), (1,)


def make_other():
    return step, ({"a": jnp.ones((64, 256)), "b": jnp.ones((256, 64))}, jnp.ones((256, 64)))


def make_badly():
    return step


def make_lists():
    return step, [jnp.ones(3)]


def make_raising():
    raise ValueError("no such data")


NUMBER = 3
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "small.py").write_text(STEP, encoding="utf-8")
    return str(tmp_path / "small.py")


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    """Runs the command line in an empty folder; (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    yield call
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_plan_show_and_audit(run: Run, target: str, tmp_path: Path) -> None:
    code, out, err = run("plan", f"{target}:make", "--cluster", "abstract:2x4", "--mesh", "2x4")
    assert (code, err) == (0, "")
    assert "plan of    step" in out
    assert "mesh x=2,y=4" in out
    file = tmp_path / "small.plan.json"
    assert out.endswith("saved to small.plan.json\n")
    saved = load_plan(file)
    assert out.startswith(saved.summary())

    code, shown, _ = run("show", str(file), "--picture", "plan.svg")
    assert code == 0
    assert shown == saved.summary() + "\ndrawn into plan.svg\n"
    assert (tmp_path / "plan.svg").read_text(encoding="utf-8").startswith("<svg")

    code, out, err = run("audit", str(file), f"{target}:make")
    assert (code, err) == (0, "")
    assert out.startswith("audit ok: ")

    code, out, err = run("audit", str(file), f"{target}:make_other")
    assert code == 2
    assert err.startswith("error: ")
    assert "Traceback" not in err


def test_an_audit_that_finds_something_ends_with_1(
    run: Run, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("plan", target, "--cluster", "abstract:8", "--method", "data-parallel", "-o", "p.json")
    empty: tuple[()] = ()
    found = AuditReport(empty, ("lost",), empty, empty, empty, 1, 0)  # type: ignore[arg-type]
    monkeypatch.setattr(Plan, "audit", lambda self: found)
    code, out, _ = run("audit", "p.json", target)
    assert code == 1
    assert out.startswith("audit NOT ok")
    assert "lost" in out


def test_the_batch_argnums_of_make_reach_the_method(run: Run, target: str) -> None:
    code, _, err = run(
        "plan", target, "--cluster", "abstract:8", "--method", "data-parallel", "-o", "p.json"
    )
    assert (code, err) == (0, "")
    layouts = {entry.name: str(entry.sharding) for entry in load_plan("p.json").frozen.inputs}
    assert layouts == {"w/a": "[-,-]", "w/b": "[-,-]", "x": "[x,-]"}


def test_a_module_is_found_in_the_current_folder(run: Run, target: str) -> None:
    code, out, err = run("plan", "small:make", "--cluster", "abstract:2")
    assert (code, err) == (0, "")
    assert "saved to small.plan.json" in out


def test_devices_are_made_for_a_local_cluster(target: str, tmp_path: Path) -> None:
    """In a fresh process, without what the tests' own environment asks for."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    done = subprocess.run(
        (
            *(sys.executable, "-c", "from autopar.cli import main; main()"),
            *("plan", target, "--cluster", "local:4", "--method", "data-parallel"),
        ),
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "runs on    4 devices as mesh x=4, cluster local:cpu:4" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("plan", "absent.py:make"), ("there is no such file", "absent.py")),
        (("plan", "{file}:absent"), ("has no function 'absent'", "make() returns")),
        (("plan", "{file}:NUMBER"), ("has no function 'NUMBER'",)),
        (("plan", "{file}:make_raising"), ("ValueError: no such data", "small.py:")),
        (("plan", "{file}:make_badly"), ("something else than a step", "small.py:make_badly")),
        (("plan", "{file}:make_lists"), ("something else than a step", "'list'")),
        (("plan", "no_such_module_anywhere:make"), ("cannot be loaded", "ModuleNotFoundError")),
        (("plan", ":"), ("not a target",)),
        (("plan", "{file}", "--cluster", "nonsense"), ("'nonsense'", "h100-80g")),
        (("plan", "{file}", "--cluster", "local:99999"), ("too many", "abstract:99999")),
        (("plan", "{file}", "--cluster", "abstract:0"), ("sizes from 1",)),
        (("plan", "{file}", "--method", "magic"), ("unknown method", "zero3")),
        (("plan", "{file}", "--method", "zero2", "--mesh", "8"), ("takes no --mesh",)),
        (("plan", "{file}", "--mesh", "two"), ("not a mesh",)),
        (("plan", "{file}", "--cluster", "abstract:2x4", "--mesh", "3"), ("logical mesh",)),
        (("show", "absent.json"), ("absent.json",)),
        (("show", "{file}"), ("no JSON",)),
    ],
)
def test_errors_are_short_and_end_with_2(
    run: Run, target: str, arguments: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    code, out, err = run(*(argument.format(file=target) for argument in arguments))
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    for text in texts:
        assert text in err


def test_a_file_that_cannot_be_written_is_said(run: Run, target: str) -> None:
    code, _, err = run("plan", target, "--cluster", "abstract:2", "-o", "no/such/folder.json")
    assert code == 2
    assert "cannot be written" in err
    assert "no/such/folder.json" in err


def test_a_file_that_raises_names_its_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import math\n\nx = math.sqrt('a')\n", encoding="utf-8")
    code, _, err = run("plan", "broken.py")
    assert code == 2
    assert f"{tmp_path / 'broken.py'}:3" in err
    assert "broken" not in sys.modules


def test_traceback_lets_the_error_through(target: str) -> None:
    with pytest.raises(ArgumentError, match="unknown method"):
        cli.main(["--traceback", "plan", target, "--method", "magic"])


def test_usage_errors_end_with_2(run: Run) -> None:
    assert run("plan")[0] == 2
    assert run("nonsense")[0] == 2
    assert run("--help")[0] == 0


def test_a_file_named_like_a_loaded_module_does_not_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = sys.modules["subprocess"]
    file = tmp_path / "subprocess.py"
    file.write_text(STEP, encoding="utf-8")
    made = load_target(f"{file}:make")
    assert sys.modules["subprocess"] is before
    assert made.batch_argnums == (1,)
    assert made.args[1].shape == (256, 64)


@pytest.mark.parametrize(
    ("arguments", "method"),
    [
        (("auto", "", "auto"), Auto()),
        (("auto", "2x4", "auto"), ShardParallel(logical_mesh=(2, 4))),
        (("shard", "8", "ilp-highs"), ShardParallel(logical_mesh=(8,), solver="ilp-highs")),
        (("data-parallel", "", "auto"), DataParallel()),
    ],
)
def test_methods(arguments: tuple[str, str, str], method: object) -> None:
    assert cli.parse_method(*arguments) == method


TINY = demo.DemoConfig(steps=3, batch=8, length=8, layers=1, width=32, heads=8)


def test_the_demo_runs_on_both_and_compares(capsys: pytest.CaptureFixture[str]) -> None:
    ready = training.plan_demo(TINY, devices=2, method=DataParallel())
    result = cli.run_demo(ready)
    out = capsys.readouterr().out
    assert result.failures() == ()
    assert result.largest_difference < 1e-5
    assert result.share > 0.99
    assert result.audit.ok
    for title in ("2 devices", " 1 device"):
        assert f"{title}  step    3  loss " in out
    assert "all as it should be" in out


def demo_result(
    *,
    parallel: float = 2.0,
    single: float = 2.0,
    share: float = 1.0,
    extra: int = 0,
    config: demo.DemoConfig = TINY,
) -> training.DemoResult:
    audit = AuditReport(("extra",) * extra, (), (), (), (), 1, 1)  # type: ignore[arg-type]
    steps = config.steps
    return training.DemoResult(config, (parallel,) * steps, (single,) * steps, share, audit)


def test_a_run_that_passes_has_no_failures() -> None:
    assert demo_result().failures() == ()
    assert demo_result(config=demo.DemoConfig(seed=5)).failures() == ()


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (demo_result(parallel=2.001), "the losses differ by up to 0.0005"),
        (demo_result(parallel=float("nan")), "the losses differ by up to nan"),
        (demo_result(share=0.125), "parallel share 0.125"),
        (demo_result(extra=1), "not the planned one"),
        (demo_result(parallel=2.4, single=2.4, config=demo.DemoConfig()), "mean loss of the last"),
    ],
)
def test_what_is_wrong_is_said(result: training.DemoResult, text: str) -> None:
    assert any(text in failure for failure in result.failures())


def test_a_failed_demo_ends_with_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = SimpleNamespace(step=SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(training, "plan_demo", lambda config, **options: ready)
    monkeypatch.setattr(cli, "run_demo", lambda ready: demo_result(share=0.5))
    assert run("demo", "--steps", "2", "--devices", "2")[0] == 1


@pytest.mark.full
def test_the_command_demo(run: Run) -> None:
    code, out, _ = run("demo", "--steps", "2", "-o", "demo.plan.json")
    assert code == 0
    assert "all as it should be" in out
    assert load_plan("demo.plan.json").mesh.size == 8
