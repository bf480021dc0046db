"""Records of interruptions: there and back, and what is no record."""

from __future__ import annotations

import pytest

from ft_client.inprocess.attribution import Interruption, InterruptionRecord
from rank_monitor.contract.errors import ProtocolError


@pytest.mark.parametrize("interruption", Interruption)
def test_there_and_back(interruption: Interruption) -> None:
    record = InterruptionRecord(16383, interruption)
    assert InterruptionRecord.from_json(record.to_json()) == record
    assert InterruptionRecord.from_json(record.to_json().encode()) == record


def test_the_documented_kinds() -> None:
    assert {one.name for one in Interruption} == {
        "EXCEPTION",
        "BASE_EXCEPTION",
        "SOFT_TIMEOUT",
        "HARD_TIMEOUT",
        "TERMINATED",
        "UNRESPONSIVE",
        "MONITOR_PROCESS_EXCEPTION",
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        b"\xff",
        "[]",
        "null",
        "{}",
        '{"rank": 1}',
        '{"rank": "1", "interruption": "EXCEPTION"}',
        '{"rank": true, "interruption": "EXCEPTION"}',
        '{"rank": -1, "interruption": "EXCEPTION"}',
        '{"rank": 1, "interruption": "BOREDOM"}',
        '{"rank": 1, "interruption": 1}',
        '{"rank": 1, "interruption": "EXCEPTION", "more": 1}',
    ],
)
def test_no_record(text: str | bytes) -> None:
    with pytest.raises(ProtocolError):
        InterruptionRecord.from_json(text)
