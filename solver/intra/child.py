"""The solver process: a problem on stdin, one answer on stdout, nothing else.

    python -m autopar.solver.intra.child MODULE:ATTRIBUTE SECONDS

Solvers print banners past Python; stdout is closed to everyone but the answer at descriptor level.
"""

from __future__ import annotations

import importlib
import os
import sys

from autopar.solver.intra.wire import decode_problem, encode_answer


def main(backend: str, seconds: float) -> None:
    """Read, solve, answer."""
    answer_to = os.dup(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    problem = decode_problem(sys.stdin.buffer.read())
    # By name: whoever imports this package for its wire format needs no ILP package.
    ilp = importlib.import_module("autopar.solver.intra.ilp")
    answer = ilp.solve(problem, backend, seconds)
    with os.fdopen(answer_to, "wb") as stream:
        stream.write(encode_answer(answer))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
