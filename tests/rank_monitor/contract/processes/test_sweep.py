"""Processes are found by their environment, and nothing of a job is left."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rank_monitor.contract import env
from rank_monitor.contract.processes.sweep import environ_of, kill, processes_of, sweep
from tests.patience import until
from tests.program import python

NAP = "import time; time.sleep(600)"
BREEDER = """
import subprocess, sys, time
while True:
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
    time.sleep(0.02)
"""


@pytest.fixture
def tag() -> Iterator[str]:
    fresh = secrets.token_hex(8)
    yield fresh
    assert sweep(fresh) == []


def start(tag: str, script: str = NAP, **more: str) -> subprocess.Popen[bytes]:
    environment = dict(os.environ, **{env.JOB_TAG: tag}, **more)
    process = subprocess.Popen([sys.executable, "-S", "-c", script], env=environment, start_new_session=True)
    until(lambda: environ_of(process.pid), "for a moment of its exec a process has no environment")
    return process


def test_found_by_tag_and_by_what_else_is_asked(tag: str) -> None:
    first, second = start(tag, LOCAL_RANK="0"), start(tag, LOCAL_RANK="1", EMPTY="")
    other = start(tag + "x")
    assert sorted(processes_of(tag)) == sorted([first.pid, second.pid])
    assert processes_of(tag, {"LOCAL_RANK": "1"}) == [second.pid]
    assert processes_of(tag, {"EMPTY": ""}) == [second.pid]
    assert processes_of(tag, {"LOCAL_RANK": "2"}) == []
    assert environ_of(second.pid)["LOCAL_RANK"] == "1"
    for process in (first, second, other):
        process.kill()
        process.wait()


def test_zombies_strangers_and_the_dead_are_not_found(tag: str) -> None:
    process = start(tag)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert processes_of(tag) == []
    assert environ_of(process.pid) == {}
    process.wait()
    assert environ_of(process.pid) == {}
    assert not kill(process.pid, tag)


def test_a_process_that_is_not_of_the_job_is_not_hit(tag: str) -> None:
    process = start(tag)
    assert not kill(process.pid, tag + "x")
    assert process.poll() is None
    assert kill(process.pid, tag, signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM


def test_a_sweep_leaves_nothing(tag: str) -> None:
    """Also not what is stopped, what is in another session, and what is born meanwhile."""
    breeder, stopped = start(tag, BREEDER), start(tag)
    os.kill(stopped.pid, signal.SIGSTOP)
    until(lambda: len(processes_of(tag)) > 4, "no children")
    assert sweep(tag) == []
    assert processes_of(tag) == []
    assert {breeder.wait(), stopped.wait()} == {-signal.SIGKILL}


def test_the_one_that_sweeps_stays(tag: str) -> None:
    script = f"from rank_monitor.contract.processes.sweep import *; print(processes_of({tag!r}), sweep({tag!r}))"
    assert python(script, environ=os.environ | {env.JOB_TAG: tag}).stdout == "[] []\n"
