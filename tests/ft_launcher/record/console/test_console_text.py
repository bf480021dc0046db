"""The console block: at most ten lines, with what a person needs first; and the summary of torch's failures."""

import logging
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ft_client.inprocess.attribution import Interruption
from ft_launcher.decide.attribution import Fault, FaultClass, FaultKind
from ft_launcher.decide.policy.restart_policy import Action, Decision
from ft_launcher.record.console import console_text
from ft_launcher.record.console.console_text import block, failed_ranks, goes_on, in_colour

FAULT = Fault(
    FaultKind.HANG, 3, 1, 4711, -9, "hangs: section step open for 5.0 s", "in section step at iteration 9",
    "the process is stopped", detail=tuple(f"train.py:{n} in f{n}" for n in range(20)),
    others=tuple(f"rank {n} was running" for n in range(9)), fault_class=FaultClass.HANG,
)  # fmt: skip
MORNING = datetime(2026, 2, 3, 4, 5, 6).timestamp()
AT = "04:05:06"
RESTART = Decision(Action.RESTART, "restart 1 of 3", True, 2)


def test_says_everything_in_ten_lines() -> None:
    lines = block(FAULT, RESTART, 2, "node7", Path("/logs/run"), MORNING)
    assert len(lines) == 10 and lines[0].startswith(f"{AT} ft_launcher: rank 3 on node7 hangs")
    text = "\n".join(lines)
    for part in (
        "rank 3 on node7 hangs",
        "iteration 9; class: hang",
        "stopped",
        "train.py:0",
        "restart 1 of 3, 2 left",
        "/logs/run",
    ):
        assert part in text


def test_giving_up_names_the_exit_code() -> None:
    text = block(
        replace(FAULT, detail=(), others=()), Decision(Action.GIVE_UP, "spent", exit_code=85), 0, "n", None, MORNING
    )[-1]
    assert "give up - spent; exit code 85" in text


def test_a_wait_is_said() -> None:
    text = block(FAULT, replace(RESTART, wait_s=4.0), 2, "node7", None, MORNING)[-1]
    assert "restart 1 of 3, 2 left, after a wait of 4 s" in text


@pytest.mark.parametrize("decision", [RESTART, Decision(Action.GIVE_UP, "spent", exit_code=85)])
def test_the_headline_and_a_restart_are_coloured(decision: Decision) -> None:
    plain = block(FAULT, decision, 0, "n", Path("/logs/run"), MORNING)
    coloured = in_colour(plain)
    assert "\033" not in "".join(plain) and coloured[0] == f"\033[1;31m{plain[0]}\033[0m"
    restart = [line for line in coloured[1:] if "\033" in line]
    assert restart == [f"\033[1;32m{plain[-2]}\033[0m"] * (decision.action is Action.RESTART)


@pytest.mark.parametrize(
    ("tier", "step", "on_disk", "reached", "lost", "says"),
    [
        ("none", 0, 0, 0, None, ""),
        ("none", 0, 1000, 1000, 0, ""),
        ("none", 0, 1000, 0, None, ""),
        ("memory", 21, 0, 0, None, "the training goes on from step 21 in memory"),
        ("memory", 21, 0, 45, 24, "the training goes on from step 21 in memory; 24 steps are lost"),
        ("memory", 21, 0, 22, 1, "the training goes on from step 21 in memory; 1 step is lost"),
        ("memory", 21, 0, 21, 0, "the training goes on from step 21 in memory; no step is lost"),
        (
            *("memory", 12000, 10000, 13500, 1500),
            "the training goes on from step 12000 in memory (the checkpoint on disk has step 10000); "
            "1,500 steps are lost",
        ),
        ("none", 0, 1000, 1045, 45, "the training goes on from its checkpoint on disk, step 1000; 45 steps are lost"),
        (
            *("none", 0, 0, 45, None),
            "the training goes on without state in memory, and names no checkpoint on disk; "
            "without one 45 steps are lost",
        ),
    ],
)
def test_where_a_training_goes_on(
    tier: str, step: int, on_disk: int, reached: int, lost: int | None, says: str
) -> None:
    assert goes_on(tier, step, on_disk, reached, lost) == says


def failure(local_rank: int, exit_code: int) -> ProcessFailure:
    made = ProcessFailure(local_rank, 100 + local_rank, exit_code, error_file="")
    made.timestamp = 0
    return made


