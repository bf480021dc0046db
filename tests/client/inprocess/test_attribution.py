"""Records of interruptions: the kinds that are documented, and how one is written."""

from __future__ import annotations

import json

from ft_client.inprocess.attribution import Interruption, InterruptionRecord


def test_as_it_is_written() -> None:
    record = InterruptionRecord(16383, Interruption.SOFT_TIMEOUT)
    assert json.loads(record.to_json()) == {"rank": 16383, "interruption": "SOFT_TIMEOUT"}


def test_the_documented_kinds() -> None:
    assert {one.name for one in Interruption} == {
        "EXCEPTION",
        "BASE_EXCEPTION",
        "SOFT_TIMEOUT",
        "HARD_TIMEOUT",
        "TERMINATED",
        "UNRESPONSIVE",
        "MONITOR_PROCESS_EXCEPTION",
        "JOINING",
    }
