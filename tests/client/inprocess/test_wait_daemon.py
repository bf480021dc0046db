"""Waiting for standalone agents, as a batch script does it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.client.inprocess.nursery import Nursery, RankOfTest
from tests.patience import patient, until
from tests.program import run

MODULE = [sys.executable, "-m", "ft_client.inprocess.wait_daemon"]
PATIENCE_S = patient(60.0)


def waits(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen([*MODULE, *map(str, words)], stderr=subprocess.PIPE, text=True)


def code(*words: object) -> int:
    return run([*MODULE, *map(str, words)]).returncode


def guarded(ranks: Nursery, server: Any, member: int, **files: str) -> RankOfTest:
    rank = ranks.rank()
    rank.do("start", member=member, world_size=2, address=["127.0.0.1", server.port], **files)
    return rank


def ends(rank: RankOfTest) -> None:
    rank.do("close")
    rank.leave()


def test_it_waits_for_the_process_of_a_file(ranks: Nursery, server: Any, tmp_path: Path) -> None:
    rank = guarded(ranks, server, 1, pidfile=str(tmp_path / "pid"))
    waiting = waits(tmp_path / "pid")
    until(lambda: "poll" in Path(f"/proc/{waiting.pid}/wchan").read_text() or waiting.poll() is not None, "it waits")
    assert waiting.poll() is None
    ends(rank)
    assert waiting.wait(PATIENCE_S) == 0
    ranks.nothing_left()
    assert code(tmp_path / "pid") == 0  # it was there once


def test_it_waits_for_all_ranks(ranks: Nursery, server: Any, tmp_path: Path) -> None:
    both = [guarded(ranks, server, member, pidfile=str(tmp_path / "pid-{rank}")) for member in (0, 1)]
    waiting = waits(tmp_path / "pid-{rank}")
    for rank in both:
        assert waiting.poll() is None
        ends(rank)
    assert waiting.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("text", [None, "", "none"])
def test_there_was_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "pid").write_text(text)
    assert code(tmp_path / "pid") == 1


def test_a_pid_that_is_now_another_process_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "pid").write_text("1")
    assert code(tmp_path / "pid") == 0


def test_it_runs_a_command_and_waits_for_who_writes_the_log(ranks: Nursery, server: Any, tmp_path: Path) -> None:
    log = str(tmp_path / "log-{rank}")
    rank = guarded(ranks, server, 1, logfile=log)
    waiting = waits(f"--monitor-process-logfile={log}", "--", "sh", "-c", f"touch {tmp_path}/ran; exit 7")
    until((tmp_path / "ran").exists, "the command ran")
    assert waiting.poll() is None
    ends(rank)
    assert waiting.wait(PATIENCE_S) == 7


@pytest.mark.parametrize(("command", "expected"), [("exit 0", 0), ("exit 5", 5), ("kill -9 $$", 137)])
@pytest.mark.parametrize("log", ["log-{rank}", "none", r"log-\${SLURM_PROCID}"])
def test_a_command_without_an_agent(tmp_path: Path, log: str, command: str, expected: int) -> None:
    (tmp_path / "log-0").write_text("of an earlier run")
    assert code("--monitor-process-logfile", tmp_path / log, "--", "sh", "-c", command) == expected


def test_a_variable_that_no_shell_replaced(
    ranks: Nursery, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "1")
    rank = guarded(ranks, server, 1, logfile=str(tmp_path / "log-1"))
    script = f"touch {tmp_path}/ran; exit 3"
    waiting = waits(rf"--monitor-process-logfile={tmp_path}/log-\${{SLURM_PROCID}}", "--", "sh", "-c", script)
    until((tmp_path / "ran").exists, "the command ran")
    until(lambda: "poll" in Path(f"/proc/{waiting.pid}/wchan").read_text() or waiting.poll() is not None, "it waits")
    assert waiting.poll() is None
    ends(rank)
    assert waiting.wait(PATIENCE_S) == 3


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    assert code(f"--monitor-process-logfile={tmp_path}/log", "--", "/no/such/program") == 127


def test_the_command_gets_the_signals(tmp_path: Path) -> None:
    script = f"trap 'exit 9' TERM; touch {tmp_path}/ready; while :; do sleep 0.01; done"
    waiting = waits(f"--monitor-process-logfile={tmp_path}/log", "--", "sh", "-c", script)
    until((tmp_path / "ready").exists, "it runs")
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(PATIENCE_S) == 9


@pytest.mark.parametrize(
    "words", [[], ["file", "--", "true"], ["--monitor-process-logfile=x"], ["f", "--monitor-process-logfile=x"]]
)
def test_what_makes_no_sense_is_refused(words: list[str]) -> None:
    assert code(*words) == 2
