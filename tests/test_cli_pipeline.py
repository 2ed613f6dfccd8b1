"""Pipelines at the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autopar import cli
from autopar.errors import ArgumentError
from autopar.methods import AutoStages, PipeshardParallel, ShardParallel, UniformStages

RUN = CliRunner()


def test_plan_show_and_audit(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    arguments = ["plan", "examples/mlp.py:make", "--cluster", "abstract:2x2", "-o", str(file)]
    options = ["--method", "pipeline", "--stages", "2", "--micro-batches", "4"]
    made = RUN.invoke(cli.app, [*arguments, *options])
    assert made.exit_code == 0, made.output
    assert "4 micro-batches" in made.output
    picture, trace = tmp_path / "p.svg", tmp_path / "p.trace.json"
    shown = RUN.invoke(
        cli.app, ["show", str(file), "--picture", str(picture), "--trace", str(trace)]
    )
    assert shown.exit_code == 0, shown.output
    assert picture.read_text(encoding="utf-8").startswith("<svg")
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    audited = RUN.invoke(cli.app, ["audit", str(file), "examples/mlp.py:make"])
    assert audited.exit_code == 0, audited.output
    assert "audit ok" in audited.output


def test_schedule(tmp_path: Path) -> None:
    file = tmp_path / "s.csv"
    made = RUN.invoke(
        cli.app, ["schedule", "1f1b", "--stages", "4", "--micro-batches", "8", "--csv", str(file)]
    )
    assert made.exit_code == 0, made.output
    assert "takes 33, of which a rank works 24" in made.output
    assert "4, 3, 2, 1" in made.output
    assert len(file.read_text(encoding="utf-8").splitlines()) == 4
    sends = RUN.invoke(cli.app, ["schedule", "gpipe", "--stages", "2", "--sends"])
    assert "0SEND_F0" in sends.output


def test_options_make_the_method() -> None:
    made = cli.choose_method("pipeline", "", "auto", cli.Pipeline("2", 4, "gpipe"))
    assert made == PipeshardParallel(4, stages=UniformStages(2), schedule="gpipe")
    searched = cli.choose_method("pipeline", "", "auto", cli.Pipeline("auto", 4, "1f1b"))
    assert isinstance(searched, PipeshardParallel)
    assert searched.stages == AutoStages()
    shard = cli.choose_method("shard", "", "auto", cli.Pipeline(micro_batches=4))
    assert shard == ShardParallel(num_micro_batches=4)
    with pytest.raises(ArgumentError, match="--stages"):
        cli.choose_method("pipeline", "", "auto", cli.Pipeline("two", 4, "1f1b"))
    with pytest.raises(ArgumentError, match="unknown schedule"):
        cli.choose_method("pipeline", "", "auto", cli.Pipeline("2", 4, "zb"))


@pytest.mark.parametrize(
    ("method", "asked", "option"),
    [
        ("zero2", cli.Pipeline(micro_batches=2), "zero2 takes no --micro-batches"),
        ("shard", cli.Pipeline(stages="2"), "shard takes no --stages"),
        ("auto", cli.Pipeline(schedule="gpipe"), "auto takes no --schedule"),
    ],
)
def test_options_of_another_method_are_refused(
    method: str, asked: cli.Pipeline, option: str
) -> None:
    with pytest.raises(ArgumentError, match=option):
        cli.choose_method(method, "", "auto", asked)


def test_only_pipelines_have_timelines(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    RUN.invoke(
        cli.app, ["plan", "examples/mlp.py:make", "--cluster", "abstract:1x2", "-o", str(file)]
    )
    shown = RUN.invoke(cli.app, ["show", str(file), "--trace", str(tmp_path / "t.json")])
    assert isinstance(shown.exception, ArgumentError)
