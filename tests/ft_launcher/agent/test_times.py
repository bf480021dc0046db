"""The time ledger as the agent keeps it: which parts are written to the journal, and when."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ft_launcher.agent import times
from ft_launcher.agent.times import NodeTimes
from ft_launcher.record.journal.access import Access
from ft_launcher.record.ledger.account import Category
from ft_launcher.record.logs.logs import RunFolder
from ft_launcher.record.recorder import Recorder
from rank_monitor.contract.settings.config import RecordSettings
from rank_monitor.contract.wire.rank_times import RankTimes
from tests.patience import patient


def recorder(folder: Path, journal_dir: str) -> Recorder:
    return Recorder(RunFolder(str(folder / "logs"), "run", Access()), RecordSettings(journal_dir=journal_dir))


def quiet_recorder() -> Recorder:
    return Recorder(RunFolder(None, "run", Access()), RecordSettings())


def parts(keeps: Recorder) -> list[dict[str, Any]]:
    journal = keeps.journal
    assert journal.flush(patient(30.0)) and journal.path is not None
    lines = map(json.loads, journal.path.read_text().splitlines())
    return [line for line in lines if line["event"] == "ledger"]


def trained() -> RankTimes:
    now = time.monotonic_ns()
    return RankTimes(since_ns=now, at_ns=now, now_ns=now, attached=True)


def one_cycle(kept: NodeTimes, cycle: int) -> None:
    kept.begins(Category.HEALTH)
    kept.begins(Category.RENDEZVOUS)
    kept.formed(0.0)
    kept.ranks_started(cycle, time.monotonic_ns())
    kept.record(cycle, trained())
    kept.cycle_over()
    kept.failed(None)
    kept.stopped()


def test_the_age_of_a_checkpoint_counts_from_when_it_was_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = NodeTimes(quiet_recorder())
    kept.ranks_started(0, time.monotonic_ns())
    began = time.monotonic()

    def hear(after_s: float, saved: int, cycle: int = 0) -> float | None:
        monkeypatch.setattr(time, "monotonic", lambda: began + after_s)
        kept.record(cycle, replace(trained(), iteration=saved, saved=saved, saved_ns=1))
        return kept.now().saved_age_s

    assert kept.now().saved_age_s is None
    assert hear(10.0, 100) == 0.0
    assert hear(70.0, 100) == pytest.approx(60.0)
    assert hear(80.0, 200) == 0.0


def test_a_part_is_written_once_when_the_next_begins_and_the_last_at_the_end(tmp_path: Path) -> None:
    keeps = recorder(tmp_path, str(tmp_path))
    kept = NodeTimes(keeps)
    one_cycle(kept, 0)
    assert parts(keeps) == []  # its ledger may still arrive
    one_cycle(kept, 1)
    assert [part["cycle"] for part in parts(keeps)] == [0]
    account = kept.finish()
    written = parts(keeps)
    assert [(part["cycle"], part["has_ended"]) for part in written] == [(0, True), (1, True), (None, True)]
    assert account is not None
    assert account.wall_s == pytest.approx(written[-1]["until"] - written[0]["since"], abs=1e-3)
    assert written[1]["recovery"] and not written[0]["recovery"]


def test_a_cycle_that_runs_for_long_is_written_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "WRITE_EVERY_S", 0.0)
    keeps = recorder(tmp_path, str(tmp_path))
    kept = NodeTimes(keeps)
    kept.ranks_started(0, time.monotonic_ns())
    kept.record(0, trained())
    (part,) = parts(keeps)
    assert (part["cycle"], part["has_ended"]) == (0, False)
    assert "stop" not in part["seconds"]


def test_a_job_without_a_journal_file_is_not_written_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that are held would fill the memory of a job that never has anything to keep."""
    monkeypatch.setattr(times, "WRITE_EVERY_S", 0.0)
    keeps = quiet_recorder()
    kept = NodeTimes(keeps)
    kept.ranks_started(0, time.monotonic_ns())
    kept.record(0, trained())
    assert keeps.journal.path is None
    keeps.journal.open(tmp_path / "journal.jsonl")  # writes every line that is held
    assert parts(keeps) == []
