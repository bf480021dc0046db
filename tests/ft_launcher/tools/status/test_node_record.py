"""What a node writes for the others: it comes back as it was, has a bound, and anything else is no record."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_launcher.tools.status.fault_scene import merged_stacks
from ft_launcher.tools.status.node_record import (
    MAX_BYTES,
    MAX_OF_RANK,
    ranks_as_record,
    ranks_of_record,
    stacks_as_record,
    stacks_of_record,
)
from ft_launcher.tools.status.node_status import RankReading
from ft_launcher.tools.status.summary import collectives

STATE = {"description": "dp0", "entered": 7, "started": 0, "finished": 6, "operation": "all_reduce", "shape": "[[4]]"}


def reading(rank: int, *frames: str, **groups: Any) -> RankReading:
    return RankReading(rank, rank, 100 + rank, 5.0, frames=frames, groups=groups, groups_at=5.0 if groups else None)


def test_stacks_and_collectives_of_two_nodes_are_merged() -> None:
    here = [reading(0, "train.py:5 in step", g=STATE), reading(1, "train.py:5 in step", g=STATE)]
    there = [reading(2, "train.py:5 in step", g=STATE), reading(3, "load.py:9 in fetch", g=STATE | {"entered": 6})]
    record = stacks_of_record(stacks_as_record(4, 2, there).encode(), 9.0)
    assert record is not None and (record.number, record.cycle) == (4, 2)
    readings = [*here, *record.ranks]
    groups = merged_stacks({"rank": one.rank, "frames": one.frames, "process": one.process} for one in readings)
    assert [(group["ranks"], list(group["frames"])) for group in groups] == [
        ([3], ["load.py:9 in fetch"]),
        ([0, 1, 2], ["train.py:5 in step"]),
    ]
    table = collectives(readings, 9.0)
    assert table is not None and table["age_s"] == 4.0
    assert [(row["group"], list(row["ranks"]), row["entered"]) for row in table["rows"]] == [
        ("dp0", [3], 6),
        ("dp0", [0, 1, 2], 7),
    ]


def test_a_rank_without_a_stack_says_why() -> None:
    silent = RankReading(3, 3, 1, process={"stacks": "it is stopped"})
    record = stacks_of_record(stacks_as_record(1, 0, [silent]).encode(), 0.0)
    assert record is not None and record.ranks[0].process == {"stacks": "it is stopped"}


@pytest.mark.parametrize("ranks", [8, 1024])
def test_a_record_has_a_bound_whatever_ranks_write(ranks: int) -> None:
    frames = ["\x07" * 150 + str(number) for number in range(100)]
    groups = {"\u00e9" * 300 + str(number): STATE | {"shape": "\U0001f600" * 300} for number in range(20)}
    text = stacks_as_record(1, 0, [reading(rank, f"own.py:{rank}", *frames, **groups) for rank in range(ranks)])
    assert len(text.encode()) <= MAX_BYTES
    record = stacks_of_record(text.encode(), 0.0)
    assert record is not None and record.ranks[0].frames[0] == "own.py:0"


RANK = {
    **{"rank": 2047, "local_rank": 7, "pid": 4194303, "state": "training", "exit_code": None, "iteration": 123456789},
    **{
        "sections": {"data": 12.5, "step": 99.0},
        "sign_age_s": 12.5,
        "reading_age_s": 0.1,
        "frames": ["a.py:1 in f", "b"],
    },
}


def test_a_line_about_each_rank() -> None:
    exited = RANK | {"rank": 1, "state": "exited", "exit_code": -9, "iteration": None, "sign_age_s": None}
    text = ranks_as_record(4, 3, [RANK, exited | {"sections": {}, "frames": []}])
    record = ranks_of_record(text.encode())
    assert record is not None and (record.number, record.cycle) == (4, 3)
    first, second = record.ranks
    assert first == RANK | {"sections": {"data": 12.5}, "frames": ["a.py:1 in f"]}
    assert second == exited | {"sections": {}, "frames": []}


@pytest.mark.parametrize("letter", ["x", "\u00e9", "\U0001f600", "\x00", '"'])
def test_a_line_about_a_rank_has_a_bound(letter: str) -> None:
    rank = RANK | {"sections": {letter * 128: 99999999.9}, "frames": [letter * 200]}
    text = ranks_as_record(1, 1, [rank] * 2048)
    assert len(text.encode()) <= 2048 * (MAX_OF_RANK + 1) + 100
    record = ranks_of_record(text.encode())
    assert record is not None and len(record.ranks) == 2048


@given(st.binary(max_size=200) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_anything_else_is_no_record(found: bytes | str) -> None:
    text = found if isinstance(found, bytes) else found.encode()
    assert stacks_of_record(text, 0.0) is None and ranks_of_record(text) is None


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"number": None},
        {"number": "1"},
        {"cycle": None},
        {"scenes": 5},
        {"scenes": {}},
        {"scenes": [{"ranks": [1]}]},
        {"scenes": [{"ranks": [1], "frames": 5, "why": "", "groups": {}}]},
        {"scenes": [{"ranks": ["x"], "frames": [], "why": "", "groups": {}}]},
        {"scenes": [{"ranks": ["1"], "frames": [], "why": "", "groups": {}}]},
        {"scenes": [{"ranks": "11", "frames": [], "why": "", "groups": {}}]},
        {"scenes": [{"ranks": [True], "frames": [], "why": "", "groups": {}}]},
        {"scenes": [{"ranks": [1], "frames": "ab", "why": "", "groups": {}}]},
        {"scenes": [{"ranks": [1], "frames": [], "why": "", "groups": {"g": {}}}]},
        {"scenes": [{"ranks": [1], "frames": [], "why": "", "groups": {"g": STATE | {"entered": "7"}}}]},
        {"scenes": [{"ranks": [1], "frames": [], "why": "", "groups": [1]}]},
    ],
    ids=str,
)
def test_a_record_with_something_wrong_is_none(change: dict[str, Any]) -> None:
    found = json.loads(stacks_as_record(1, 0, [reading(1, "a.py:1 in f")]))
    assert stacks_of_record(json.dumps(found).encode(), 0.0) is not None
    assert stacks_of_record(json.dumps(found | change).encode(), 0.0) is None


ROW = [1, 0, 1, "hung", None, 3, 1.0, 0.1, "", 0.0, ""]


def row(**changes: Any) -> list[Any]:
    found = list(ROW)
    for position, value in changes.items():
        found[int(position.removeprefix("at"))] = value
    return found


@pytest.mark.parametrize(
    "rows",
    [
        *(5, [5], [[]], {"a": 1}, [ROW[:-1]], ["12345678901"]),
        *([row(at0="1")], [row(at0=True)], [row(at3="odd")], [row(at5=1e308)], [row(at5=2**70)]),
        *([row(at6="nan")], [row(at7="inf")], [row(at8="data", at9="1e999")]),
    ],
    ids=str,
)
def test_a_line_with_something_wrong_is_none(rows: Any) -> None:
    found = json.loads(ranks_as_record(1, 1, [RANK]))
    assert ranks_of_record(json.dumps(found | {"ranks": [ROW]}).encode()) is not None
    assert ranks_of_record(json.dumps(found | {"ranks": rows}).encode()) is None


def test_ranks_share_what_is_in_their_scene() -> None:
    """A record of 64 KiB may have 600 groups and 30,000 ranks: groups of each rank would take gigabytes."""
    groups = {str(number): STATE for number in range(3)}
    scene = {"ranks": [1] * 20_000, "frames": ["a.py:1 in f"], "why": "", "groups": groups}
    found = json.dumps({"v": 1, "number": 1, "cycle": 0, "scenes": [scene]}, separators=(",", ":"))
    record = stacks_of_record(found.encode(), 0.0)
    assert record is not None and len(record.ranks) == 4096
    assert len({id(reading.groups) for reading in record.ranks}) == 1
