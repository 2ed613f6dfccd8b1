"""Solving the ILP in a process of its own, under a watchdog.

A solver that hangs, crashes or eats memory must not take the user's program along. The process
gets the problem through a pipe, and is killed with all its children once the time limit and a
grace period have passed. Answers are data (JSON), checked and priced again here.
"""

from __future__ import annotations

import math
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from autopar.errors import SolveError
from autopar.solver.intra.backends import BACKENDS
from autopar.solver.intra.problem import (
    Choices,
    Limits,
    Problem,
    Solution,
    evaluate,
    make_solution,
)
from autopar.solver.intra.simplify import EXACT_PASSES, simplify
from autopar.solver.intra.wire import Answer, decode_answer, encode_problem

# Beyond the time limit: starting Python, importing, building the model and stopping in good order.
GRACE_SECONDS = 20.0
_SHOWN_STDERR = 2000


def solve_ilp(problem: Problem, *, backend: str, limits: Limits) -> Solution:
    """Solve with a back-end named in `BACKENDS`.

    Raises:
        SolveError: the problem is infeasible, the back-end is missing, crashed or was killed, its
            answer is wrong, or time ran out before any answer was found.
    """
    start = time.perf_counter()
    if backend not in BACKENDS:
        raise SolveError("unknown ILP back-end", got=backend, remedy=f"one of {sorted(BACKENDS)}")
    reduced = simplify(problem, EXACT_PASSES)
    choices: Choices = ()
    bound = math.inf
    notes: tuple[str, ...] = ()
    for resource in reduced.problem.resources if not reduced.problem.node_costs else ():
        if resource.limit < 0:
            raise SolveError(
                "the problem is infeasible",
                where=resource.name,
                why=f"the only choices left are {-resource.limit:g} over this limit",
                remedy="raise the limit, use more devices, or smaller micro-batches",
            )
    if reduced.problem.node_costs:
        answer = run_backend(
            reduced.problem, BACKENDS[backend], seconds=limits.time_limit, grace=GRACE_SECONDS
        )
        choices = check_answer(reduced.problem, answer, backend)
        bound, notes = answer.bound + reduced.offset, (f"{backend}: {answer.status}",)
    return make_solution(
        problem,
        reduced.decode(choices),
        lower_bound=bound,
        name=f"ilp-{backend}",
        seconds=time.perf_counter() - start,
        notes=notes,
    )


def check_answer(problem: Problem, answer: Answer, backend: str) -> Choices:
    """The choices of an answer, once they are seen to fit the problem.

    Raises:
        SolveError: there are none, or they are out of range or impossible.
    """
    if answer.infeasible:
        raise SolveError(
            "the problem is infeasible",
            where=problem.names[0],
            why=f"the {backend} back-end proved that no combination of choices is finite",
        )
    if answer.choices is None:
        raise SolveError(
            "the solver found no answer within its limits",
            where=f"ILP back-end {backend}",
            got=answer.status,
            remedy='raise the time limit, or use solver="elimination"',
        )
    in_range = len(answer.choices) == len(problem.sizes) and all(
        0 <= s < n for s, n in zip(answer.choices, problem.sizes, strict=True)
    )
    if not in_range or math.isinf(evaluate(problem, answer.choices)):
        raise SolveError(
            "a solver gave an answer that breaks its constraints",
            where=f"ILP back-end {backend}",
            got=answer.status,
            remedy='use another solver, such as solver="elimination"',
        )
    return answer.choices


def run_backend(problem: Problem, location: str, *, seconds: float, grace: float) -> Answer:
    """Run the back-end at "module:attribute" in a child process.

    Args:
        problem: merged edges, at least one node.
        location: where the back-end is.
        seconds: what the child may spend on building and solving.
        grace: how much longer it may live before it is killed.

    Raises:
        SolveError: it was killed, crashed, or gave no readable answer.
    """
    program = pathlib.Path(__file__).with_name("child.py")
    command = [sys.executable, "-P", str(program), location, repr(seconds)]
    with tempfile.TemporaryDirectory(prefix="autopar-ilp-") as folder:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=_environment(folder),
            start_new_session=True,
        )
        try:
            out, err = child.communicate(encode_problem(problem), timeout=seconds + grace)
        except subprocess.TimeoutExpired:
            raise SolveError(
                "a solver process was killed: it did not stop",
                where=f"ILP back-end {location}",
                got=f"no answer after {seconds:g} s and {grace:g} s of grace",
                remedy='raise the time limit, or use solver="elimination"',
            ) from None
        finally:
            _kill_group(child)
    if child.returncode != 0:
        raise SolveError(
            "a solver process failed",
            where=f"ILP back-end {location}",
            got=f"exit status {child.returncode}",
            why=err.decode(errors="replace").strip()[-_SHOWN_STDERR:],
        )
    return decode_answer(out)


def _environment(folder: str) -> dict[str, str]:
    """This process's environment, with its import path and a folder for temporary files."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, "TMPDIR": folder, "TMP": folder}


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and everything that it started; harmless once it has ended."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
