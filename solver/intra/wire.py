"""How a problem and its answer travel to and from a solver process: NPZ and JSON, no pickles."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass

import numpy as np

from autopar.errors import SolveError
from autopar.solver.intra.problem import Choices, Edge, Problem, Resource


@dataclass(frozen=True, slots=True)
class Answer:
    """What a solver process found.

    Attributes:
        choices: one per node, or None if no feasible answer was found.
        bound: proven lower bound in seconds; `-inf` if none.
        status: the solver's own words.
        infeasible: whether the solver proved that there is no feasible answer.
    """

    choices: Choices | None
    bound: float
    status: str
    infeasible: bool = False


def encode_problem(problem: Problem) -> bytes:
    """The problem as an NPZ archive of plain arrays; names stay behind."""
    buffer = io.BytesIO()
    np.savez(
        buffer,
        sizes=np.array(problem.sizes, dtype=np.int64),
        nodes=np.concatenate([*problem.node_costs, np.empty(0)]),
        ends=np.array([(e.a, e.b) for e in problem.edges], dtype=np.int64).reshape(-1, 2),
        tables=np.concatenate([*(e.costs.ravel() for e in problem.edges), np.empty(0)]),
        weights=np.concatenate([*(w for r in problem.resources for w in r.weights), np.empty(0)]),
        limits=np.array([r.limit for r in problem.resources], dtype=np.float64),
    )
    return buffer.getvalue()


def decode_problem(data: bytes) -> Problem:
    """The inverse of `encode_problem`."""
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        sizes, nodes = archive["sizes"].tolist(), archive["nodes"]
        ends, tables = archive["ends"].tolist(), archive["tables"]
        weights, limits = archive["weights"], archive["limits"].tolist()
    cuts = np.cumsum(sizes, dtype=np.int64)[:-1]
    costs = np.split(nodes, cuts) if sizes else []
    resources = [
        Resource(tuple(np.split(row, cuts)), limit)
        for row, limit in zip(weights.reshape(len(limits), sum(sizes)), limits, strict=True)
    ]
    edges = []
    start = 0
    for a, b in ends:
        stop = start + sizes[a] * sizes[b]
        edges.append(Edge(a, b, tables[start:stop].reshape(sizes[a], sizes[b])))
        start = stop
    return Problem(tuple(costs), tuple(edges), resources=tuple(resources))


def encode_answer(answer: Answer) -> bytes:
    """The answer as one JSON object."""
    fields = {
        "choices": answer.choices,
        "bound": answer.bound if math.isfinite(answer.bound) else None,
        "status": answer.status,
        "infeasible": answer.infeasible,
    }
    return json.dumps(fields).encode()


def decode_answer(data: bytes) -> Answer:
    """The inverse of `encode_answer`.

    Raises:
        SolveError: `data` is not a whole answer.
    """
    try:
        fields = json.loads(data)
        choices, bound = fields["choices"], fields["bound"]
        return Answer(
            choices=None if choices is None else tuple(int(s) for s in choices),
            bound=-math.inf if bound is None else float(bound),
            status=str(fields["status"]),
            infeasible=bool(fields["infeasible"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise SolveError(
            "a solver process gave no readable answer", got=repr(data[:200]), why=str(error)
        ) from error
