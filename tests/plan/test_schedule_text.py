"""Schedules as text and CSV, and what the validator refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.plan.schedule import (
    Action,
    Overlap,
    Schedule,
    csv_text,
    from_csv,
    grid_text,
    parse_action,
    parse_cell,
    parse_csv,
    parse_grid,
    validate,
)
from autopar.solver.schedules.communicate import Edges, communicate
from autopar.solver.schedules.registry import SCHEDULES, make_schedule


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("0F0", Action(0, "F", 0)),
        ("12B7", Action(12, "B", 7)),
        ("1SEND_F3", Action(1, "SEND_F", 3, 2)),
        ("1RECV_F3", Action(1, "RECV_F", 3, 0)),
        ("1SEND_B3", Action(1, "SEND_B", 3, 0)),
        ("0SEND_F3@2", Action(0, "SEND_F", 3, 2)),
        ("2RECV_F3@0", Action(2, "RECV_F", 3, 0)),
        ("2REDUCE_GRAD", Action(2, "REDUCE_GRAD")),
    ],
)
def test_actions_print_and_parse(text: str, action: Action) -> None:
    assert parse_action(text) == action
    assert str(action) == text


@pytest.mark.parametrize("text", ["", "F0", "0X1", "0F", "0REDUCE_GRAD1", "0F0@1", "0f0"])
def test_what_is_no_action(text: str) -> None:
    with pytest.raises(ScheduleError):
        parse_action(text)


def test_overlap_prints_and_parses() -> None:
    cell = parse_cell("(0F7;7B3)OVERLAP_F_B")
    assert cell == Overlap((Action(0, "F", 7), Action(7, "B", 3)))
    assert str(cell) == "(0F7;7B3)OVERLAP_F_B"
    assert parse_cell("") is None


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 5),
    st.integers(1, 6),
    st.sampled_from(["computed", "sent"]),
)
def test_every_schedule_survives_text_and_csv(
    name: str, stages: int, count: int, form: str
) -> None:
    made = make_schedule(name, stages, count)
    made = communicate(made) if form == "sent" else made
    validate(made)
    assert parse_grid(grid_text(made)) == made
    assert parse_csv(csv_text(made), name=name) == made


def test_csv_file(tmp_path: Path) -> None:
    made = make_schedule("1f1b", 3, 4)
    made.to_csv(tmp_path / "s.csv")
    assert from_csv(tmp_path / "s.csv", name="1f1b") == made
    with pytest.raises(ScheduleError, match="cannot be read"):
        from_csv(tmp_path / "none.csv")


def edited(made: Schedule, rank: int, row: list[Action]) -> Schedule:
    return replace(made, ranks=(*made.ranks[:rank], tuple(row), *made.ranks[rank + 1 :]))


def rows_of(made: Schedule, rank: int) -> list[Action]:
    return [cell for cell in made.ranks[rank] if isinstance(cell, Action)]


@settings(max_examples=120, deadline=None)
@given(st.data(), st.sampled_from(["gpipe", "1f1b"]), st.sampled_from(["computed", "sent"]))
def test_a_mutated_schedule_is_refused(data: st.DataObject, name: str, form: str) -> None:
    """Dropping, doubling, renumbering, or moving an action before what it needs."""
    made = make_schedule(name, 3, 4)
    made = communicate(made) if form == "sent" else made
    rank = data.draw(st.integers(0, 2))
    row = rows_of(made, rank)
    place = data.draw(st.integers(0, len(row) - 1))
    action = row[place]
    how = data.draw(st.sampled_from(["drop", "double", "micro", "stage", "early"]))
    if how == "drop":
        row.pop(place)
    elif how == "double":
        row.append(action)
    elif how == "micro":
        row[place] = replace(action, micro=4)
    elif how == "stage":
        row[place] = replace(action, stage=3)
    else:
        backward = next(i for i, a in enumerate(row) if a.kind == "B")
        row.insert(0, row.pop(backward))
    with pytest.raises(ScheduleError) as caught:
        validate(edited(made, rank, row))
    assert f"rank {rank}:" in str(caught.value)


def test_the_place_is_marked() -> None:
    made = make_schedule("gpipe", 2, 2)
    row = rows_of(made, 1)
    row[0], row[2] = row[2], row[0]
    with pytest.raises(ScheduleError) as caught:
        validate(edited(made, 1, row))
    lines = str(caught.value).splitlines()
    pointer = next(line for line in lines if set(line.strip()) == {"^"})
    assert lines[lines.index(pointer) - 1][pointer.index("^") :].startswith("1B0")


def test_a_skip_over_a_stage_is_sent_past_it() -> None:
    edges = Edges(((0, 1), (1, 2), (0, 2)), ((2, 1), (1, 0), (2, 0)))
    made = communicate(make_schedule("1f1b", 3, 2), edges)
    validate(made)
    text = grid_text(made)
    assert "0SEND_F0@2" in text
    assert "2RECV_F0@0" in text
    assert parse_grid(text) == made


def test_two_stages_of_a_rank_send_nothing_to_each_other() -> None:
    chain = make_schedule("gpipe", 3, 2)
    rows = [rows_of(chain, rank) for rank in range(3)]
    forwards = [a for a in rows[0] if a.kind == "F"] + [a for a in rows[1] if a.kind == "F"]
    backwards = [a for a in rows[1] if a.kind == "B"] + [a for a in rows[0] if a.kind == "B"]
    made = Schedule("folded", 3, 2, (tuple(forwards + backwards), tuple(rows[2])))
    validate(made)
    sent = communicate(made)
    validate(sent)
    assert not [a for a in rows_of(sent, 0) if a.kind == "SEND_F" and a.stage == 0]
