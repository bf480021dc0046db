"""`ft_launcher top` in a terminal, beside real jobs."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import AbstractContextManager

from tests.faults.conftest import StartJob
from tests.faults.job import Job
from tests.faults.training import Plan, PlannedFault
from tests.program import ROOT, clean_environment, run
from tests.terminal import Terminal, terminal


def top(job: Job, *words: str) -> AbstractContextManager[Terminal]:
    environ = clean_environment(TMPDIR=str(job.tmp))
    return terminal([sys.executable, "-m", "ft_launcher", "top", *words, job_id(job)], environ)


def job_id(job: Job) -> str:
    return str(job.journal("job_start")[0]["job_name"])


def test_ranks_stacks_and_the_end_of_the_job(start_job: StartJob) -> None:
    job = start_job(Plan(hold=4), 2)
    job.until_ranks_train(3)
    with top(job) as screen:
        screen.until("running, cycle 0, step 3")
        shown = screen.until("no fault so far; ")  # the last line of a screen
        assert ".." in shown and "s stacks of all ranks now" in shown and "most silent" in shown
        screen.press("s")
        assert "worker.py:" in screen.until("ranks 0-1:")
        screen.press("\x1b")
        screen.until("no fault so far; ")
        assert not job.journal("fault", "verdict"), "the ranks go on"
        job.go()
        assert job.finish() == 0, job.tail()
        assert screen.finish() == 0
        assert f"{job_id(job)}: the launcher has ended; when it was last asked: " in screen.shown()


def test_a_fault_and_the_key_that_leaves(start_job: StartJob) -> None:
    fault = PlannedFault("sleep", iteration=4, rank=1)
    job = start_job(Plan((fault,), hold=6), 2, "--max-restarts=1", "--ft-rank-section-timeouts=step:2")
    job.until_ranks_train(5, cycle=1)
    with top(job) as screen:
        shown = screen.until("next: restart: ")
        assert "cycle 0: rank 1 hangs: section 'step' open for 2" in shown
        screen.press("q")
        assert screen.finish() == 0
        assert b"\x1b[?1049l" in screen.raw, "the terminal has its other screen back"
    job.go()
    assert job.finish() == 0, job.tail()


def test_a_launcher_that_stands_still(start_job: StartJob) -> None:
    job = start_job(Plan(hold=4), 1)
    job.until_ranks_train()
    with top(job) as screen:
        screen.until("running, cycle 0")
        os.kill(job.process.pid, signal.SIGSTOP)
        try:
            screen.until("the launcher has not answered for ")
            with top(job) as later:
                later.until(f"the launcher with pid {job.process.pid} is stopped, and does not answer")
                assert later.finish() == 5
        finally:
            os.kill(job.process.pid, signal.SIGCONT)
        screen.press("x")
        screen.until("s stacks of all ranks now")
        screen.press("q")
        assert screen.finish() == 0
    job.go()
    assert job.finish() == 0, job.tail()


def test_where_there_is_no_terminal_or_no_such_job(start_job: StartJob) -> None:
    done = run([sys.executable, "-m", "ft_launcher", "top"], folder=ROOT, environ=clean_environment())
    assert done.returncode == 2 and "top needs a terminal" in done.stderr
    with terminal([sys.executable, "-m", "ft_launcher", "top", "no such job"], clean_environment()) as screen:
        assert screen.finish() == 4
        assert "no job of this user with a name or run id that begins with 'no such job'" in screen.shown()


def test_without_rich() -> None:
    code = "import sys; sys.modules['rich'] = None; from ft_launcher.cli import program; program()"
    words = [sys.executable, "-c", code, "top"]
    with terminal(words, clean_environment()) as screen:
        assert screen.finish() == 2
        shown = screen.until("top needs rich, which cannot be imported")
        assert "pip install 'ft-launcher[observe]'" in shown
