"""`ft_launcher report`: what it reads, prints and writes, and what it says of bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.ft_launcher.conftest import main
from tests.ft_launcher.tools.report.lines import NODE_A, NODE_B, as_bytes, line, start
from tests.program import run

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A folder with the journals of two nodes, one of them in two pieces."""
    logs = tmp_path / "logs"
    (logs / "of_b").mkdir(parents=True)
    (logs / "journal.a.1.jsonl").write_bytes(as_bytes(NODE_A[:5]))
    (logs / "journal.a.jsonl").write_bytes(as_bytes(NODE_A[5:]))
    (logs / "of_b" / "journal.b.jsonl").write_bytes(as_bytes(NODE_B))
    return logs


def ends(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    """Runs a report; returns exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, words)])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def test_a_folder(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ends(capsys, logs)
    assert (code, err) == (0, "")
    assert out.startswith("Ran 2 min 11 s on 2 nodes in 2 attempts; 19.1% ")


def test_files(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ends(capsys, logs / "journal.a.1.jsonl", logs / "journal.a.jsonl", logs / "of_b")
    assert code == 0 and "2 faults cost 53.2 s" in out


def test_what_it_writes(logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, facts, trace = tmp_path / "x.html", tmp_path / "x.json", tmp_path / "trace.json"
    code, _, _ = ends(capsys, logs, "-o", page, "-o", facts, "--trace", trace)
    assert code == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    read = json.loads(facts.read_text())
    assert (read["version"], read["wall_s"], len(read["faults"])) == (1, 131, 2)
    assert [advice["topic"] for advice in read["advice"]] == ["checkpoint interval", "largest loss"]
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_picture(logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra observe")
    assert ends(capsys, logs, "-o", tmp_path / "x.png")[::2] == (0, "")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib(
    logs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "ft_launcher.tools.report.picture", raising=False)
    code, out, err = ends(capsys, logs, "-o", tmp_path / "x.png")
    assert (code, out) == (2, "")
    assert "a picture needs matplotlib" in err and err.endswith("pip install 'ft-launcher[observe]'\n")
    assert not (tmp_path / "x.png").exists()


def test_half_a_last_line_is_usual(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (logs / "of_b" / "journal.b.jsonl").open("ab") as journal:
        journal.write(b'{"v": 1, "t": 2')
    assert ends(capsys, logs)[::2] == (0, "")


def test_warnings(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [start(300, "c", "another"), line("job_end", 301) | {"v": 9}]
    (logs / "journal.c.jsonl").write_bytes(as_bytes(lines) + b"[]\n")
    (logs / "journal.d.jsonl").write_bytes(b"")
    code, _, err = ends(capsys, logs)
    assert code == 0
    assert "written by a later release" in err and "job_end (version 9, known: 1)" in err
    assert "1 line is no event and is left out" in err
    assert "journal.d.jsonl has no event" in err
    assert "2 run ids (another, job) are taken as attempts of one job" in err


def test_one_of_several_jobs(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (logs / "journal.c.jsonl").write_bytes(as_bytes([start(300, "c", "another")]))
    code, out, err = ends(capsys, logs, "--run-id", "job")
    assert (code, err) == (0, "") and "on 2 nodes" in out


def test_control_characters_of_ranks_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = tmp_path / "journal.x.jsonl"
    bad = line("fault", 5, cycle=0, rank=0, kind="exit", what="\x1b[2J\ud800\nx")
    journal.write_bytes(as_bytes([start(1, "\x1bnode"), bad]))
    code, out, _ = ends(capsys, journal, "-o", tmp_path / "x.html")
    assert code == 0
    assert "\x1b" not in out and "\\x1b[2J" in out


BAD = {
    "no such file": (["{folder}/none"], "{folder}/none: No such file or directory"),
    "no journal in the folder": (["{folder}/empty"], "no journal.*.jsonl"),
    "empty": (["{folder}/journal.e.jsonl"], "no events"),
    "not a journal": (["{folder}/train.py"], "this is no journal"),
    "JSON of another kind": (["{folder}/other.json"], "this is no journal"),
    "a device": (["/dev/zero"], "/dev/zero cannot be read"),
    "no such job": (["{folder}/journal.g.jsonl", "--run-id", "x"], "no event of a job 'x'"),
    "nothing given": ([], "Missing argument"),
    "unknown option": (["--output", "x"], "No such option"),
    "no such format": (["{folder}/journal.g.jsonl", "-o", "x.pdf"], "must end with .html, .json or .png"),
    "cannot be written": (["{folder}/journal.g.jsonl", "-o", "{folder}/no/x.json"], "cannot be written"),
}


@pytest.mark.parametrize("row", BAD)
def test_bad_input_is_one_line_and_exit_code_2(row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "journal.e.jsonl").write_bytes(b"")
    (tmp_path / "journal.g.jsonl").write_bytes(as_bytes(NODE_A))
    (tmp_path / "other.json").write_text('{"a": 1}\n[1]\n')
    words, says = BAD[row]
    code, out, err = ends(capsys, *(word.format(folder=tmp_path) for word in words))
    assert (code, out) == (2, "")
    (message,) = err.splitlines()
    assert message.startswith("ft_launcher: ")
    assert says.format(folder=tmp_path) in message


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ends(capsys, "--help")
    assert code == 0 and "JOURNAL" in out and "--trace" in out


def test_a_full_disk_behind_standard_output(logs: Path) -> None:
    command = f"{sys.executable} -m ft_launcher report {logs} > /dev/full"
    ended = run(["sh", "-c", command], limit_s=60)
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        "ft_launcher: standard output cannot be written: No space left on device. Give another place"
    ]


def test_a_reader_that_has_enough(logs: Path) -> None:
    # The shell's exit code is that of the report: it is written where the pipe does not go.
    command = f"{{ {sys.executable} -m ft_launcher report {logs}; echo $? > code; }} | true"
    ended = run(["sh", "-c", command], folder=logs, limit_s=60)
    assert (ended.stderr, (logs / "code").read_text()) == ("", "0\n")
