"""The summary and the picture of a plan written by hand, and the folding both rest on."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster import Cluster
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import parse_sharding
from autopar.plan.plan import (
    Boundary,
    CostSummary,
    FrozenPlan,
    PricedCollective,
    SolverReport,
)
from autopar.report.groups import collective_groups, leaf_groups
from autopar.report.picture import plan_picture
from autopar.report.summary import MOST_ARGUMENTS, MOST_COLLECTIVES, plan_summary
from autopar.report.units import bytes_text, percent_text, seconds_text

MESH = Mesh.of(2, 4)


def leaf(name: str, shape: tuple[int, ...], layout: str, dtype: str = "float32") -> Boundary:
    return Boundary(name, shape, dtype, parse_sharding(layout))


def collective(name: str, **changes: object) -> PricedCollective:
    made = PricedCollective(
        "all-reduce", ("x",), 4096, 16384, 1, 2e-5, "model.py:7 (loss)", name, "sum"
    )
    return replace(made, **changes)  # type: ignore[arg-type]


PLAN = FrozenPlan(
    function="train_step",
    jax_version="0.10.2",
    fingerprint="f",
    signatures=("dot_general f32[8,4] f32[4,8] -> f32[8,8] #1", "dot_general", "exp", "add"),
    cluster=Cluster.abstract((2, 4), memory_bytes=2**34),
    mesh=MESH,
    method="ShardParallel",
    inputs=(
        *(leaf(f"params/layers/{i}/{k}", (96, 24), "[-,y]") for i in (0, 1, 2) for k in "qk"),
        *(leaf(f"params/layers/{i}/out", (24, 8, 96), "[x.y,-,-]", "bfloat16") for i in (0, 2)),
        leaf("params/layers/1/out", (24, 8, 96), "[-,-,-]", "bfloat16"),
        leaf("params/scale", (), "[]"),
        leaf("rng", (), "[]", "key<fry>"),
        leaf("batch/tokens", (16, 64), "[x,-]", "int32"),
    ),
    outputs=(leaf("out", (), "[]"),),
    num_hidden=0,
    strategies=("x:b y:k", "x:b", "-", "y:a"),
    settled=(),
    reshards=(),
    collectives=(
        collective("d params/layers/0/q"),
        collective("d params/layers/1/q"),
        collective("loss", elements=1, bytes=4, seconds=1e-6, source=""),
        collective("loss", elements=1, bytes=4, seconds=1e-6, source="", reduction="max"),
        collective(
            "params/layers/0/out", kind="all-gather", axes=("x", "y"), times=3, reduction=""
        ),
    ),
    cost=CostSummary(1.5e-3, 1.02e-4, 3 * 2**20),
    solver=SolverReport("elimination", 1.602e-3, 1.6e-3, 0.00125, 2.0, ("cut by the work limit",)),
    notes=("2 op(s) run replicated: no rule for 'sort' (first at model.py:3 (top))",),
)


def test_the_summary_of_a_small_plan(golden: Callable[[str, str], None]) -> None:
    golden("plan_summary.txt", plan_summary(PLAN))


def test_the_picture_of_a_small_plan(golden: Callable[[str, str], None]) -> None:
    golden("plan_picture.svg", plan_picture(PLAN))


@pytest.mark.parametrize("width", [20, 80, 100, 160])
def test_nothing_is_wider_than_asked_for_and_nothing_is_lost(width: int) -> None:
    text = plan_summary(PLAN, width=width)
    assert max(map(len, text.splitlines())) <= max(width, 80)
    assert "no rule for 'sort'" in " ".join(text.split())
    assert "model.py:7" in text.replace("\n", "")


def test_a_proven_optimum_and_an_empty_plan_say_so() -> None:
    report = SolverReport("elimination", 0.0, 0.0, 0.0, 0.0)
    bare = replace(
        PLAN,
        inputs=(),
        collectives=(),
        signatures=(),
        strategies=(),
        notes=(),
        solver=report,
        cost=CostSummary(0.0, 0.0, 0),
    )
    text = plan_summary(bare)
    assert "proven the least in the searched space" in " ".join(text.split())
    for title in ("arguments: none", "ops: none", "dearest first: none"):
        assert title in text
    assert "notes" not in text
    ET.fromstring(plan_picture(bare))


def test_lines_past_the_limit_are_summed() -> None:
    inputs = tuple(leaf(f"p{i}/w", (i + 1,), "[-]") for i in range(MOST_ARGUMENTS + 3))
    lines = tuple(
        collective(f"c{i}", elements=i + 1, bytes=4 * (i + 1), seconds=1e-6, times=2)
        for i in range(MOST_COLLECTIVES + 2)
    )
    text = plan_summary(replace(PLAN, inputs=inputs, collectives=lines))
    rest = 4 * sum(range(MOST_ARGUMENTS + 1, MOST_ARGUMENTS + 4))
    assert re.search(rf"3 more lines +3 +{rest} B +{rest} B", text)
    assert re.search(r"2 more lines +4 +4\.00 us", text)


def test_the_bytes_of_groups_add_up() -> None:
    groups = leaf_groups(PLAN.inputs, MESH)
    sizes = {"float32": 4, "int32": 4, "bfloat16": 2, "key<fry>": 8}
    whole = sum(sizes[entry.dtype] * math.prod(entry.shape) for entry in PLAN.inputs)
    local = sum(
        sizes[entry.dtype] * entry.sharding.local_size(entry.shape, MESH) for entry in PLAN.inputs
    )
    assert sum(group.bytes for group in groups) == whole
    assert sum(group.local_bytes for group in groups) == local
    assert sum(group.count for group in groups) == len(PLAN.inputs)


def test_layers_of_another_layout_are_not_folded() -> None:
    names = [group.name for group in leaf_groups(PLAN.inputs, MESH)]
    assert names == [
        "params/layers/0-2/{q,k}",
        "params/layers/{0,2}/out",
        "params/layers/1/out",
        "params/scale",
        "rng",
        "batch/tokens",
    ]


def test_the_dearest_collectives_come_first() -> None:
    groups = collective_groups(PLAN.collectives)
    assert [(group.name, group.kind, group.times) for group in groups] == [
        ("params/layers/0/out", "all-gather", 3),
        ("d params/layers/0-1/q", "all-reduce", 2),
        ("loss", "all-reduce", 1),
        ("loss", "all-reduce max", 1),
    ]
    assert sum(group.seconds for group in groups) == pytest.approx(102e-6)


def expand(name: str) -> list[str]:
    """All names that a folded one stands for."""

    def alternatives(part: str) -> list[str]:
        inner = part[1:-1].split(",") if part.startswith("{") else [part]
        made = []
        for text in inner:
            low, dash, high = text.partition("-")
            made += [str(i) for i in range(int(low), int(high) + 1)] if dash else [text]
        return made

    return ["/".join(parts) for parts in itertools.product(*map(alternatives, name.split("/")))]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from("ab012"), min_size=1, max_size=4).map("/".join),
            st.sampled_from(["[-]", "[x]"]),
        ),
        unique_by=lambda pair: pair[0],
        max_size=20,
    )
)
def test_a_folded_name_stands_for_exactly_its_members(pairs: list[tuple[str, str]]) -> None:
    leaves = [leaf(name, (8,), layout) for name, layout in pairs]
    found = Counter(
        (name, group.layout) for group in leaf_groups(leaves, MESH) for name in expand(group.name)
    )
    assert found == Counter(pairs)


def test_equal_names_are_counted_not_lost() -> None:
    groups = collective_groups([collective("add"), collective("add")])
    assert [(group.name, group.times) for group in groups] == [("add", 2)]


def test_the_picture_is_well_formed_and_draws_the_block_of_one_device() -> None:
    space = "{http://www.w3.org/2000/svg}"
    root = ET.fromstring(plan_picture(PLAN))
    cards = [g for g in root.iter(f"{space}g") if "tokens" in (g.findtext(f"{space}title") or "")]
    whole, block = cards[0].findall(f"{space}rect")[:2]
    assert float(block.attrib["height"]) == pytest.approx(
        float(whole.attrib["height"]) / 2, abs=0.1
    )
    assert block.attrib["width"] == whole.attrib["width"]


def test_the_picture_escapes_names() -> None:
    odd = replace(PLAN, function="<lambda>", inputs=(leaf("a&b", (2,), "[-]"),))
    root = ET.fromstring(plan_picture(odd))
    texts = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any(text.startswith("<lambda> on 8 devices") for text in texts)
    assert "a&b" in texts


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1.43e-4, "143 us"),
        (9.999e-4, "1.00 ms"),
        (2.5, "2.50 s"),
        (12345.6, "12,346 s"),
        (3e-9, "3.00 ns"),
        (2e-10, "0.2 ns"),
        (math.inf, "infinite"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (2**20 - 1, "1.00 MiB"),
        (1000, "1000 B"),
        (8420620, "8.03 MiB"),
        (80e9, "74.5 GiB"),
        (math.inf, "unlimited"),
    ],
)
def test_bytes(count: float, text: str) -> None:
    assert bytes_text(count) == text


def test_percent_of_nothing() -> None:
    assert percent_text(1, 4) == "25 %"
    assert percent_text(0, 0) == "-"
