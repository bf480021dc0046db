"""`ft_launcher replay`: what it reads and prints, its exit codes, and what it says of bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ft_launcher.conftest import main
from tests.ft_launcher.tools.replay.decisions import Job, Line, the

pytestmark = pytest.mark.usefixtures("folder")


def write(file: Path, lines: list[Line], rest: str = "") -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(found) + "\n" for found in lines) + rest)
    return file


def ends(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    """Runs a replay; returns exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        main(["replay", *map(str, words)])
    out, err = capsys.readouterr()
    assert "Traceback" not in err and isinstance(ended.value.code, int)
    return ended.value.code, out, err


def test_all_as_then(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "logs" / "journal.a.jsonl", Job().fails().fails().lines)
    expected = "decided as then: 2 x decision, 2 x fault, 2 x history of restarts\n"
    assert ends(capsys, tmp_path / "logs") == (0, expected, "")


def test_a_difference_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = Job().fails().lines
    the(lines, "decision")["action"] = "give up"
    file = write(tmp_path / "journal.a.jsonl", lines)
    code, out, _ = ends(capsys, file)
    assert code == 1
    assert out.splitlines()[:2] == [
        f"{file}:5: cycle 0: event decision: the decision comes out otherwise",
        '  action: then "give up", now "restart"',
    ]


def test_a_file_in_pieces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = Job().fails().fails().lines
    the(lines, "decision", 1)["action"] = "give up"
    piece = {"v": 1, "t": 2, "event": "journal_piece", "run_id": "run", "node": "a", "started": 0.5, "piece": 2}
    write(tmp_path / "journal.a.1.jsonl", lines[:7])
    last = write(tmp_path / "journal.a.jsonl", [piece | {"lost_bytes": 0}, *lines[7:]])
    code, out, _ = ends(capsys, tmp_path)
    assert code == 1 and out.startswith(f"{last}:4: cycle 1: ")
    assert "2 x fault, 2 x history" in out


def test_half_a_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "journal.a.jsonl", Job().fails().lines[:-2], '{"v": 1, "t": 3, "ev')
    code, out, err = ends(capsys, tmp_path)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "nothing was decided again",
        "not decided again: 1 x fault: the decision after it is missing",
        "cut off at the end of a file: 1 x line",
    ]


def test_one_job_of_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "journal.a.jsonl", Job().fails().lines)
    assert ends(capsys, tmp_path, "--run-id", "other") == (0, "nothing was decided again\n", "")


def test_no_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([tmp_path], [tmp_path / "gone"], []):
        code, out, err = ends(capsys, *words)
        assert (code, out) == (2, "") and err.startswith("ft_launcher: ")
