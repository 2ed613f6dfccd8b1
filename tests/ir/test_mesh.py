import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ArgumentError
from autopar.ir.mesh import Mesh, factorisations, split_over_levels

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


def test_text_round_trip() -> None:
    mesh = Mesh(("dp", "tp"), (2, 4))
    assert str(mesh) == "dp=2,tp=4"
    assert Mesh.parse(str(mesh)) == mesh
    assert mesh.axes == (("dp", 2), ("tp", 4))
    assert mesh.size == 8
    assert mesh.axis_size("tp") == 4


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("2x4", (2, 4)), ("8", (8,)), ("(2, 4)", (2, 4)), ("(4,)", (4,)), ("x=1 , y=3", (1, 3))],
)
def test_parse_without_names(text: str, sizes: tuple[int, ...]) -> None:
    assert Mesh.parse(text) == Mesh.of(*sizes)


def test_parse_fills_minus_one() -> None:
    assert Mesh.parse("dp=-1,tp=4", devices=8) == Mesh(("dp", "tp"), (2, 4))
    assert Mesh.parse("dp=-1,tp=4", devices=4) == Mesh(("dp", "tp"), (1, 4))
    assert Mesh.parse("2x-1", devices=6) == Mesh.of(2, 3)


@pytest.mark.parametrize(
    ("text", "devices", "message"),
    [
        ("", None, "not a mesh"),
        ("x=", None, "not a mesh"),
        ("x=2,4", None, "not a mesh"),
        ("axb", None, "not a mesh"),
        ("x=0", None, "whole numbers from 1"),
        ("x=-2", 4, "whole numbers from 1"),
        ("x=-1,y=-1", 4, "at most one -1"),
        ("x=-1", None, "needs a number of devices"),
        ("x=-1,y=3", 8, "does not fit 8 devices"),
        ("2x2", 8, "does not fit 8 devices"),
        ("x=2,x=4", None, "stands twice"),
        ("1x1x1x1x2", None, "needs names"),
    ],
)
def test_parse_refuses(text: str, devices: int | None, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Mesh.parse(text, devices=devices)


@pytest.mark.parametrize(
    ("names", "sizes"), [((), ()), (("x",), (2, 4)), (("a b",), (2,)), (("x",), (True,))]
)
def test_construction_refuses(names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError):
        Mesh(names, sizes)


def test_unknown_axis_names_the_axes() -> None:
    with pytest.raises(ArgumentError, match=r"no axis 'q'(.|\n)*'x', 'y'"):
        Mesh.of(2, 2).axis_size("q")


@settings(deadline=None)
@given(SIZES)
def test_coordinates_are_row_major(sizes: tuple[int, ...]) -> None:
    mesh = Mesh.of(*sizes)
    expected = list(itertools.product(*(range(size) for size in sizes)))
    assert [mesh.coordinates(i) for i in range(mesh.size)] == expected
    assert [mesh.index(at) for at in expected] == list(range(mesh.size))
    with pytest.raises(ArgumentError):
        mesh.coordinates(mesh.size)
    with pytest.raises(ArgumentError):
        mesh.index(sizes)


def test_groups() -> None:
    mesh = Mesh.of(2, 3)
    assert mesh.groups(("y",)) == ((0, 1, 2), (3, 4, 5))
    assert mesh.groups(("x",)) == ((0, 3), (1, 4), (2, 5))
    assert mesh.groups(("x", "y")) == ((0, 1, 2, 3, 4, 5),)
    assert mesh.groups(("y", "x")) == ((0, 3, 1, 4, 2, 5),)
    assert mesh.groups(()) == ((0,), (1,), (2,), (3,), (4,), (5,))


def test_factorisations() -> None:
    assert factorisations(8, 2) == ((8,), (2, 4), (4, 2))
    assert factorisations(1, 3) == ((1,),)
    assert factorisations(7, 4) == ((7,),)
    with pytest.raises(ArgumentError):
        factorisations(0, 1)


@settings(deadline=None)
@given(st.integers(1, 96), st.integers(1, 4))
def test_factorisations_are_all(n: int, max_axes: int) -> None:
    found = factorisations(n, max_axes)
    divisors = [d for d in range(2, n + 1) if n % d == 0]
    brute = {
        factors
        for length in range(1, max_axes + 1)
        for factors in itertools.product(divisors, repeat=length)
        if math.prod(factors) == n
    }
    assert set(found) == (brute or {(1,)})
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("levels", "sizes", "pieces"),
    [
        ((2, 4), (8,), (((1, 4), (0, 2)),)),
        ((2, 4), (2, 4), (((0, 2),), ((1, 4),))),
        ((2, 4), (4, 2), (((1, 2), (0, 2)), ((1, 2),))),
        ((2, 4), (2, 2, 2), (((0, 2),), ((1, 2),), ((1, 2),))),
        ((4, 1), (4,), (((0, 4),),)),
        ((4, 1), (4, 1), (((0, 4),), ())),
        ((1, 8), (1, 8), ((), ((1, 8),))),
        ((2, 2, 2), (8,), (((2, 2), (1, 2), (0, 2)),)),
        ((2, 3), (6,), (((1, 3), (0, 2)),)),
    ],
)
def test_even_split(
    levels: tuple[int, ...], sizes: tuple[int, ...], pieces: tuple[tuple[tuple[int, int], ...], ...]
) -> None:
    split = split_over_levels(Mesh.of(*sizes), levels)
    assert tuple(axis.pieces for axis in split) == pieces
    assert all(axis.even for axis in split)


def test_uneven_split_takes_the_outermost_crossed_level() -> None:
    x, y = split_over_levels(Mesh.of(3, 2), (2, 3))
    assert (x.even, x.pieces, x.crossed) == (False, ((0, 3),), (0, 1))
    assert (y.even, y.pieces, y.crossed) == (False, ((0, 2),), (0, 1))


def test_split_needs_every_device() -> None:
    with pytest.raises(ArgumentError, match="4 devices does not fit 8"):
        split_over_levels(Mesh.of(4), (2, 4))


@settings(deadline=None)
@given(SIZES, st.data())
def test_split_agrees_with_the_devices(levels: tuple[int, ...], data: st.DataObject) -> None:
    """Oracle: walk every group of every axis and look where its devices differ."""
    hardware = Mesh.of(*levels)
    sizes = data.draw(st.sampled_from(factorisations(hardware.size, 4)))
    mesh = Mesh.of(*sizes)
    for axis, split in zip(mesh.names, split_over_levels(mesh, levels), strict=True):
        shapes = set()
        used = set()
        for group in mesh.groups((axis,)):
            positions = [hardware.coordinates(device) for device in group]
            distinct = [len({at[level] for at in positions}) for level in range(len(levels))]
            shapes.add(tuple((i, n) for i, n in reversed(list(enumerate(distinct))) if n > 1))
            used |= {
                next(level for level in range(len(levels)) if a[level] != b[level])
                for a, b in itertools.pairwise(positions)
            }
        assert used <= set(split.crossed)
        if split.even:
            assert shapes == {split.pieces}
        assert math.prod(size for _, size in split.pieces) == mesh.axis_size(axis)
