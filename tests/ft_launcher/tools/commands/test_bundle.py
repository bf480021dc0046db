"""`ft_launcher bundle`: what it writes, that nothing secret is in it, and what it says of bad input."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ft_launcher.record import events
from ft_launcher.tools.bundle.incident import page as incident_page
from ft_launcher.tools.commands import bundle as command
from rank_monitor.contract.processes import runtime_folder
from tests.ft_launcher.conftest import main
from tests.ft_launcher.tools.replay.decisions import Job, Line, line, the

pytestmark = pytest.mark.usefixtures("folder")

SECRET = "hunter2"
URL = f"postgres://user:{SECRET}@db/x"


def incident() -> list[Line]:
    """A job with a secret wherever a user or a rank can put one."""
    lines = Job().fails().fails().lines
    the(lines, "job_start")["command"] = ["ft_launcher", "--nnodes=1", "train.py", "--token", SECRET, URL]
    the(lines, "job_start")["environment"] = {"NCCL_DEBUG": "INFO", "WANDB_API_KEY": SECRET}
    the(lines, "job_start")["versions"] = {"torch": "2.13.0"}
    for number in (0, 1):
        the(lines, "fault", number)["what"] = f"raised ValueError: {URL}"
        the(lines, "fault", number)["detail"] = ["train.py:3 in step", f'    connect("{URL}")']
        the(lines, "evidence", number)["ranks"][0]["exception"]["message"] = URL
        the(lines, "decision", number)["reason"] = "restart 1 of 3"
    error = f"AssertionError\n{SECRET} at train.py:3"
    the(lines, "decision", 1)["reason"] = f"the same error 2 times in a row: {error} at iteration 4"
    the(lines, "decision", 1)["inputs"]["history"]["error"] = error
    groups = {"0": {"entered": 4, "finished": 3, "operation": "all_reduce", "shape": "[[4]]", "description": "dp"}}
    idle = {"rank": 1, "place": "outside", "frames": ["train.py:9 in load"], "stacks": URL, "groups": {}}
    waits = {"rank": 0, "place": "collective", "frames": ["train.py:20 in step"], "process": {}, "groups": groups}
    trace = f'  File "/x/train.py", line 3, in step\n    token = "{SECRET}"\n'
    return [
        *lines,
        line(events.UncaughtExceptionEvent(0, 0, "ValueError", URL, trace, 1.0, True)),
        line(events.StacksEvent(1, [waits, idle])),
        line(events.ControlRequestEvent(1, 0, "restart", SECRET)),
        line(events.LingersEvent(1, {"7": f"sleep {SECRET}"})),
        line(events.HealthChangeEvent(1, "nic", "ok", "unhealthy", f"curl {URL}")),
        line(events.JobEndEvent(85, f"asked: {SECRET}", 0, 0, 0)),
    ]


def write(folder: Path, lines: list[Line], rest: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "journal.a.jsonl"
    file.write_text("".join(json.dumps(found) + "\n" for found in lines) + rest)
    return file


def ends(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    """Runs it; returns exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        main(["bundle", *map(str, words)])
    out, err = capsys.readouterr()
    assert "Traceback" not in err and isinstance(ended.value.code, int)
    return ended.value.code, out, err


def parts(file: Path) -> dict[str, str]:
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_nothing_secret_is_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "incident.zip"
    code, out, err = ends(capsys, write(tmp_path / "logs", incident()), "-o", file)
    assert (code, err) == (0, "") and "without texts of ranks" in out
    found = parts(file)
    assert found.keys() == {"incident.md", "stacks.txt", "journals/0.jsonl"}
    for name, text in found.items():
        assert SECRET not in text, name
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_page_is_read_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "incident.zip"
    ends(capsys, write(tmp_path / "logs", incident()), "-o", file)
    page = parts(file)["incident.md"]
    for text in (
        "# Incident: run",
        "| exit code | 85 on a |",
        "| a | 1 | 0 | user error | exception: ValueError at train.py:3 |",
        "| restart: restart 1 of 3 |",
        "  rank 0:\n    train.py:20 in step\n  rank 1:\n    train.py:9 in load",
        "| 0 | dp | 4 | 3 | all_reduce | [[4]] |",
        "| nic | unhealthy |",
        "| a | torch=2.13.0 |",
        "| a | NCCL_DEBUG=INFO |",
    ):
        assert text in page, page


