"""P1 and P1b: launch to the last rank's process group ready; the last rank's death to the launcher's end."""

from __future__ import annotations

from . import floors
from .job import Job, JobFailed, deaths
from .launchers import Launcher
from .scenario import Outcome, Scenario


def once(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """One job that starts, makes its group and ends well."""
    with Job(launcher, ranks, ["launch"]) as job:
        ready = job.wait_ranks("ready")
        dead = deaths([job.process.pid, *(s.pid for s in ready)], lambda: job.tell("go"))
        if job.process.wait(10) != 0:
            raise JobFailed(f"exit code {job.process.returncode}; {job.last_output()}")
        outcome.add("launch_s", (max(s.t for s in ready) - job.started_ns) / 1e9)
        end = dead.pop(job.process.pid)
        outcome.add("exit_s", (end - max(dead.values())) / 1e9)


SCENARIO = Scenario(
    keys=("P1", "P1b"),
    title="launch to the last group ready; last rank's death to launcher's end",
    marks="1.35 x import torch + 0.3 s; exit below 0.1 s",
    sizes=(1, 2, 8),
    once=once,
    floor=floors.launch,
)
