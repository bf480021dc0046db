"""P6: what a client call costs the training: back to back, with pauses, and with the monitor stopped."""

from __future__ import annotations

import array
import contextlib
import math
import os
import signal

from . import floors
from .job import Job, JobFailed
from .launchers import Launcher
from .scenario import Outcome, Scenario

CALLS = 2000
BLOCKED_AFTER_S = 15.0
STOPPED = ("heartbeat_stopped", "section_stopped")


def once(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """One job; calls that do not return from a stopped monitor count as infinitely slow."""
    with Job(launcher, ranks, ["calls", str(CALLS)], ["--ft-rank-section-timeouts=work:600"]) as job:
        job.wait_ranks("ready")
        job.tell("go")
        job.wait_ranks("timed")
        for name in ("heartbeat", "section", "heartbeat_paced"):
            outcome.add_percentiles(name, took_ns(job, name))
        monitors = job.monitors()
        for pid in monitors:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        if len(monitors) < ranks:
            raise JobFailed(f"{len(monitors)} monitors found for {ranks} ranks")
        job.tell("stopped")
        try:
            job.wait_ranks("timed_stopped", deadline_s=BLOCKED_AFTER_S)
        except JobFailed:
            if job.process.poll() is not None:
                raise
            for name in STOPPED:
                outcome.add(f"{name}_p50_us", math.inf)
                outcome.add(f"{name}_p99_us", math.inf)
        else:
            for name in STOPPED:
                outcome.add_percentiles(name, took_ns(job, name))


def took_ns(job: Job, name: str) -> array.array[int]:
    """Nanoseconds of each call of all ranks."""
    took = array.array("q")
    for rank in range(job.ranks):
        took.frombytes((job.folder / f"{name}.{rank}.bin").read_bytes())
    return took


SCENARIO = Scenario(
    keys=("P6",),
    title="cost of send_heartbeat and of start_section + end_section",
    marks="4 / 9 us p50, p99 below 30 us, the same with the monitor stopped",
    sizes=(1, 8),
    once=once,
    floor=floors.calls,
    peers=lambda launcher: [launcher] if launcher.client else [],
)
