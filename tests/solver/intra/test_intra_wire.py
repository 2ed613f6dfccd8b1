from __future__ import annotations

import io
import math

import numpy as np
import pytest

from autopar.errors import SolveError
from autopar.solver.intra.problem import Problem
from autopar.solver.intra.wire import (
    Answer,
    decode_answer,
    decode_problem,
    encode_answer,
    encode_problem,
)
from tests.oracles.brute_force import random_problem, with_resources


@pytest.mark.parametrize("seed", range(20))
def test_problems_survive_the_trip(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = with_resources(random_problem(rng), rng, count=seed % 3)
    copy = decode_problem(encode_problem(problem))
    for ours, theirs in zip(problem.node_costs, copy.node_costs, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for edge, edge_copy in zip(problem.edges, copy.edges, strict=True):
        assert (edge.a, edge.b) == (edge_copy.a, edge_copy.b)
        np.testing.assert_array_equal(edge.costs, edge_copy.costs)
    for resource, resource_copy in zip(problem.resources, copy.resources, strict=True):
        assert resource.limit == resource_copy.limit
        for ours, theirs in zip(resource.weights, resource_copy.weights, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_the_empty_problem_survives() -> None:
    assert decode_problem(encode_problem(Problem(()))).sizes == ()


@pytest.mark.parametrize(
    "answer",
    [
        Answer((0, 2), 0.1 + 0.2, "Optimal"),
        Answer(None, -math.inf, "Time limit reached"),
        Answer(None, -math.inf, "Infeasible", infeasible=True),
    ],
)
def test_answers_survive_the_trip(answer: Answer) -> None:
    assert decode_answer(encode_answer(answer)) == answer


def test_pickles_are_not_loaded() -> None:
    buffer = io.BytesIO()
    objects = np.array([{"a": 1}], dtype=object)
    np.savez(buffer, sizes=objects, nodes=objects, ends=objects, tables=objects)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        decode_problem(buffer.getvalue())


@pytest.mark.parametrize("data", [b"", b"banner {}", b"{}", b'{"choices": 3}', b"[1]"])
def test_garbage_is_refused_and_shown(data: bytes) -> None:
    with pytest.raises(SolveError, match="no readable answer"):
        decode_answer(data)
