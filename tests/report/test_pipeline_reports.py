"""What is said and drawn of a pipeline: summary, audit, shares, timelines."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import pytest

import autopar as ap
from autopar.lower import collectives
from autopar.report.audit_stages import verify_stages
from autopar.report.timeline import Arrow, Span, TimelineChart, chrome_trace, timeline_picture
from autopar.staged import StagedPlan
from autopar.timelines import simulated_chart
from tests.models.small_models import small_model

# Links that cost next to nothing: whatever can be split is.
CLUSTER = ap.Cluster.abstract(
    (2, 2), alpha=(1e-12, 1e-12), beta=(1e-15, 1e-15), peak_flops=1e12, memory_bandwidth=1e11
)


@functools.cache
def plan() -> StagedPlan:
    model = small_model("mlp")
    made = ap.make_plan(
        model.step,
        *model.args,
        cluster=CLUSTER,
        method=ap.PipeshardParallel(4, stages=ap.UniformStages(2)),
        batch_argnums=(2,),
    )
    assert isinstance(made, StagedPlan)
    return made


def test_summary(golden: Callable[[str, str], None]) -> None:
    text = re.sub(r"jax \d[\d.]*", "jax X", plan().summary())
    if jax.__version__ == "0.10.2":
        golden("pipeline_summary.txt", text)
    assert "2 stages" in text
    assert "activations" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_plan_file_says_the_same(tmp_path: Path) -> None:
    plan().save(tmp_path / "p.json")
    loaded = ap.load_plan(tmp_path / "p.json")
    assert isinstance(loaded, StagedPlan)
    assert loaded.frozen == plan().frozen
    assert loaded.summary() == plan().summary()
    model = small_model("mlp")
    assert loaded.bind(model.step, *model.args).lower().step == plan().lower().step
    with pytest.raises(ap.errors.PlanError, match="without its function"):
        loaded.lower()
    with pytest.raises(ap.errors.PlanError, match="not for this function"):
        loaded.bind(small_model("gpt").step, *small_model("gpt").args)


@pytest.mark.parametrize("key", ["schedule", "stages", "batch", "inputs", "solver"])
def test_a_damaged_plan_file_is_refused(key: str, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    plan().save(file)
    data = json.loads(file.read_text(encoding="utf-8"))
    data[key] = {"name": 3}
    file.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ap.errors.PlanError, match="damaged"):
        ap.load_plan(file)


def test_audit_and_shares() -> None:
    report, share = plan().verify()
    assert report.ok, report.summary()
    assert report.planned >= len(plan().collectives)
    assert share == pytest.approx(1.0)


def test_a_dropped_collective_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = plan().lower().stages
    run = collectives._collective

    def lossy(value: Any, step: Any) -> Any:
        return value if step.kind == "all-reduce" else run(value, step)

    monkeypatch.setattr(collectives, "_collective", lossy)
    report, _ = verify_stages(stages, timeout=120.0)
    assert not report.ok
    assert report.missing


def chart() -> TimelineChart:
    spans = (
        Span(0, "0", 0.0, 1.0, "F", "0F0"),
        Span(0, "", 1.0, 2.0, "wait"),
        Span(0, "0", 2.0, 4.0, "B", "0B0"),
        Span(1, "0", 1.0, 2.0, "F", "<1F0 & more>"),
        Span(1, "", 4.0, 4.0, "update"),
    )
    rows = ("stage 0", 'stage "1" <&>')
    return TimelineChart("step <1>", rows, spans, (Arrow(0, 1, "F0", 1.0, 1.0),), "a & b")


def test_picture_is_well_formed_and_escaped(golden: Callable[[str, str], None]) -> None:
    text = timeline_picture(chart())
    ElementTree.fromstring(text)
    golden("timeline.svg", text)
    assert "25 % idle" in text
    ElementTree.fromstring(timeline_picture(TimelineChart("empty", (), ())))


def test_trace_has_a_span_for_each_and_a_flow_for_each_transfer() -> None:
    events = chrome_trace(chart())["traceEvents"]
    assert [e["dur"] for e in events if e["ph"] == "X"] == [1e6, 1e6, 2e6, 1e6, 0.0]
    starts = [e for e in events if e["ph"] == "s"]
    ends = [e for e in events if e["ph"] == "f"]
    assert [e["id"] for e in starts] == [e["id"] for e in ends] == [0]
    assert (starts[0]["tid"], ends[0]["tid"]) == (0, 1)
    json.dumps(events)


def test_the_simulated_timeline_is_the_predicted_step() -> None:
    made = simulated_chart(plan().frozen)
    assert made.seconds == pytest.approx(plan().cost.step_seconds)
    names = [span.tip for span in made.spans if span.row == 0]
    assert [name for name in names if name != "update"] == [
        str(action) for action in plan().schedule.ranks[0]
    ]
    assert replace(made, spans=()).seconds == 0
