"""P2: a rank dies by SIGKILL; from then to all ranks' process group ready, several times in one job."""

from __future__ import annotations

from . import floors
from .job import Job, JobFailed
from .launchers import TORCHRUN, TORCHRUN_OWN_STORE, Launcher
from .scenario import Outcome, Scenario

CRASHES = 3
"""Per job: enough to tell the first restart from later ones, few enough for launchers to take turns."""


def once(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """One job with some crashes; a job that does not come back has not recovered from those left either."""
    with Job(launcher, ranks, ["crash", str(CRASHES)], max_restarts=CRASHES) as job:
        job.wait_ranks("ready")
        for cycle in range(CRASHES):
            job.tell(f"go.{cycle}")
            (crash,) = job.wait_ranks("crash", cycle, count=1)
            ready = job.wait_ranks("ready", cycle + 1)
            outcome.add("recover_s", (max(s.t for s in ready) - crash.t) / 1e9)
        job.tell(f"go.{CRASHES}")
        if job.process.wait(30) != 0:
            raise JobFailed(f"exit code {job.process.returncode}; {job.last_output()}")


SCENARIO = Scenario(
    keys=("P2",),
    title="a rank's SIGKILL to all ranks' group ready",
    marks="p50 below 0.1 / 0.15 s at 2 / 8, all recovered",
    sizes=(2, 8),
    once=once,
    floor=floors.crash,
    peers=lambda launcher: [TORCHRUN, TORCHRUN_OWN_STORE] if launcher is TORCHRUN else [launcher],
    trials=CRASHES,
)
