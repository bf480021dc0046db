"""A record of another process: read as its dataclass, or refused with one kind of error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.wire.json_record import from_json, read_record, write_record


@dataclass(frozen=True)
class Record:
    count: int
    name: str = ""
    limit_s: float | None = None


@pytest.mark.parametrize("text", ['{"count": 3, "name": "x"}', b'{"count": 3, "name": "x"}'])
def test_a_record(text: str | bytes) -> None:
    assert read_record(Record, text) == Record(3, "x")


@pytest.mark.parametrize(("value", "limit_s"), [("null", None), ("2", 2), ("2.5", 2.5)])
def test_a_field_may_be_none_or_have_a_value(value: str, limit_s: float | None) -> None:
    assert read_record(Record, f'{{"count": 3, "limit_s": {value}}}') == Record(3, limit_s=limit_s)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", b"\xff", "[]", "null", "{}", '{"name": "x"}', '{"count": "3"}', '{"count": true}'),
        *('{"count": 3, "more": 1}', f'{{"count": {"9" * 33}}}', f'{{"count": {"[" * 100}{"]" * 100}}}'),
    ],
)
def test_what_is_not_one_is_refused(text: str | bytes) -> None:
    with pytest.raises(ProtocolError, match="Record: "):
        read_record(Record, text)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Level(Enum):
    LOW = 1


@dataclass(frozen=True)
class Nested:
    record: Record
    colour: Colour
    level: Level | None = None
    maybe: Record | None = None
    ranks: tuple[int, ...] = ()
    backoff: tuple[float, str] = (0.0, "")
    records: list[Record] = field(default_factory=list)
    words: Sequence[str] = ()
    by_name: dict[str, Record] = field(default_factory=dict)
    by_rank: Mapping[int, float] = field(default_factory=dict)
    limits: dict[str, float | None] = field(default_factory=dict)
    any_facts: dict[str, Any] = field(default_factory=dict)
    any_value: Any = None


FULL = Nested(
    Record(1),
    Colour.BLUE,
    Level.LOW,
    Record(2, "x", 0.5),
    (3, 4),
    (1.5, "s"),
    [Record(5), Record(6)],
    ["a", "b"],
    {"a": Record(7)},
    {0: 1.0, 12: 2},
    {"step": 3.0, "save": None},
    {"x": [1, {"y": None}]},
    [True, "z"],
)
LEAST: dict[str, Any] = {"record": {"count": 1}, "colour": "red"}


@pytest.mark.parametrize("record", [FULL, Nested(Record(1), Colour.RED, words=[])])
def test_a_record_of_records_is_read_as_it_was_written(record: Nested) -> None:
    assert read_record(Nested, write_record(record)) == record


@pytest.mark.parametrize(
    "change",
    [
        {"record": None},
        {"record": {}},
        {"record": {"count": 1.5}},
        {"record": {"count": 1, "more": 1}},
        {"colour": "green"},
        {"colour": 1},
        {"colour": None},
        {"level": 2},
        {"level": "1"},
        {"level": True},
        {"maybe": []},
        {"maybe": {"count": None}},
        {"ranks": 3},
        {"ranks": "34"},
        {"ranks": [3, "4"]},
        {"ranks": [True]},
        {"ranks": {"3": 4}},
        {"backoff": []},
        {"backoff": [1.0]},
        {"backoff": ["s", 1.0]},
        {"backoff": [1.0, "s", 2.0]},
        {"records": {"count": 1}},
        {"records": [None]},
        {"records": [{"count": 1}, {"count": "1"}]},
        {"words": "ab"},
        {"words": ["a", 1]},
        {"by_name": [{"count": 1}]},
        {"by_name": {"a": {"name": "x"}}},
        {"by_rank": {"a": 1.0}},
        {"by_rank": {"1.5": 1.0}},
        {"by_rank": {"1": None}},
        {"limits": {"step": float("inf")}},
        {"limits": {"step": float("nan")}},
        {"limits": {"step": 10**400}},
        {"any_facts": []},
    ],
    ids=str,
)
def test_a_part_that_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    assert from_json(Nested, LEAST) == Nested(Record(1), Colour.RED)
    with pytest.raises(ProtocolError):
        from_json(Nested, LEAST | change)


def test_fields_of_another_release_are_ignored_where_the_reader_says_so() -> None:
    later = {"count": 1, "of_next_year": 2}
    values = LEAST | {"record": later, "records": [later], "by_name": {"a": later}, "of_next_year": 3}
    found = from_json(Nested, values, ignore_unknown=True)
    assert found == Nested(Record(1), Colour.RED, records=[Record(1)], by_name={"a": Record(1)})
    with pytest.raises(ProtocolError, match="Nested: unknown field 'of_next_year'"):
        from_json(Nested, LEAST | {"of_next_year": 3})
    with pytest.raises(ProtocolError, match="Record: unknown field 'of_next_year'"):
        from_json(Nested, LEAST | {"record": later})