def test_texts_are_in_it_only_where_they_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "incident.zip"
    code, out, _ = ends(capsys, write(tmp_path / "logs", incident()), "-o", file, "--with-texts")
    assert code == 0 and "read them before passing this on" in out
    found = parts(file)
    assert f"raised ValueError: {URL}" in found["incident.md"]
    assert "WANDB" not in found["journals/0.jsonl"] and f"sleep {SECRET}" not in found["journals/0.jsonl"]


def test_a_file_that_exists_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal, file = write(tmp_path / "logs", incident()), tmp_path / "incident.zip"
    file.write_text("mine")
    code, _, err = ends(capsys, journal, "-o", file)
    assert code == 2 and f"{file} exists" in err and file.read_text() == "mine"
    assert ends(capsys, journal, "-o", file, "--force")[0] == 0
    assert "incident.md" in parts(file)


def test_a_file_that_appears_meanwhile_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, file = write(tmp_path / "logs", incident()), tmp_path / "incident.zip"

    def page_of_a_slow_disk(*given: Any) -> str:
        file.write_text("theirs")
        return incident_page(*given)

    monkeypatch.setattr(command, "page", page_of_a_slow_disk)
    code, _, err = ends(capsys, journal, "-o", file)
    assert code == 2 and f"{file} exists" in err
    assert file.read_text() == "theirs" and not list(tmp_path.glob(".*"))


def test_a_file_system_without_hard_links(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any, **more: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    journal, file = write(tmp_path / "logs", incident()), tmp_path / "incident.zip"
    code, _, err = ends(capsys, journal, "-o", file)
    assert (code, err) == (0, "") and "incident.md" in parts(file) and not list(tmp_path.glob(".*"))


def test_what_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = ends(capsys, write(tmp_path / "logs", incident()), "-o", tmp_path / "none" / "x.zip")
    assert code == 2 and "cannot be written" in err


def test_an_error_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = write(tmp_path / "logs", incident())
    monkeypatch.setattr(command, "page", lambda *given: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        command.bundle([str(journal), "-o", str(tmp_path / "x.zip")])
    assert not list(tmp_path.glob(".*")) and not (tmp_path / "x.zip").exists()


def test_a_folder_without_a_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("nothing")
    code, out, err = ends(capsys, tmp_path / "run", "-o", tmp_path / "x.zip")
    assert (code, out) == (2, "") and "run has no journal" in err
    assert not (tmp_path / "x.zip").exists()


def test_neither_a_file_nor_a_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # No other test's launcher is looked for: one that is stopped just now would be a job of which nothing is known.
    monkeypatch.setattr(runtime_folder, "parents", lambda environ: [str(tmp_path)])
    code, out, err = ends(capsys, "no-such-run", "-o", tmp_path / "x.zip")
    assert (code, out) == (4, "") and "no-such-run is no file" in err
    assert not (tmp_path / "x.zip").exists()


def test_it_is_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_MAX_BYTES", 100_000)
    lines = [*incident(), *(line(events.RankExitEvent(1, rank, 1)) for rank in range(5000))]
    file = tmp_path / "incident.zip"
    ends(capsys, write(tmp_path / "logs", lines), "-o", file)
    found = parts(file)
    assert len(found["journals/0.jsonl"]) <= 100_000
    assert "in the middle" in found["incident.md"] and found["journals/0.jsonl"].startswith(
        '{"v": 1, "t": 1.0, "event": "job_start"'
    )


@pytest.mark.parametrize(
    "rest",
    [
        '{"v": 1, "t": 3, "ev',
        '{"v": 1, "t": 3, "event": "fault", "cycle": [1], "rank": {}, "kind": 7, "error": [], "where": {}}\n'
        '{"v": 1, "t": 1e300, "event": "stacks", "ranks": [{"rank": "x", "frames": 7, "groups": {"0": 1}}]}\n'
        '{"v": 1, "t": 3, "event": "health", "readings": 7}\n'
        '{"v": 1, "t": 3, "event": "job_start", "run_id": [], "node": 7, "command": 7, "versions": 7}\n',
    ],
)  # fmt: skip
@pytest.mark.parametrize("words", [(), ("--with-texts",)], ids=["parts", "texts"])
def test_a_journal_that_anyone_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rest: str, words: tuple[str, ...]
) -> None:
    file = tmp_path / "incident.zip"
    assert ends(capsys, write(tmp_path / "logs", incident(), rest), "-o", file, *words)[0] == 0
    assert io.StringIO(parts(file)["incident.md"]).readline().startswith("# Incident")
