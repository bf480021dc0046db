"""What the client's calls cost the training (P6), and straggler detection and the rerun machine (P13)."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics

from .job import Job, JobFailed
from .launchers import Launcher
from .scenario import Outcome

CALLS = 2000
BLOCKED_AFTER_S = 15.0
STOPPED = ("heartbeat_stopped", "section_stopped")
ENTRIES = 20000
KINDS = (10, 100, 400)
REPORTS = 10
STEPS = 2000


def calls(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """P6: calls back to back, with pauses, and with the monitor stopped.

    Calls that do not return from a stopped monitor count as infinitely slow.
    """
    with Job(launcher, ranks, ["calls", str(CALLS)], ["--ft-rank-section-timeouts=work:600"]) as job:
        job.wait_ranks("ready")
        job.tell("go")
        job.wait_ranks("timed")
        for name in ("heartbeat", "section", "heartbeat_paced"):
            outcome.add_percentiles(name, job.took_ns_of_all(name))
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
                outcome.add_percentiles(name, job.took_ns_of_all(name))


def straggler(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """P13: the entries of all ranks, and rank 0's reports, which wait for the other ranks'; its CPU time beside."""
    kinds = ",".join(map(str, KINDS))
    with Job(launcher, ranks, ["straggler", str(ENTRIES), kinds, str(REPORTS)]) as job:
        job.wait_ranks("timed", deadline_s=120.0)
        for name in ("section_untimed", "section_timed"):
            outcome.add_percentiles(name, job.took_ns_of_all(name))
        for kind in KINDS:
            first, *reports = (job.took_ns(f"report_{kind}_kinds.{index}")[0] for index in range(REPORTS + 1))
            outcome.add(f"report_{kind}_kinds_ms", statistics.median(reports) / 1e6)
            outcome.add(f"report_{kind}_kinds_first_ms", first / 1e6)
            _, *cpu = job.took_ns(f"report_{kind}_kinds_cpu")
            outcome.add(f"report_{kind}_kinds_cpu_ms", statistics.median(cpu) / 1e6)
            bare = [job.took_ns(f"bare_{kind}_kinds.{index}")[0] for index in range(REPORTS)]
            outcome.add(f"bare_{kind}_kinds_ms", statistics.median(bare) / 1e6)


def rerun(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """P13: steps that do nothing but one check of a loss, with preemption's, and the same with bare all-reduces."""
    with Job(launcher, ranks, ["rerun", str(STEPS)]) as job:
        job.wait_ranks("timed", deadline_s=120.0)
        for name in ("step", "step_and_stop", "bare_step", "bare_step_and_stop"):
            outcome.add_percentiles(name, job.took_ns_of_all(name))
        outcome.add("step_cpu_us", job.took_ns("steps_cpu")[0] / STEPS / 1000)
