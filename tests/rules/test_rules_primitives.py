"""Every rule against its primitive: on the simulated mesh, and once on real devices."""

from __future__ import annotations

import numpy as np
import pytest
from jax.extend.core import primitives

from autopar.ir.mesh import Mesh
from autopar.rules.registry import TABLE
from autopar.rules.strategy import resolve
from tests.oracles.rule_cases_dense import CONTRACTION, REDUCTION, WINDOWS
from tests.oracles.rule_cases_elementwise import COSTLY, ELEMENTWISE, UNARY_FLOAT
from tests.oracles.rule_cases_moves import INDEXING, LAYOUT
from tests.oracles.rule_harness import (
    Case,
    Instance,
    check_all_assignments,
    check_case,
    check_results,
    instances,
    pick_assignments,
    place_operands,
)
from tests.oracles.simulated_mesh import run_on_devices

STRUCTURED = (*CONTRACTION, *WINDOWS, *REDUCTION, *LAYOUT, *INDEXING)
CASES = (*ELEMENTWISE, *STRUCTURED)
NEWER = frozenset({"one_minus_square"})
"""Primitives of JAX releases that this interpreter may not have."""


def ids(case: Case) -> str:
    return case.id


def test_every_rule_has_a_case() -> None:
    known = {getattr(primitives, name).name for name in dir(primitives) if name.endswith("_p")}
    missing = TABLE.keys() - {case.primitive for case in CASES}
    assert missing <= NEWER
    assert not missing & known, "this JAX has the primitive: give it a case"


def test_case_names_are_unique() -> None:
    names = [case.id for case in CASES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("case", ELEMENTWISE, ids=ids)
def test_elementwise_rule_equals_primitive(case: Case, *, full: bool) -> None:
    # All of them share one maker, so a few draws of each are many draws of it.
    draws, picks = (1, 1) if case.primitive in COSTLY else (2, 2)
    if full:
        draws, picks = (3, 2) if case.primitive in COSTLY else (25, 4)
    check_case(case, draws=draws, picks=picks)


@pytest.mark.parametrize("case", STRUCTURED, ids=ids)
def test_structured_rule_equals_primitive(case: Case, *, full: bool) -> None:
    check_case(case, draws=50 if full else 4, picks=4 if full else 3)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [Mesh.of(2, 2), Mesh.of(2, 3), Mesh.of(3)], ids=str)
@pytest.mark.parametrize("case", STRUCTURED, ids=ids)
def test_all_assignments(case: Case, mesh: Mesh) -> None:
    tried = sum(check_all_assignments(case, mesh, salt) for salt in range(1000, 1003))
    assert tried > 0


def split_instance(case: Case, mesh: Mesh) -> tuple[Instance, tuple[int, ...]]:
    """The first draw of the case that some assignment spreads over an axis of `mesh`."""
    for salt in range(50):
        rng = case.rng(salt)
        function, args = case.make(rng)
        for instance in instances(function, args, case.primitive):
            chosen = pick_assignments(instance.rule, mesh, rng, 1)[0]
            if any(factor >= 0 for factor in chosen):
                return instance, chosen
    raise AssertionError(f"nothing of {case.id} can be split")


GROUPS = {
    "elementwise": tuple(
        c for c in ELEMENTWISE if c.primitive not in COSTLY and c.primitive not in UNARY_FLOAT[1:]
    ),
    "contraction": CONTRACTION,
    "windows": WINDOWS,
    "reduction": REDUCTION,
    "layout": LAYOUT,
    "indexing": INDEXING,
}


@pytest.mark.parametrize("group", GROUPS)
def test_rules_in_shard_map(group: str) -> None:
    mesh = Mesh.of(2, 2)
    items = []
    for case in GROUPS[group]:
        instance, assignment = split_instance(case, mesh)
        strategy = resolve(instance.rule, assignment, mesh)
        assert strategy is not None
        blocks = place_operands(instance, strategy, mesh, np.random.default_rng(0))
        items.append((case, instance, strategy, blocks))
    results = run_on_devices([(i.rule, i.computation, s, b) for _, i, s, b in items], mesh)
    for (case, instance, strategy, _), made in zip(items, results, strict=True):
        try:
            check_results(instance, strategy, made, mesh, case.rtol)
        except AssertionError as error:
            error.add_note(f"{case.id}: {instance.rule.spec} as {strategy}")
            raise
