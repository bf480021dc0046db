"""A record of another process: read as its dataclass, or refused with one kind of error."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.wire.json_record import read_record


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
