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


@pytest.mark.parametrize("text", ['{"count": 3, "name": "x"}', b'{"count": 3, "name": "x"}'])
def test_a_record(text: str | bytes) -> None:
    assert read_record(Record, text) == Record(3, "x")


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
