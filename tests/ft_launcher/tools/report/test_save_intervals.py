"""How often to save, as the agent chooses it at the start of a cycle: by its own events, and by earlier journals."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from ft_launcher.record import events
from ft_launcher.record.journal.access import Access
from ft_launcher.record.journal_reader import journals_in
from ft_launcher.record.logs.logs import RunFolder
from ft_launcher.record.recorder import Recorder
from ft_launcher.tools.report import save_intervals
from ft_launcher.tools.report.advice import FIRST_SAVE_S, best_interval_s
from ft_launcher.tools.report.save_intervals import SaveIntervals
from rank_monitor.contract.settings.config import RecordSettings
from tests.faults.test_save_interval import earlier_attempt
from tests.ft_launcher.tools.report.lines import as_bytes
from tests.patience import patient, until

JOB = "again"


def made(folder: Path) -> tuple[SaveIntervals, Recorder]:
    recorder = Recorder(RunFolder(str(folder / "logs"), JOB, Access()), RecordSettings(journal_dir=str(folder)))
    recorder.journal.run_id = JOB
    (folder / "journal.earlier.jsonl").write_bytes(as_bytes(earlier_attempt(JOB)))
    # What is there is read in time, on a busy machine too.
    return SaveIntervals(str(folder), recorder, wait_s=patient(60)), recorder


def written(recorder: Recorder) -> list[float]:
    assert recorder.journal.flush(patient(30.0)) and recorder.journal.path is not None
    lines = map(json.loads, recorder.journal.path.read_text().splitlines())
    return [line["interval_s"] for line in lines if line["event"] == "save_interval"]


def test_on_another_node_than_rank_0s_nothing_is_read_or_written(tmp_path: Path) -> None:
    """It chooses all the same: after a restart in process rank 0 may be one of its ranks."""
    intervals, recorder = made(tmp_path)
    assert intervals.choose(0, has_rank0=False) == FIRST_SAVE_S
    assert written(recorder) == []
    interval_s = best_interval_s(5.0, 3000.0)
    assert intervals.choose(1, has_rank0=True) == interval_s
    assert written(recorder) == [interval_s]


def test_a_folder_that_hangs_holds_up_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has is known for the first cycle that starts after it answers."""
    intervals, _ = made(tmp_path)
    answers = threading.Event()
    find = journals_in

    def slow(paths: list[Path]) -> list[list[Path]]:
        assert answers.wait(patient(60))
        return find(paths)

    monkeypatch.setattr(save_intervals, "journals_in", slow)
    intervals.wait_s = 0.0
    assert [intervals.choose(cycle, has_rank0=True) for cycle in range(2)] == [FIRST_SAVE_S, FIRST_SAVE_S]
    answers.set()
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "ft_saves"], "all is read")
    intervals.wait_s = patient(60)
    assert intervals.choose(2, has_rank0=True) == best_interval_s(5.0, 3000.0)


def test_one_journal_that_is_too_long_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    intervals, _ = made(tmp_path)
    (tmp_path / "journal.other.jsonl").write_bytes(b"\n" * (1 << 20))
    monkeypatch.setattr(save_intervals, "_MAX_READ", (1 << 20) - 1)
    assert intervals.choose(0, has_rank0=True) == best_interval_s(5.0, 3000.0)


def test_a_journal_that_cannot_be_read_costs_no_start(tmp_path: Path) -> None:
    intervals, recorder = made(tmp_path)
    (tmp_path / "journal.gone.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "journal.wrong.jsonl").write_bytes(b"\x00[[[" * 1000 + b"\n")
    assert intervals.choose(0, has_rank0=True) == best_interval_s(5.0, 3000.0)
    (tmp_path / "journal.earlier.jsonl").unlink()
    intervals = SaveIntervals(None, recorder, wait_s=patient(60))
    recorder.journal.write(events.CycleStartEvent(0, 0, 1, "127.0.0.1:1", [{"rank": 0, "local_rank": 0, "pid": 1}]))
    assert intervals.choose(1, has_rank0=True) == FIRST_SAVE_S
    assert written(recorder)[-1] == FIRST_SAVE_S
