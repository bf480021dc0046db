"""What the batch scripts read: journals and history in, one line out."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.program import run
from tests.slurm.cluster import SCRIPTS

SCRIPT = SCRIPTS / "after_attempt.py"


def journal(attempt: Path, node: str, *lines: dict[str, Any]) -> None:
    (attempt / node).mkdir(parents=True)
    text = "".join(json.dumps({"v": 1, "t": t, **line}) + "\n" for t, line in enumerate(lines))
    (attempt / node / "journal.host.jsonl").write_text(text + '{"event": "cut')


def end(code: int, reason: str) -> dict[str, Any]:
    return {"event": "job_end", "exit_code": code, "reason": reason}


def follows(folder: Path, name: str, *words: str, flag: str = "") -> str:
    command = [sys.executable, str(SCRIPT), str(folder), str(folder / name), *words]
    environ = {"FAULT_TOL_FINISHED_FLAG_FILE": flag} if flag else {}
    return run(command, environ=environ, check=True).stdout.strip()


def test_a_run_from_its_first_attempt_to_its_last(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_text('{"outcome": "of a later version"}\n[]\nnothing\n')
    fault = {"event": "fault", "exit_code": 16, "rank": 1, "what": "exited with code 16"}
    journal(tmp_path / "1", "n1", end(16, "no other hardware"))
    journal(tmp_path / "1", "n2", fault, end(16, "no other hardware"))
    assert follows(tmp_path, "1", "--code=16").startswith("next 0 n2 exit code 16: move 1 of 3")
    journal(tmp_path / "2", "n1", end(83, "its disk is full"))
    journal(
        tmp_path / "2", "n2", fault | {"exit_code": -7, "fault_class": "hardware suspected"}, end(135, "no restarts")
    )
    journal(tmp_path / "2", "n3")
    assert follows(tmp_path, "2", "--code=83").startswith(
        "next 0 n1,n2 exit code 135 (n2: rank 1 exited with code 16; no restarts); failure 1"
    )
    assert follows(tmp_path, "3", "--code=86", "--told", "--ended-by=None").startswith("leave 0 - ")
    assert follows(tmp_path, "4", "--code=1", "--max-failures=1").startswith("stop 1 - exit code 1; failure 1 in a row")
    assert follows(tmp_path, "5", "--code=0", "--flag-required").startswith("next 0 - ")
    journal(tmp_path / "preempted", "n1", end(86, "told to end by SIGTERM"))
    assert follows(tmp_path, "preempted", "--code=0").startswith("next 0 - preempted"), "--ft-preempted-exit-code=0"
    stop = {"event": "decision", "action": "give up", "not_restartable": True}
    journal(tmp_path / "same error", "n1", stop, end(7, "the same error 3 times in a row"))
    step = follows(tmp_path, "same error", "--code=7")
    assert step.startswith("stop 7 - exit code 7: "), "--ft-no-restart-exit-code=7"
    (tmp_path / "flag").touch()
    assert follows(tmp_path, "6", "--code=1", flag=str(tmp_path / "flag")).startswith("done 0 - ")
    history = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()[3:]]
    assert [line["outcome"] for line in history] == [
        "moved",
        "failed",
        "ended by Slurm",
        "failed",
        "unfinished",
        "preempted",
        "not to be mended",
        "done",
    ]
    assert history[1]["nodes"] == {"n1": 83, "n2": 135, "n3": None} and history[1]["attempt"] == "2"


def test_hostile_journals_are_no_news(tmp_path: Path) -> None:
    """A FIFO, a link to a device and JSON that is too deep or of other types are left out."""
    attempt = tmp_path / "1"
    for node in ("n1", "n2", "n3"):
        journal(attempt, node, end(0, "all ranks succeeded"))
    os.mkfifo(attempt / "n1" / "journal.other.jsonl")
    (attempt / "n2" / "journal.other.jsonl").symlink_to("/dev/zero")
    with (attempt / "n3" / "journal.host.jsonl").open("a") as file:
        file.write("\n" + "[" * 100_000 + "\n" + '{"event": "fault"}\n' + '{"event": ["job_end"]}\n\xff\n')
    assert follows(tmp_path, "1", "--code=0").startswith("done 0 - ")
