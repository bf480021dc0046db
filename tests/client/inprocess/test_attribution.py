"""Records of interruptions: the kinds that are documented, and how one is written."""

from __future__ import annotations

import json

import pytest

from ft_client.inprocess.attribution import Interruption, InterruptionRecord, LastInterruption, last_interruption


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


def records(*written: InterruptionRecord) -> list[str]:
    return [record.to_json() for record in written]


SOFT = InterruptionRecord(0, Interruption.SOFT_TIMEOUT, 2)
RAISED = InterruptionRecord(1, Interruption.EXCEPTION, 3, "ValueError at train.py:7")
BLAME = {"ranks": [1], "text": "rank 1 never entered all_reduce 4", "finding": "behind"}


@pytest.mark.parametrize(
    ("written", "blame", "found"),
    [
        (records(SOFT), BLAME, LastInterruption((1,), "rank 1 never entered all_reduce 4", "behind")),
        # Who makes no progress may wait for another.
        (records(SOFT), "", LastInterruption((), "rank 2: no progress within soft_timeout")),
        (records(SOFT, SOFT), {"ranks": []}, LastInterruption((), "rank 2: no progress within soft_timeout")),
        (records(RAISED), "", LastInterruption((3,), "rank 3: ValueError at train.py:7")),
        (
            records(InterruptionRecord(0, Interruption.EXCEPTION, 0, "x", is_collateral=True), RAISED),
            "",
            LastInterruption((3,), "rank 3: ValueError at train.py:7"),
        ),
        (
            records(InterruptionRecord(5, Interruption.TERMINATED)),
            "",
            LastInterruption((5,), "rank 5: its process has ended"),
        ),
        ([], "", LastInterruption()),
        # Foreign bytes.
        (["{", "[]", '{"interruption": []}', '{"rank": {}}'], {"ranks": ["x"]}, LastInterruption()),
        ([], [1], LastInterruption()),
    ],
)
def test_why_the_function_is_called_again(written: list[str], blame: object, found: LastInterruption) -> None:
    assert last_interruption(written, json.dumps(blame)) == found
    if not blame:
        assert last_interruption(written, "") == found
