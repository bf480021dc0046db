"""The journal keeps events in order and survives a disk that refuses."""

import json
import math
import os
from pathlib import Path
from threading import Thread

import pytest

from ft_launcher.record.events import RankExitEvent, SectionTimesEvent, SignalEvent
from ft_launcher.record.journal.journal import Journal
from tests.descriptors import open_at

FIRST = RankExitEvent(0, 1, 1)
SECOND = SignalEvent(15)


def events(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in path.read_text().splitlines()]


def test_events_before_open_are_kept_in_order(tmp_path: Path) -> None:
    journal = Journal()
    journal.write(FIRST)
    journal.open(tmp_path / "run" / "journal.jsonl")
    journal.write(SECOND)
    journal.open(tmp_path / "other.jsonl")
    journal.close()
    assert events(tmp_path / "run" / "journal.jsonl") == ["rank_exit", "signal"]
    assert not (tmp_path / "other.jsonl").exists()


def test_a_quiet_run_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    journal = Journal()
    journal.write(FIRST)
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_once_and_survived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal()
    journal.open(tmp_path / "journal.jsonl")
    with Path("/dev/full").open("wb") as full:
        os.dup2(full.fileno(), open_at(tmp_path / "journal.jsonl"), inheritable=False)
    for _ in range(3):
        journal.write(FIRST)
    journal.close()
    assert journal.dropped >= 3
    assert len([record for record in caplog.records if "journal" in record.message]) == 1


def test_what_ranks_report_is_bounded_and_what_the_launcher_decides_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ft_launcher.record.journal.journal._MAX_REPORTED", 1000)
    journal = Journal()
    journal.open(tmp_path / "journal.jsonl")
    for _ in range(100):
        journal.report(SectionTimesEvent(0, 1, {"x" * 100: {}}, {}))
    journal.write(SECOND)
    journal.close()
    *reports, last, decision = events(tmp_path / "journal.jsonl")
    assert (set(reports), last, decision) == ({"section_times"}, "reports_end", "signal")
    assert 1 < len(reports) < 10


def test_a_folder_that_cannot_be_made_is_survived(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    journal = Journal()
    journal.open(tmp_path / "file" / "journal.jsonl")
    journal.write(FIRST)
    assert journal.path is None


def test_a_new_piece_says_whose_it_is(tmp_path: Path) -> None:
    journal = Journal(max_mb=0.001)
    journal.run_id, journal.node = "run", "host"
    journal.open(tmp_path / "journal.host.jsonl")
    for _ in range(60):
        journal.write(FIRST)
    journal.close()
    (first, *rest) = (json.loads(line) for line in (tmp_path / "journal.host.jsonl").read_text().splitlines())
    assert (first["event"], first["run_id"], first["node"]) == ("journal_piece", "run", "host")
    assert first["piece"] > 2 and first["lost_bytes"] > 0
    assert {line["event"] for line in rest} == {"rank_exit"}
    assert len(list(tmp_path.iterdir())) == 3


def test_dropped_lines_are_noted_where_they_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ft_launcher.record.journal.journal._MAX_HELD", 1)
    journal = Journal()
    for _ in range(3):
        journal.write(FIRST)
    journal.open(tmp_path / "journal.jsonl")
    journal.write(SECOND)
    journal.close()
    assert events(tmp_path / "journal.jsonl") == ["rank_exit", "lines_dropped", "signal"]
    assert journal.dropped == 2


def test_an_event_after_the_end_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal()
    journal.open(tmp_path / "journal.jsonl")
    journal.write(FIRST)
    for _ in range(2):
        journal.close()
        journal.write(SECOND)
    assert events(tmp_path / "journal.jsonl") == ["rank_exit"]
    assert journal.dropped >= 2 and not caplog.records


def test_threads_write_whole_lines_and_each_once(tmp_path: Path) -> None:
    journal = Journal(max_mb=None)
    journal.open(tmp_path / "journal.jsonl")
    threads = [
        Thread(target=lambda rank=rank: [journal.write(RankExitEvent(0, rank, number)) for number in range(200)])
        for rank in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    for rank in range(4):
        assert [line["exit_code"] for line in lines if line["rank"] == rank] == list(range(200))


def test_numbers_that_are_no_json_become_null(tmp_path: Path) -> None:
    journal = Journal()
    journal.open(tmp_path / "journal.jsonl")
    journal.report(SectionTimesEvent(0, 1, {"step": {"relative": math.nan, "num": [math.inf, 1]}}, {}))
    journal.close()
    (line,) = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert json.loads(line)["sections"] == {"step": {"relative": None, "num": [None, 1]}}
