"""The file of unexpected results, also when it is broken; what the launcher says to ranks that moved; same devices."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path

import pytest

from ft_client.rerun import judgement, ran_before
from ft_client.rerun.unexpected_result import (
    Device,
    UnexpectedResult,
    ValidationCall,
    get_skipped_iterations_from_tracker_file,
    record,
)
from rank_monitor.contract.wire.messages import ResultInDoubt

VARIABLE = "FT_RESULT_IN_DOUBT"


def failure(iteration: int, rank: int = 0, fatal: bool = True) -> UnexpectedResult:
    return UnexpectedResult(
        ValidationCall("train.py:1", 1), rank, iteration, "loss is NaN", float("nan"), fatal, Device("a", "cpu")
    )


def test_what_is_skipped(tmp_path: Path) -> None:
    file = str(tmp_path / "rejected")
    statuses = [
        judgement.UNEXPECTED,
        judgement.TRANSIENT,
        judgement.REPRODUCED,
        judgement.SAME_DEVICE,
        judgement.PERSISTENT,
        judgement.CORRECT,
        judgement.TOLERATED,
        judgement.CORRECT,
    ]
    for iteration, status in reversed(list(enumerate(statuses))):
        record(file, status, failure(iteration))
        record(file, status, failure(iteration))
    assert get_skipped_iterations_from_tracker_file(file) == [5, 6, 7]


def test_without_reruns_an_iteration_counts_that_stopped_one_rank_twice(tmp_path: Path) -> None:
    file = str(tmp_path / "rejected")
    once, twice, by_two_ranks, not_fatal = range(4)
    for _ in range(2):
        record(file, judgement.DISABLED, failure(twice, rank=1))
        record(file, judgement.DISABLED, failure(by_two_ranks))
        record(file, judgement.DISABLED, failure(not_fatal, fatal=False))
    record(file, judgement.DISABLED, failure(by_two_ranks, rank=1))
    record(file, judgement.DISABLED, failure(once))
    assert get_skipped_iterations_from_tracker_file(file) == [twice]


def test_lines_that_are_no_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "rejected"
    file.write_text('{"status": "second_rer\n[]\n3\n{"status": "second_rerun_reproducible"}\n')
    record(str(file), judgement.CORRECT, failure(9))
    assert get_skipped_iterations_from_tracker_file(str(file)) == [9]
    assert len(caplog.records) == 1, "said once"


def test_a_file_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        record(str(tmp_path / "no folder" / "rejected"), judgement.CORRECT, failure(1))
    assert "result_rejected_tracker_filename=" in caplog.text


def test_where_the_rank_in_doubt_ran_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert ran_before() is None
    monkeypatch.setenv(VARIABLE, json.dumps(asdict(ResultInDoubt("reproducible", 3, 7, "a", "cpu"))))
    assert ran_before() == (3, Device("a", "cpu"))
    for text in ("{", "[]", '{"rank": "3"}'):
        monkeypatch.setenv(VARIABLE, text)
        assert ran_before() is None, "a broken text stops no training"


@pytest.mark.parametrize(
    ("here", "there", "same"),
    [
        (Device("a", "cpu"), Device("a", "cpu"), True),
        (Device("a", "cpu"), Device("b", "cpu"), False),
        (Device("a", "cuda:0"), Device("b", "cuda:0"), False),
        (Device("a", "cuda:1f-2e"), Device("a", "cuda:1f-2f"), False),
        (Device("a", "cuda:1f-2e"), Device("a-renamed", "cuda:1f-2e"), True),
    ],
)
def test_one_device(here: Device, there: Device, same: bool) -> None:
    assert here.is_same(there) is there.is_same(here) is same
