from __future__ import annotations

import itertools
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from autopar.errors import SolveError
from autopar.solver.intra.ilp_process import check_answer, run_backend, solve_ilp
from autopar.solver.intra.problem import Edge, Limits, Problem
from autopar.solver.intra.wire import Answer

SMALL = Problem(
    (np.array([1.0, 2.0]), np.array([0.0, 3.0])),
    (Edge(0, 1, np.array([[math.inf, 1.0], [2.0, 0.0]])),),
    ("dot", "add"),
)

BACKENDS = """
import os, pathlib, subprocess, sys, time
from autopar.solver.intra.backends import Outcome

def hang(model, seconds):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path(__file__).with_name("pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)

def crash(model, seconds):
    raise RuntimeError("out of luck")

def imported(model, seconds):
    return Outcome(f"jax loaded: {'jax' in sys.modules}", False, False, 0.0)

def die(model, seconds):
    os._exit(7)

def chatter(model, seconds):
    print("banner from Python", flush=True)
    os.system("echo banner from a program")
    for variable in model.variables():
        variable.varValue = 1.0 if variable.name in ("x_0_1", "x_1_0") else 0.0
    return Outcome("said a lot", True, False, -float("inf"))
"""


@pytest.fixture
def backends(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    (tmp_path / "odd_backends.py").write_text(BACKENDS)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def alive(pid: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_a_hanging_back_end_is_killed_with_all_its_children(backends: pathlib.Path) -> None:
    # Long enough for the child to start on a busy machine, whatever else it costs.
    with pytest.raises(SolveError, match=r"(?s)killed.*odd_backends:hang.*7 s and 3 s of grace"):
        run_backend(SMALL, "odd_backends:hang", seconds=7.0, grace=3.0)
    pids = [int(p) for p in (backends / "pids").read_text().split()]
    deadline = time.monotonic() + 10
    while any(alive(p) for p in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [alive(p) for p in pids] == [False, False]


def test_an_interrupt_kills_the_child_too(backends: pathlib.Path) -> None:
    program = (
        # A background job of a shell inherits an ignored SIGINT; this is about one that is not.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from autopar.solver.intra.ilp_process import run_backend\n"
        "from autopar.solver.intra.problem import Problem\n"
        "import numpy as np, sys\n"
        f"sys.path.insert(0, {str(backends)!r})\n"
        "run_backend(Problem((np.zeros(2),)), 'odd_backends:hang', seconds=60.0, grace=1.0)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    pids = backends / "pids"
    deadline = time.monotonic() + 60
    while not (pids.exists() and pids.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.send_signal(signal.SIGINT)
    assert parent.wait(timeout=30) != 0
    children = [int(p) for p in pids.read_text().split()]
    while any(alive(p) for p in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [alive(p) for p in children] == [False, False]


@pytest.mark.usefixtures("backends")
def test_a_crash_brings_its_traceback() -> None:
    with pytest.raises(SolveError, match=r"(?s)failed.*odd_backends:crash.*out of luck"):
        run_backend(SMALL, "odd_backends:crash", seconds=30.0, grace=30.0)


@pytest.mark.usefixtures("backends")
def test_a_sudden_death_is_reported() -> None:
    with pytest.raises(SolveError, match="exit status 7"):
        run_backend(SMALL, "odd_backends:die", seconds=30.0, grace=30.0)


@pytest.mark.usefixtures("backends")
def test_banners_do_not_spoil_the_answer() -> None:
    answer = run_backend(SMALL, "odd_backends:chatter", seconds=30.0, grace=30.0)
    assert answer == Answer((1, 0), -math.inf, "said a lot")


@pytest.mark.usefixtures("backends")
def test_the_solver_process_does_not_load_jax() -> None:
    answer = run_backend(SMALL, "odd_backends:imported", seconds=30.0, grace=30.0)
    assert answer.status == "jax loaded: False"


def test_a_missing_back_end_is_named() -> None:
    with pytest.raises(SolveError, match=r"(?s)no_such_module:solve.*cannot be loaded"):
        run_backend(SMALL, "no_such_module:solve", seconds=30.0, grace=30.0)
    with pytest.raises(SolveError, match="unknown ILP back-end"):
        solve_ilp(SMALL, backend="gurobi", limits=Limits())


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (Answer(None, -math.inf, "Infeasible", infeasible=True), "infeasible"),
        (Answer(None, 0.0, "Time limit reached"), r"(?s)no answer within.*Time limit reached"),
        (Answer((0, 0), 0.0, "Optimal"), "breaks its constraints"),
        (Answer((0, 2), 0.0, "Optimal"), "breaks its constraints"),
        (Answer((0,), 0.0, "Optimal"), "breaks its constraints"),
        (Answer((-1, 0), 0.0, "Optimal"), "breaks its constraints"),
    ],
)
def test_answers_are_checked(answer: Answer, text: str) -> None:
    with pytest.raises(SolveError, match=text):
        check_answer(SMALL, answer, "highs")


@pytest.mark.parametrize("backend", ["highs", "cbc"])
def test_infeasibility_is_proven_by_the_solver(backend: str) -> None:
    differ = np.where(np.eye(3, dtype=bool), math.inf, 0.0) + np.arange(3.0)
    edges = tuple(Edge(a, b, differ) for a, b in itertools.combinations(range(4), 2))
    problem = Problem((np.zeros(3),) * 4, edges, ("a", "b", "c", "d"))
    with pytest.raises(SolveError, match=r"(?s)infeasible.*where: a"):
        solve_ilp(problem, backend=backend, limits=Limits())


def test_nothing_left_to_choose_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    solution = solve_ilp(Problem((np.array([2.0]),)), backend="highs", limits=Limits())
    assert (solution.objective, solution.gap, solution.name) == (2.0, 0.0, "ilp-highs")


def test_the_caller_s_folder_stays_clean(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    solution = solve_ilp(SMALL, backend="cbc", limits=Limits())
    assert solution.objective == 4.0
    assert os.listdir(tmp_path) == []
