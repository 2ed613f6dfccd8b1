from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import VerifyError
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import Sharding, check_sharding, parse_sharding, replicated

MESH = Mesh(("x", "y", "z"), (2, 3, 2))
AXES = ("x", "y", "z")


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    """Each axis on one dim, pending, or free; in any order along a dim."""
    rank = draw(st.integers(0, 3))
    dims: list[list[str]] = [[] for _ in range(rank)]
    partial = []
    for axis in draw(st.permutations(AXES)):
        place = draw(st.integers(-2, rank - 1))
        if place >= 0:
            dims[place].append(axis)
        elif place == -1:
            partial.append(axis)
    return Sharding(tuple(map(tuple, dims)), tuple(a for a in AXES if a in partial))


@given(shardings())
@settings(max_examples=100, deadline=None)
def test_text_round_trip(sharding: Sharding) -> None:
    assert parse_sharding(str(sharding)) == sharding
    check_sharding(sharding, (12,) * len(sharding.dims), MESH)


@pytest.mark.parametrize(
    ("text", "sharding"),
    [
        ("[]", Sharding(())),
        ("[]+x", Sharding((), ("x",))),
        ("[-]", Sharding(((),))),
        ("[x,-,y.z]", Sharding((("x",), (), ("y", "z")))),
        ("[x,-]+y.z", Sharding((("x",), ()), ("y", "z"))),
    ],
)
def test_text(text: str, sharding: Sharding) -> None:
    assert str(sharding) == text
    assert parse_sharding(text) == sharding


@pytest.mark.parametrize(
    "text", ["", "x", "[x", "x]", "[x]y", "[x]+", "[,]", "[x.]", "[x,]", "[.y]", "[x]+y."]
)
def test_unreadable_text(text: str) -> None:
    with pytest.raises(VerifyError, match="a sharding cannot be read"):
        parse_sharding(text)


def test_local_shapes() -> None:
    sharding = parse_sharding("[x.y,-,z]+w")
    assert sharding.split_axes == ("x", "y", "z")
    assert [sharding.shards(d, MESH) for d in range(3)] == [6, 1, 2]
    assert sharding.local_shape((12, 5, 4), MESH) == (2, 5, 2)
    assert sharding.local_size((12, 5, 4), MESH) == 20
    assert str(sharding.with_dim(1, ("z",)).with_dim(2, ())) == "[x.y,z,-]+w"
    assert str(replicated(2)) == "[-,-]"
    assert replicated(0).local_size((), MESH) == 1


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("[x]", (4, 4), "another rank"),
        ("[w]", (4,), "axis 'w' is not on the mesh"),
        ("[x]+w", (4,), "axis 'w' is not on the mesh"),
        ("[x,x]", (4, 4), "used twice"),
        ("[x.x]", (4,), "used twice"),
        ("[x]+x", (4,), "used twice"),
        ("[-]+z.x", (4,), "mesh order"),
        ("[y]", (4,), "dim 0 of size 4 does not divide"),
        ("[-,x.z]", (4, 6), "dim 1 of size 6 does not divide"),
        ("[x]", (1,), "dim 0 of size 1 does not divide"),
    ],
)
def test_check_names_the_broken_invariant(text: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(VerifyError, match=message) as caught:
        check_sharding(parse_sharding(text), shape, MESH)
    assert text in caught.value.got
    assert "x=2,y=3,z=2" in caught.value.got


@pytest.mark.parametrize(("text", "shape"), [("[z.x]", (4,)), ("[y]", (0,)), ("[]+x.z", ())])
def test_check_accepts(text: str, shape: tuple[int, ...]) -> None:
    check_sharding(parse_sharding(text), shape, MESH)
