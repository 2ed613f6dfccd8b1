"""The solver process: a problem on stdin, one answer on stdout, nothing else.

    python -P .../autopar/solver/intra/child.py MODULE:ATTRIBUTE SECONDS

It is run as a file, and puts bare packages in place of `autopar` and `autopar.solver`: their own
`__init__` would bring in JAX, which costs a second and a solver has no use for.

Solvers print banners past Python, so descriptor 1 is closed to everyone but the answer.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import sys
import types


def main(backend: str, seconds: float) -> None:
    """Read, solve, answer."""
    answer_to = os.dup(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    intra = pathlib.Path(__file__).parent
    _bare_package("autopar", intra.parent.parent)
    _bare_package("autopar.solver", intra.parent)
    wire = importlib.import_module("autopar.solver.intra.wire")
    ilp = importlib.import_module("autopar.solver.intra.ilp")
    problem = wire.decode_problem(sys.stdin.buffer.read())
    answer = ilp.solve(problem, backend, seconds)
    with os.fdopen(answer_to, "wb") as stream:
        stream.write(wire.encode_answer(answer))


def _bare_package(name: str, folder: pathlib.Path) -> None:
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
