from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.errors import VerifyError
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import check_sharding
from autopar.rules.rule import Eqn, Factor, Rule, make_rule, summed
from autopar.rules.strategy import Finish, Strategy, assignment_text, parse_assignment, resolve

MESH = Mesh.of(2, 3)
F32 = np.dtype(np.float32)


def made(shapes: list[tuple[int, ...]], outs: list[tuple[int, ...]]) -> Eqn:
    dtypes = (F32,) * len(shapes), (F32,) * len(outs)
    return Eqn("made_up", {}, tuple(shapes), tuple(outs), *dtypes)


def matmul(i: int = 6, k: int = 12, j: int = 4) -> Rule:
    eqn = made([(i, k), (k, j)], [(i, j)])
    return make_rule(
        eqn,
        [["i", "k"], ["k", "j"]],
        [["i", "j"]],
        factors={"k": summed()},
        linear=[(0,), (1,)],
    )


def merged() -> Rule:
    """`a b -> (a b)` with a=2, b=6."""
    return make_rule(made([(2, 6)], [(12,)]), [["a", "b"]], [["a b"]])


def parsed(rule: Rule, text: str, mesh: Mesh = MESH) -> Strategy | None:
    return resolve(rule, parse_assignment(rule, text, mesh), mesh)


def texts(strategy: Strategy | None) -> list[str]:
    assert strategy is not None
    return [str(s) for s in (*strategy.ins, *strategy.outs)]


@pytest.mark.parametrize(
    ("text", "shardings", "work"),
    [
        ("-", ["[-,-]", "[-,-]", "[-,-]"], 1),
        ("x:i", ["[x,-]", "[-,-]", "[x,-]"], 2),
        ("x:i y:k", ["[x,y]", "[y,-]", "[x,-]+y"], 6),
        ("x:k y:k", ["[-,x.y]", "[x.y,-]", "[-,-]+x.y"], 6),
        ("x:+0 y:i", ["[y,-]+x", "[-,-]", "[y,-]+x"], 3),
        ("x:+1 y:k", ["[-,y]", "[y,-]+x", "[-,-]+x.y"], 3),
        ("x:+0 y:+0", ["[-,-]+x.y", "[-,-]", "[-,-]+x.y"], 1),
    ],
)
def test_resolve(text: str, shardings: list[str], work: int) -> None:
    strategy = parsed(matmul(), text)
    assert texts(strategy) == shardings
    assert strategy is not None
    assert strategy.work == work
    assert strategy.finishes == ()


def test_what_does_not_divide_does_not_resolve() -> None:
    assert parsed(matmul(j=4), "y:j") is None
    assert parsed(matmul(i=2), "x:i y:i") is None
    assert parsed(matmul(i=0), "x:i") is not None
    assert parsed(matmul(i=1), "x:i") is None
    assert parsed(matmul(i=1), "x:i", Mesh.of(1)) is not None


@pytest.mark.parametrize(
    ("text", "shardings"),
    [
        ("x:a", ["[x,-]", "[x]"]),
        ("x:a y:b", ["[x,y]", "[x.y]"]),
        ("y:b", None),  # blocks of b alone are strided in (a b)
    ],
)
def test_compound_dims_split_from_the_major_end(text: str, shardings: list[str] | None) -> None:
    strategy = parsed(merged(), text)
    assert (strategy if shardings is None else texts(strategy)) == shardings


def test_major_factor_must_be_split_whole() -> None:
    rule = make_rule(made([(4, 6)], [(24,)]), [["a", "b"]], [["a b"]])
    assert parsed(rule, "x:a y:b") is None
    assert texts(parsed(rule, "x:a z:a y:b", Mesh.of(2, 3, 2))) == ["[x.z,y]", "[x.z.y]"]


def test_size_one_factors_do_not_hide_the_next() -> None:
    rule = make_rule(made([(1, 6)], [(6,)]), [["a", "b"]], [["a b"]], sizes={"a": 1})
    assert texts(parsed(rule, "y:b")) == ["[-,y]", "[y]"]


def test_finishes_name_the_axes_of_each_result() -> None:
    rule = make_rule(
        made([(6, 6)], [(), ()]),
        [["p", "q"]],
        [[], []],
        factors={"p": Factor("", None, "max"), "q": Factor("", None, "max")},
    )
    strategy = parsed(rule, "x:q y:p")
    assert strategy is not None
    assert [(f.output, f.kind, set(f.axes)) for f in strategy.finishes] == [
        (0, "max", {"x", "y"}),
        (1, "max", {"x", "y"}),
    ]
    alone = parsed(rule, "y:p")
    assert alone is not None
    assert alone.finishes == (Finish(0, "max", ("y",)), Finish(1, "max", ("y",)))


def test_partial_axes_stand_in_mesh_order() -> None:
    mesh = Mesh.of(2, 2, 2)
    rule = make_rule(
        made([(4, 4)], [()]), [["p", "q"]], [[]], factors={"p": summed(), "q": summed()}
    )
    assert texts(parsed(rule, "x:q y:p z:q", mesh)) == ["[y,x.z]", "[]+x.y.z"]


@pytest.mark.parametrize("rule", [matmul(), merged()], ids=["matmul", "merged"])
@pytest.mark.parametrize("mesh", [Mesh.of(2), MESH, Mesh.of(2, 2, 3)], ids=str)
def test_text_round_trip_and_valid_shardings(rule: Rule, mesh: Mesh) -> None:
    shapes = [(6, 12), (12, 4), (6, 4)] if len(rule.ins) == 2 else [(2, 6), (12,)]
    for choice in itertools.product(range(-1, len(rule.factors)), repeat=len(mesh.names)):
        text = assignment_text(rule, choice, mesh)
        assert parse_assignment(rule, text, mesh) == choice
        strategy = resolve(rule, choice, mesh)
        if strategy is not None:
            for sharding, shape in zip((*strategy.ins, *strategy.outs), shapes, strict=True):
                check_sharding(sharding, shape, mesh)


@pytest.mark.parametrize("text", ["z:i", "x:n", "x", "x:i y:"])
def test_unreadable_text_is_refused(text: str) -> None:
    with pytest.raises(VerifyError, match=r"does not fit the rule(.|\n)*why: axes \('x', 'y'\)"):
        parse_assignment(matmul(), text, MESH)
