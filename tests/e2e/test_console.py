"""What a user finds on the console and on disk after a job, beside torchrun where that says what to expect."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import program
from tests.patience import patient
from tests.program import clean_environment

LIMIT_S = 120

FAILS = """
import os
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    if os.environ["RANK"] == "1":
        raise ValueError("the batch is empty")
    import time
    time.sleep(60)

main()
"""
UNDER_RECORD = """
import json, os, time
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from ft_launcher import LaunchConfig, launch

def fails():
    if os.environ["RANK"] == "1":
        raise ValueError("the batch is empty")
    time.sleep(60)

@record
def main():
    launch(fails, LaunchConfig(nproc_per_node=2, max_restarts=0))()

if __name__ == "__main__":
    try:
        main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        said = json.load(open(failure.error_file))["message"]["extraInfo"]
        print(json.dumps([rank, sorted(error.failures), error.name, failure.timestamp, said["timestamp"]]))
"""
PROGRESS = """
import os, time

def until(name):
    while not os.path.exists(name):
        time.sleep(0.01)

os.write(2, b"\\r 10%\\r 20%")  # as tqdm does
until("bar seen")
os.write(2, b"\\r 30%\\n")
os.write(1, b"password? ")
until("prompt seen")
os.write(1, b"ok\\n")
"""
GARBAGE = """
import os, sys
open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write('{"message": {"mess')
os._exit(3)
"""


@dataclass(frozen=True)
class Ran:
    """A program that ended."""

    exit_code: int
    stdout: str
    stderr: str


def run(folder: Path, *words: str, launcher: str = "ft_launcher", **variables: str) -> Ran:
    """Runs a launcher in `folder`."""
    return python(folder, "-m", launcher, *words, variables=variables)


def python(folder: Path, *words: str, variables: Mapping[str, str]) -> Ran:
    environ = clean_environment(**variables)
    done = program.run([sys.executable, *words], folder=folder, environ=environ, limit_s=LIMIT_S)
    return Ran(done.returncode, done.stdout, done.stderr)


def test_without_a_log_folder_records_go_to_the_temporary_folder(tmp_path: Path) -> None:
    """Also where the current folder cannot be written, as nobody can write /proc; a quiet run leaves nothing."""
    script, nowhere = tmp_path / "script.py", Path("/proc")
    script.write_text("import sys; print('printed'); sys.exit(int(sys.argv[1]))")
    own = tmp_path / f"ft_launcher-{os.geteuid()}"
    places = {"XDG_STATE_HOME": "", "TMPDIR": str(tmp_path)}
    quiet = run(nowhere, str(script), "0", **places)
    assert (quiet.exit_code, quiet.stdout) == (0, "printed\n")
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]
    redirected = run(nowhere, "--redirects", "3", str(script), "0", **places)
    assert redirected.exit_code == 0 and str(own) not in redirected.stderr
    assert [log.read_text() for log in own.glob("*/cycle_0/0/stdout.log")] == ["printed\n"]
    failed = run(nowhere, str(script), "3", **places)
    assert failed.exit_code == 3
    record = re.search(r"record: (.*)", failed.stderr)
    assert record is not None and Path(record[1]).parent == own
    assert list(Path(record[1]).glob("journal.*.jsonl"))


def reply_in(file: Path) -> dict[str, Any]:
    """The message of torch's reply file."""
    message: dict[str, Any] = json.loads(file.read_text())["message"]
    return message


