"""P10: a rank ignores SIGTERM while the job restarts; how much longer than the configured stop time that takes."""

from __future__ import annotations

from . import floors
from .job import Job, deaths
from .launchers import TORCHRUN, TORCHRUN_OWN_STORE, Launcher
from .scenario import Outcome, Scenario

STOP_S = 2.0


def once(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """Rank 0 kills itself, the others ignore SIGTERM: to the death of the last of them, and to the group ready."""
    flags = [f"{launcher.stop_flag}={STOP_S:g}"]
    with Job(launcher, ranks, ["stubborn", "1"], flags, max_restarts=1) as job:
        pids = [s.pid for s in job.wait_ranks("ready")]
        dead = deaths(pids, lambda: job.tell("go.0"), deadline_s=90)
        (crash,) = job.wait_ranks("crash", count=1)
        outcome.add("stop_over_s", (max(dead.values()) - crash.t) / 1e9 - STOP_S)
        ready = job.wait_ranks("ready", 1)
        outcome.add("ready_over_s", (max(s.t for s in ready) - crash.t) / 1e9 - STOP_S)


SCENARIO = Scenario(
    keys=("P10",),
    title=f"restart with a rank that ignores SIGTERM, minus the configured {STOP_S:g} s",
    marks="below 0.2 s",
    sizes=(2,),
    once=once,
    floor=floors.nothing,
    peers=lambda launcher: [TORCHRUN_OWN_STORE if launcher is TORCHRUN else launcher],
)
