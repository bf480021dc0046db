"""The journal keeps events in order and survives a disk that refuses."""

import json
from pathlib import Path

import pytest

from ft_launcher.record.journal import Journal


def events(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in path.read_text().splitlines()]


def test_events_before_open_are_kept_in_order(tmp_path: Path) -> None:
    journal = Journal()
    journal.write("first", rank=1)
    journal.open(tmp_path / "run" / "journal.jsonl")
    journal.write("second")
    journal.open(tmp_path / "other.jsonl")
    journal.close()
    assert events(tmp_path / "run" / "journal.jsonl") == ["first", "second"]
    assert not (tmp_path / "other.jsonl").exists()


def test_a_quiet_run_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    journal = Journal()
    journal.write("only in memory")
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_once_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal()
    journal.open(Path("/dev/full"))
    for _ in range(3):
        journal.write("dropped")
    journal.close()
    assert journal.dropped >= 3
    assert len([record for record in caplog.records if "journal" in record.message]) == 1


def test_what_ranks_report_is_bounded_and_what_the_launcher_decides_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ft_launcher.record.journal._MAX_REPORTED", 1000)
    journal = Journal()
    journal.open(tmp_path / "journal.jsonl")
    for _ in range(100):
        journal.report("section_times", sections="x" * 100)
    journal.write("decision")
    journal.close()
    *reports, last, decision = events(tmp_path / "journal.jsonl")
    assert (set(reports), last, decision) == ({"section_times"}, "reports_end", "decision")
    assert 1 < len(reports) < 10


def test_a_folder_that_cannot_be_made_is_survived(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    journal = Journal()
    journal.open(tmp_path / "file" / "journal.jsonl")
    journal.write("goes on")
    assert journal.path is None
