"""A rank raises, and its process does not end: it is ended, its exception is the fault, and the job is restarted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.training import Plan

SCRIPT = """
import atexit, os, sys, threading, time

class Silent(RuntimeError):
    def __str__(self):
        time.sleep(1000)

first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
mode = {mode!r}
if first and os.environ["RANK"] == "1":
    if mode == "exit function":
        atexit.register(time.sleep, 1000)
    if mode in ("thread", "exit code"):
        threading.Thread(target=time.sleep, args=(1000,)).start()
    if mode == "hook":
        sys.excepthook = lambda *_: time.sleep(1000)
    if mode == "upload":
        def upload():
            for _ in range(30):
                time.sleep(0.1)
                sum(range(2_000_000))
            print("uploaded", flush=True)
        threading.Thread(target=upload).start()
    if mode == "exit code":
        sys.exit(3)
    raise (Silent if mode == "text" else RuntimeError)("boom at step 1")
if first:
    time.sleep(1000)
print("finished", flush=True)
"""
RAISED = "raised RuntimeError: boom at step 1"
LIMIT = "--workers-stop-timeout=1"


@pytest.mark.parametrize("start", ["auto", "off"])
@pytest.mark.parametrize(
    ("mode", "what", "code"),
    [
        ("exit function", RAISED, 1),
        ("thread", RAISED, 1),
        ("hook", RAISED, 1),
        ("text", "raised Silent: (its text could not be made", 1),
        ("exit code", "exited with code 3", 3),
    ],
)
def test_it_is_ended_and_named(
    start_job: StartJob, tmp_path: Path, mode: str, what: str, code: int, start: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(mode=mode))
    job = start_job(Plan(), 2, "--max-restarts=1", LIMIT, f"--ft-warm-start={start}", script=script)
    assert job.finish() == 0, job.tail()
    assert job.output.count("finished") == 2, job.tail()
    (fault,) = job.journal("fault")
    assert (fault["rank"], fault["exit_code"]) == (1, code) and fault["what"].startswith(what), job.tail()
    (ended,) = job.journal("never_ends")
    assert ended["rank"] == 1 and "--workers-stop-timeout" in ended["why"], job.tail()


def test_the_exit_code_is_that_of_the_exception(start_job: StartJob, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(mode="thread"))
    assert start_job(Plan(), 2, LIMIT, script=script).finish() == 1


@pytest.mark.parametrize(("linger", "is_done"), [(30, True), (1, False)])
def test_a_thread_that_works_is_let_finish(start_job: StartJob, tmp_path: Path, linger: int, is_done: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(mode="upload"))
    job = start_job(Plan(), 2, "--max-restarts=1", LIMIT, f"--ft-linger={linger}", script=script)
    assert job.finish() == 0, job.tail()
    assert ("uploaded" in job.output) == is_done, job.tail()
    assert [line["why"].endswith("(--ft-linger)") for line in job.journal("never_ends")] == [True] * (not is_done)
    assert [fault["what"] for fault in job.journal("fault")] == [RAISED], job.tail()