def test_the_summary_of_a_crash_names_all_that_failed_by_themselves() -> None:
    fault = replace(FAULT, kind=FaultKind.EXIT, rank=3)
    text = failed_ranks("train.py", {5: failure(2, 1), 3: failure(1, -11)}, fault, hidden=())
    name, cause, first, others, second = text.splitlines()
    assert (name, cause, others) == ("train.py FAILED", "Root Cause (first observed failure):", "Other failures:")
    assert first.startswith("  rank: 3 (local_rank: 1), exitcode: -11 (SIGSEGV) (pid: 101), time: ")
    assert second.startswith("  rank: 5 (local_rank: 2), exitcode: 1 (pid: 102), time: ")
    assert first.endswith("error_file: <N/A>")


def test_the_summary_of_a_hang_says_who_ended_the_rank() -> None:
    text = failed_ranks("train.py", {3: failure(1, -15)}, FAULT, hidden=())
    assert "rank: 3 (local_rank: 1), ended by the launcher (pid: 101)" in text and "-15" not in text


def test_the_summary_blames_no_rank_here_for_a_failure_of_another_node() -> None:
    text = failed_ranks("train.py", {3: failure(1, 1)}, None, hidden=())
    assert "Root Cause" not in text and "Failures on this node, after that of another:\n  rank: 3" in text


def test_the_summary_shows_a_traceback_that_the_console_has_not() -> None:
    raised = failure(1, 1)
    raised.message = {"message": "KeyError: 1", "extraInfo": {"py_callstack": "Traceback\nKeyError: 1", "timestamp": 0}}
    assert failed_ranks("f", {3: raised}, FAULT, hidden={3}).endswith("\n    Traceback\n    KeyError: 1")
    assert "KeyError" not in failed_ranks("f", {3: raised}, FAULT, hidden={4})


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"rank": 1, "interruption": "EXCEPTION", "error": "KeyError at a.py:3"}, "rank 1 raised KeyError at a.py:3"),
        ({"rank": 1, "interruption": "EXCEPTION"}, "rank 1 raised an exception"),
        ({"rank": 0, "interruption": "EXCEPTION", "collateral": True}, "rank 0 failed in consequence"),
        ({"rank": 0, "interruption": "TERMINATED"}, "rank 0 ended"),
        ({"rank": 0, "interruption": "of later"}, "rank 0 of later"),
    ],
)  # fmt: skip
def test_why_ranks_restarted_in_process(record: dict[str, object], words: str) -> None:
    assert console_text.of_interruption(record) == words


def test_each_kind_of_interruption_has_words() -> None:
    for kind in Interruption:
        words = console_text.of_interruption({"rank": 0, "interruption": kind.name})
        assert kind.name not in words and words.startswith("rank 0 "), words


def test_control_characters_of_a_rank_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither does text of a rank move the cursor, nor does it look like another line of the launcher."""
    hostile = "bad\x1b[2J\r\nft_launcher: all is well\x07 \u202e \udcff"
    escaped = r"bad\x1b[2J\r\nft_launcher: all is well\x07 \u202e \udcff"
    console_text.show(hostile)
    fault = replace(FAULT, what=hostile, hint=hostile, detail=(hostile,), others=(hostile,))
    console_text.show_lines("\n".join(block(fault, RESTART, 0, "node", None, MORNING)), escape=False)
    shown = capsys.readouterr().err
    assert shown.count(escaped) == 5 and "\x1b" not in shown and "\r" not in shown
    record = logging.LogRecord("name", logging.WARNING, "file", 1, "rank says %s", (hostile,), None)
    assert console_text.LineFormatter("%(message)s").format(record) == f"rank says {escaped}"
    record.created = MORNING
    assert console_text.ConsoleFormatter().format(record) == f"{AT} ft_launcher: WARNING: rank says {escaped}"
    record.levelno = logging.INFO
    assert console_text.ConsoleFormatter().format(record) == f"{AT} ft_launcher: rank says {escaped}"


def test_a_line_says_when_it_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    console_text.say("all is well")
    console_text.answer("nobody asked")
    line, answer = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d ft_launcher: all is well", line) and answer == "ft_launcher: nobody asked"
