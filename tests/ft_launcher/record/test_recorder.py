"""What the journal and the console say of restarts in process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ft_launcher.decide.attribution import RankEvidence
from ft_launcher.decide.attribution.cycle_evidence import CycleEvidence
from ft_launcher.decide.attribution.first_failure import attribute
from ft_launcher.decide.policy.restart_policy import Action, Decision
from ft_launcher.record.logs.logs import RunFolder
from ft_launcher.record.placement import Placement, RankNumbers
from ft_launcher.record.recorder import Recorder
from rank_monitor.contract.settings.config import MonitorSettings, RecordSettings
from rank_monitor.contract.wire.launcher_messages import Verdict
from tests.patience import patient


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(RunFolder(None, "run"), RecordSettings(journal_dir=str(tmp_path)))


def lines(recorder: Recorder, event: str) -> list[dict[str, Any]]:
    assert recorder.journal.flush(patient(30.0)) and recorder.journal.path is not None
    found = map(json.loads, recorder.journal.path.read_text().splitlines())
    return [line for line in found if line["event"] == event]


def verdict(limit: str, condemned: bool) -> Verdict:
    return Verdict(0, 3, 1, limit, 60.0, 60.1, False, 7, {}, "no progress for 60.1 s", "line", [], {}, condemned)


@pytest.mark.parametrize(
    ("limit", "condemned", "event"),
    [
        ("soft_timeout", False, "interruption"),
        ("section:step", False, "interruption"),
        ("stall", False, "verdict"),
        ("hard_timeout", True, "verdict"),
    ],
)
def test_a_rank_that_is_asked_to_restart_did_not_fail(
    recorder: Recorder, tmp_path: Path, limit: str, condemned: bool, event: str
) -> None:
    recorder.monitor_reported(0, 1, 3, verdict(limit, condemned), tmp_path / "none")
    (line,) = lines(recorder, event)
    assert (line["rank"], line["limit"]) == (3, limit)


def test_the_story_of_a_death_in_process(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    end = RankEvidence(3, 1, 4711, exit_code=-11, died_at=1.0)
    recorder.in_process.lost(0, end, attribute(CycleEvidence([end])), killed_by_us=False)
    recorder.in_process.restarted(0, 4, 0.0423, [{"rank": 3, "interruption": "TERMINATED"}])
    recorder.in_process.started_again(0, 3, 1, 4712)
    recorder.job_ended(0, "all ranks succeeded")
    text = capsys.readouterr().err
    for words in (
        "rank 3 (pid 4711) died of SIGSEGV, likely: a fault in native code; handled in process",
        "restarted in process after 0.042 s: round 4 of cycle 0 (rank 3 ended)",
        "rank 3 was started again (pid 4712)",
        "restarts in process: 1; ranks started again alone: 1;",
    ):
        assert words in text
    (end_of_job,) = lines(recorder, "job_end")
    assert (end_of_job["restarts_in_process"], end_of_job["started_again"], end_of_job["taken_over"]) == (1, 1, 0)


def test_each_node_says_which_of_its_ranks_failed_in_consequence(
    recorder: Recorder, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Their tracebacks are on the console of their own node alone; the fault is another node's, or a node is lost."""
    decision = Decision(Action.RESTART, "restart 1 of 3", restarts_left=2)
    recorder.failed_on_other_node(0, "rank 3 on b hangs: it is stopped", decision, [0, 1])
    told = capsys.readouterr().err.splitlines()
    assert told[0].endswith(" ft_launcher: rank 3 on b hangs: it is stopped")
    assert told[1:] == [
        "  also: ranks 0, 1 failed in consequence: their tracebacks are not the cause",
        "  cycle 0; next: restart - restart 1 of 3, 2 left",
    ]
    recorder.reform(1, "node b was lost", [1])
    assert caplog.messages == [
        "the group forms anew: node b was lost; rank 1 failed in consequence: its traceback is not the cause"
    ]


def test_a_quiet_job_says_nothing_of_it(recorder: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    recorder.job_ended(0, "all ranks succeeded")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("asked", "with_log_folder", "kept"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"journal_dir": "here"}, False, True),
        ({"metrics_port": 9400}, False, True),
        ({"status_port": 9401}, False, True),
    ],
)
def test_a_healthy_job_has_a_journal_where_somebody_wants_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], with_log_folder: bool, kept: bool
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    run = RunFolder(str(tmp_path / "logs") if with_log_folder else None, "run")
    recorder = Recorder(run, RecordSettings(**asked))
    recorder.job_started("run", "train", ["ft_launcher"], 0, 2, MonitorSettings())
    recorder.job_ended(0, "all ranks succeeded")
    run.close()
    files = list(tmp_path.rglob("journal.*.jsonl"))
    assert bool(files) is kept
    for file in files:
        assert [json.loads(line)["event"] for line in file.read_text().splitlines()] == ["job_start", "job_end"]
    assert kept or list(tmp_path.iterdir()) == []


def test_a_folder_for_what_ranks_print_gets_a_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run = RunFolder(None, "run")
    recorder = Recorder(run, RecordSettings())
    run.make()
    two = tuple(RankNumbers(local_rank=number, rank=2 + number, role_rank=number) for number in range(2))
    recorder.cycle_started(Placement(3, 1, 2, two, 4, "default", 4, "run", 0, "a", 1, True), {0: 50, 1: 51})
    recorder.job_ended(0, "all ranks succeeded")
    (start,) = lines(recorder, "cycle_start")
    assert (start["cycle"], start["node_rank"], start["nodes"], start["master"]) == (3, 1, 2, "a:1")
    assert [(each["rank"], each["local_rank"], each["pid"]) for each in start["ranks"]] == [(2, 0, 50), (3, 1, 51)]
    run.close()
