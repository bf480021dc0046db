"""Which signal the ranks get for one that the launcher got: what torchrun passes on, and what we translate."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults.conftest import StartJob
from tests.faults.invariants import nothing_left
from tests.faults.job import Job
from tests.faults.training import Plan
from tests.ft_launcher.conftest import needs

NAMED = "--signals-to-handle=SIGTERM,SIGUSR1"
OTHER = "--ft-preemption-signal=SIGUSR2"
ALL = "SIGTERM SIGQUIT SIGUSR1 SIGUSR2"
SCRIPT = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]

def end(number, frame):
    (folder / f"got-{{rank}}").write_text(signal.Signals(number).name)
    sys.exit(0)

for name in {handled!r}.split():
    signal.signal(getattr(signal, name), end)
(folder / f"runs-{{rank}}").touch()
time.sleep(3600)
"""


def start(start_job: StartJob, folder: Path, handled: str, *flags: str) -> Job:
    """A job of two ranks with these handlers, which are in place."""
    needs(*flags)
    script = folder / "script.py"
    script.write_text(SCRIPT.format(handled=handled))
    job = start_job(Plan(), 2, *flags, script=script)
    job.until(lambda: len(list(folder.glob("runs-?"))) == 2, "the ranks")
    return job


@pytest.mark.parametrize(
    ("flags", "sent", "got"),
    [
        ((NAMED, OTHER), signal.SIGUSR1, "SIGUSR1"),
        ((NAMED, OTHER), signal.SIGTERM, "SIGTERM"),
        ((OTHER,), signal.SIGTERM, "SIGUSR2"),
        ((OTHER,), signal.SIGQUIT, "SIGQUIT"),
    ],
    ids=["named USR1", "named TERM", "translated", "neither"],
)
def test_with_handlers(
    start_job: StartJob, tmp_path: Path, flags: tuple[str, ...], sent: signal.Signals, got: str
) -> None:
    job = start(start_job, tmp_path, ALL, *flags)
    job.process.send_signal(sent)
    assert job.finish() == 86, job.tail()
    assert {(tmp_path / f"got-{rank}").read_text() for rank in range(2)} == {got}, job.tail()
    nothing_left(job)


def test_a_named_signal_reaches_ranks_without_a_handler(start_job: StartJob, tmp_path: Path) -> None:
    """As under torchrun, they die of it: their handler for SIGTERM does not run."""
    job = start(start_job, tmp_path, "SIGTERM", NAMED)
    job.process.send_signal(signal.SIGUSR1)
    assert job.finish() == 86, job.tail()
    assert not list(tmp_path.glob("got-?")), job.tail()
    nothing_left(job)
