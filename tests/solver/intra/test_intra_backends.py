from __future__ import annotations

import math
import subprocess
import sys

import pytest

from autopar.errors import SolveError
from autopar.solver.intra.backends import BACKENDS, load_backend
from autopar.solver.intra.backends.cbc import read_bound


def test_every_registered_back_end_loads() -> None:
    assert sorted(BACKENDS) == ["cbc", "highs"]
    assert all(callable(load_backend(location)) for location in BACKENDS.values())


@pytest.mark.parametrize("location", ["no_such_module:solve", "math:no_such_name", "math"])
def test_a_wrong_location_is_an_error_with_a_remedy(location: str) -> None:
    with pytest.raises(SolveError, match=r"(?s)cannot be loaded.*elimination"):
        load_backend(location)


def test_the_solver_package_loads_no_ilp_package() -> None:
    program = (
        "import sys, autopar.solver, autopar.solver.intra.solve, autopar.solver.intra.backends\n"
        "print([m for m in ('pulp', 'highspy') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("log", "bound"),
    [
        ("Objective value:                284.18421360\nLower bound:      31.930\n", 31.9295),
        ("Lower bound:                    12\n", 11.5),
        ("Lower bound:                    1.5e+06\n", 1.45e6),
        ("Lower bound:                    -0.5\n", -0.55),
        ("Cbc0010I After 0 nodes, 1 on tree, 1e+50 best solution, best possible 3.25 (2 s)", 3.245),
        ("best possible 1.0 (a)\nbest possible 2.0 (b)\n", 1.95),
        ("best possible -1e+50\n", -math.inf),
        ("Welcome to the CBC MILP Solver\n", -math.inf),
    ],
)
def test_bounds_in_cbc_logs_are_read_with_their_rounding(log: str, bound: float) -> None:
    assert read_bound(log) == pytest.approx(bound)
