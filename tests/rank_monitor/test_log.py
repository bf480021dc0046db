"""The monitor's log lines: their form, and that no standard error, however broken, holds the monitor up."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from rank_monitor.contract.processes import spawn
from rank_monitor.log import Log
from tests.patience import patient
from tests.program import run

ROOT = spawn.__file__.rpartition("/rank_monitor/")[0]
SCRIPT = f"""
import sys
sys.path.insert(0, {ROOT!r})
from rank_monitor.log import Log
log = Log("it")
for _ in range(3000):
    log.warning("x" * 100)
"""


def test_the_form_of_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    log = Log("RankMonitorServer:34")
    log.warning("Did not get subsequent heartbeat. Waited 171.92 seconds.")
    log.info("two\nlines \udcff")
    log.level = "WARNING"
    log.info("not said")
    text = capfd.readouterr().err
    # Threads of C++ that other tests have left may say something, too.
    first, second = (line for line in text.splitlines() if "RankMonitorServer" in line)
    times, texts = zip(*(line.split(" ", 1) for line in (first, second)), strict=True)
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d", time) for time in times)
    assert texts == (
        "[WARNING] [RankMonitorServer:34] Did not get subsequent heartbeat. Waited 171.92 seconds.",
        "[INFO] [RankMonitorServer:34] two\\nlines \\udcff",
    )
    assert text.endswith("\n")


def test_a_pipe_that_nobody_reads() -> None:
    """3000 lines fill it; the process ends all the same, and its pipe still blocks for others."""
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert os.get_blocking(process.stderr.fileno())
    assert process.wait(patient(60)) == 0
    assert re.match(rb"\d\d:\d\d:\d\d \[WARNING\] \[it\] xxx", process.stderr.read())
    process.stderr.close()


@pytest.mark.parametrize("end", ["2>&-", "2>/dev/full", "2>/dev/null", "2>/proc/self/oom_score"])
def test_a_standard_error_that_takes_nothing(end: str) -> None:
    command = ["sh", "-c", f'exec "$0" -c "$1" {end}', sys.executable, SCRIPT]
    assert run(command).returncode == 0


def test_a_pipe_whose_reader_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stderr=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait(patient(60)) == 0
