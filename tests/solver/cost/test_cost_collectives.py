import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster import Cluster
from autopar.errors import ArgumentError
from autopar.hardware import COLLECTIVE_KINDS, Device, Level, Link
from autopar.ir.mesh import Mesh, factorisations
from autopar.solver.cost.collectives import CollectiveModel, ring_share
from autopar.solver.cost.cost import Cost

FIGURES = st.floats(0, 1e3, allow_subnormal=False)
SIZES = st.lists(st.floats(0, 1e12, allow_subnormal=False), min_size=2, max_size=6).map(sorted)
FLAT = Cluster.abstract(shape=(4, 1), alpha=(1, 1), beta=(1, 1))


@st.composite
def links(draw: st.DrawFn, kind: str) -> tuple[Link, ...]:
    limits = sorted(draw(st.sets(st.floats(1, 1e9), max_size=3)))
    return tuple(Link(kind, draw(FIGURES), draw(FIGURES), limit) for limit in (*limits, None))


@st.composite
def models(draw: st.DrawFn) -> CollectiveModel:
    """Clusters of 1 to 3 levels, measured or not, under any mesh: even and straddling axes."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    levels = []
    for size in sizes:
        measured = draw(st.lists(st.sampled_from(COLLECTIVE_KINDS), unique=True))
        figures = tuple(link for kind in measured for link in draw(links(kind)))
        levels.append(Level("level", size, draw(FIGURES), draw(FIGURES), figures))
    shapes = factorisations(math.prod(sizes), 4)
    return CollectiveModel(
        Cluster(tuple(levels), Device("d")), Mesh.of(*draw(st.sampled_from(shapes)))
    )


def axes_of(model: CollectiveModel) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(model.mesh.names), unique=True).map(tuple)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("all-gather", 1 + 3 / 4 * 32768),
        ("reduce-scatter", 1 + 3 / 4 * 32768),
        ("all-reduce", 1 + 2 * 3 / 4 * 32768),
        ("all-to-all", 1 + 3 / 16 * 32768),
    ],
)
def test_ring_formulas(kind: str, seconds: float) -> None:
    assert CollectiveModel(FLAT, Mesh.of(4)).seconds(kind, ("x",), 32768) == seconds
    assert CollectiveModel(FLAT, Mesh.of(4, 1)).seconds(kind, ("x", "y"), 32768) == seconds
    assert CollectiveModel(FLAT, Mesh.of(4, 1)).seconds(kind, ("y",), 32768) == 0.0
    assert CollectiveModel(FLAT, Mesh.of(4)).seconds(kind, (), 32768) == 0.0
    assert CollectiveModel(FLAT, Mesh.of(4)).seconds(kind, ("x",), 0) == 1.0


def test_published_totals() -> None:
    """Five and seven all-reduces of the activations of an MLP and of two BERT layers."""
    model = CollectiveModel(FLAT, Mesh.of(4))
    assert 5 * model.seconds("all-reduce", ("x",), 32 * 256 * 4) == 245_765
    assert 7 * model.seconds("all-reduce", ("x",), 8 * 8 * 128 * 4) == 344_071


def test_two_levels_run_innermost_first_on_the_bytes_left() -> None:
    cluster = Cluster.abstract((2, 4), alpha=(5.0, 1.0), beta=(0.5, 0.1))
    b = 800.0
    inner, outer = 1 + 0.1 * 3 / 4 * b, 5 + 0.5 * 1 / 2 * b / 4
    for mesh, axes in ((Mesh.of(2, 4), ("x", "y")), (Mesh.of(8), ("x",))):
        model = CollectiveModel(cluster, mesh)
        assert model.seconds("reduce-scatter", axes, b) == inner + outer
        assert model.seconds("all-gather", axes, b) == inner + outer
        assert model.seconds("all-reduce", axes, b) == 2 * (inner + outer) - 6
        moved = 1 + 0.1 * 3 / 4 * b / 8 + 5 + 0.5 * 1 / 2 * b / 8
        assert model.seconds("all-to-all", axes, b) == pytest.approx(moved)


def test_all_reduce_over_two_axes_is_its_three_parts() -> None:
    cluster = Cluster.abstract((2, 4), alpha=(0.0, 0.0), beta=(0.5, 0.1))
    model = CollectiveModel(cluster, Mesh.of(2, 4))
    parts = (
        model.seconds("reduce-scatter", ("y",), 800.0)
        + model.seconds("all-reduce", ("x",), 200.0)
        + model.seconds("all-gather", ("y",), 800.0)
    )
    assert model.seconds("all-reduce", ("x", "y"), 800.0) == pytest.approx(parts)


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_the_whole_mesh_costs_the_same_however_it_is_cut(kind: str) -> None:
    cluster = Cluster.abstract((2, 4), alpha=(5.0, 1.0), beta=(0.5, 0.1))
    prices = []
    for sizes in factorisations(8, 3):
        mesh = Mesh.of(*sizes)
        prices.append(CollectiveModel(cluster, mesh).seconds(kind, mesh.names[::-1], 4096.0))
    assert prices == pytest.approx([prices[0]] * len(prices))


def test_sent_bytes_and_cost() -> None:
    model = CollectiveModel(Cluster.abstract((2, 4)), Mesh.of(2, 4))
    assert model.sent_bytes("all-gather", ("x", "y"), 800.0) == 800 * 7 / 8
    assert model.sent_bytes("all-reduce", ("y",), 800.0) == 2 * 600
    assert model.sent_bytes("all-to-all", ("x",), 800.0) == 200
    assert model.sent_bytes("all-gather", (), 800.0) == 0
    assert model.cost("all-gather", ("y",), 800.0) == Cost(
        communication_seconds=model.seconds("all-gather", ("y",), 800.0), communication_bytes=600.0
    )


def test_measured_figures_hold_in_their_range() -> None:
    level = Level(
        "host", 2, 9.0, 9.0, (Link("all-gather", 1.0, 1.0, 100.0), Link("all-gather", 2.0, 0.5))
    )
    model = CollectiveModel(Cluster((level,), Device("d")), Mesh.of(2))
    sizes = np.array([0.0, 100.0, 150.0, 400.0])
    # Just above 100 bytes the second range would cost less than 100 bytes do: it is lifted to 51.
    assert model.seconds("all-gather", ("x",), sizes).tolist() == [1.0, 51.0, 51.0, 102.0]
    assert model.seconds("reduce-scatter", ("x",), 2.0) == 9.0 + 9.0
    assert model.seconds("all-reduce", ("x",), 2.0) == 9.0 + 18.0


def test_a_measured_all_reduce_is_not_cheaper_than_its_parts() -> None:
    level = Level("host", 2, 1.0, 1.0, (Link("all-reduce", 0.0, 0.0),))
    model = CollectiveModel(Cluster((level,), Device("d")), Mesh.of(2))
    assert model.seconds("all-reduce", ("x",), 10.0) == 6.0


@pytest.mark.parametrize(
    ("kind", "axes", "message"),
    [
        ("broadcast", ("x",), "unknown collective"),
        ("broadcast", (), "unknown collective"),
        ("all-reduce", ("q",), "no axis 'q'"),
        ("all-reduce", ("x", "x"), "stands twice"),
    ],
)
def test_refuses(kind: str, axes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        CollectiveModel(FLAT, Mesh.of(4)).seconds(kind, axes, 1.0)


def test_mesh_must_fit_the_cluster() -> None:
    with pytest.raises(ArgumentError, match="does not fit 4"):
        CollectiveModel(FLAT, Mesh.of(2))


def test_shares_of_one_device_are_zero() -> None:
    assert [ring_share(kind, 1) for kind in COLLECTIVE_KINDS] == [0, 0, 0, 0]


@settings(deadline=None)
@given(models(), SIZES, st.data())
def test_prices_are_monotone_in_bytes(
    model: CollectiveModel, sizes: list[float], data: st.DataObject
) -> None:
    axes = data.draw(axes_of(model))
    for kind in COLLECTIVE_KINDS:
        prices = [model.seconds(kind, axes, size) for size in sizes]
        assert prices == sorted(prices)
        assert prices[0] >= 0
        assert model.seconds(kind, axes, np.array(sizes)).tolist() == prices


@settings(deadline=None)
@given(models(), st.floats(0, 1e12), st.data())
def test_all_reduce_is_at_least_its_halves(
    model: CollectiveModel, size: float, data: st.DataObject
) -> None:
    axes = data.draw(axes_of(model))
    both = model.seconds("all-reduce", axes, size)
    assert both >= model.seconds("reduce-scatter", axes, size)
    assert both >= model.seconds("all-gather", axes, size)


@settings(deadline=None)
@given(models(), st.floats(0, 1e12), st.data())
def test_order_of_axes_does_not_matter(
    model: CollectiveModel, size: float, data: st.DataObject
) -> None:
    axes = data.draw(axes_of(model))
    other = tuple(data.draw(st.permutations(axes)))
    for kind in COLLECTIVE_KINDS:
        assert model.seconds(kind, axes, size) == model.seconds(kind, other, size)


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(2, 8), FIGURES, FIGURES, st.floats(0, 1e9))
def test_all_reduce_saves_one_alpha_a_level(
    hosts: int, devices: int, alpha: float, beta: float, size: float
) -> None:
    cluster = Cluster.abstract((hosts, devices), alpha=(alpha, alpha), beta=(beta, beta / 2))
    model = CollectiveModel(cluster, Mesh.of(hosts * devices))
    halves = sum(model.seconds(kind, ("x",), size) for kind in ("reduce-scatter", "all-gather"))
    assert model.seconds("all-reduce", ("x",), size) == pytest.approx(halves - 2 * alpha)