def test_a_failure_is_reported_once_and_replied_as_torchrun_does(tmp_path: Path) -> None:
    """The block, and one line that names the script and an error file that is still there; no rank that was ended."""
    (tmp_path / "fails.py").write_text(FAILS)
    replies, ran = {}, {}
    for launcher in ("torch.distributed.run", "ft_launcher"):
        file = tmp_path / f"{launcher}.json"
        variables = {"TORCHELASTIC_ERROR_FILE": str(file), "LOGLEVEL": "INFO"}
        ran[launcher] = run(tmp_path, "--nproc-per-node=2", "fails.py", launcher=launcher, **variables)
        replies[launcher] = reply_in(file)
    ours, theirs = ran["ft_launcher"], ran["torch.distributed.run"]
    assert ours.exit_code == theirs.exit_code == 1
    for said in (ours.stderr, theirs.stderr):
        assert re.search(r"entrypoint +: fails.py\n", said) and "\nfails.py FAILED\n" in said
        assert "ValueError: the batch is empty" in said
    assert "rank 1 on" in ours.stderr and "raised ValueError: the batch is empty" in ours.stderr
    assert "exitcode: 1 " in ours.stderr and ours.stderr.count("Root Cause") == 1
    assert ": -15" not in ours.stderr and "failed (exitcode" not in ours.stderr and "===" not in ours.stderr
    error_file = re.search(r"error_file: (.*)", ours.stderr)
    assert error_file is not None and reply_in(Path(error_file[1]))["message"] == "ValueError: the batch is empty"
    for reply in replies.values():
        assert int(reply["extraInfo"].pop("timestamp"))
    assert replies["ft_launcher"] == replies["torch.distributed.run"]


def test_record_around_launch_replies_what_the_rank_said(tmp_path: Path) -> None:
    """The error file outlives `launch`, and the failure has its time."""
    (tmp_path / "program.py").write_text(UNDER_RECORD)
    variables = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "reply.json")}
    ended = python(tmp_path, "program.py", variables=variables)
    rank, failed, name, at, said_at = json.loads(ended.stdout)
    assert (rank, failed, name) == (1, [1], "fails")
    assert at == int(said_at)
    reply = reply_in(tmp_path / "reply.json")
    assert (reply["message"], reply["errorCode"]) == ("ValueError: the batch is empty", 1)
    assert reply["extraInfo"]["timestamp"] == said_at


def test_progress_is_shown_while_it_is_made(tmp_path: Path) -> None:
    """A piece that ends in a carriage return, and a line without an end; the log files have the bytes as written."""
    (tmp_path / "progress.py").write_text(PROGRESS)
    words = [sys.executable, "-m", "ft_launcher", "--tee", "3", "--log-dir", "logs", "progress.py"]
    pipe, environ = subprocess.PIPE, clean_environment()
    with subprocess.Popen(words, cwd=tmp_path, env=environ, stdout=pipe, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        shown = b""
        try:
            for awaited, name in ((b"[default0]: 20%", "bar seen"), (b"password? ", "prompt seen")):
                while awaited not in shown:
                    assert select.select([process.stdout], [], [], patient(LIMIT_S))[0], shown
                    more = os.read(process.stdout.fileno(), 1 << 16)
                    assert more, shown
                    shown += more
                (tmp_path / name).touch()
            shown += process.stdout.read()
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0
    bar = b"[default0]: 10%\r[default0]: 20%\r[default0]: 30%\n"
    assert shown == bar + b"[default0]:password? ok\n"
    (folder,) = tmp_path.glob("logs/*/cycle_0/0")
    assert (folder / "stderr.log").read_bytes() == b"\r 10%\r 20%\r 30%\n"
    assert (folder / "stdout.log").read_bytes() == b"password? ok\n"


def test_half_an_error_file_does_not_end_the_launcher(tmp_path: Path) -> None:
    """torch raises at it. And a traceback that went to a file comes with the summary."""
    script = "import os, sys\nif len(sys.argv) > 1: raise KeyError('lost')\n"
    (tmp_path / "script.py").write_text(script + GARBAGE)
    broken = run(tmp_path, "script.py", TORCHELASTIC_ERROR_FILE=str(tmp_path / "no folder" / "reply.json"))
    assert broken.exit_code == 3 and "error_file: <N/A>" in broken.stderr
    redirected = run(
        tmp_path,
        *("--redirects=3", "script.py", "raise"),
        TORCHELASTIC_ERROR_FILE=str(tmp_path / "no folder" / "reply.json"),
    )
    assert redirected.exit_code == 1 and "no folder" in redirected.stderr
    assert "\n    Traceback (most recent call last):\n" in redirected.stderr
