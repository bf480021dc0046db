"""P8: an exception on one rank to the re-entry on all, in the same processes, several times in one job.

With the least wait that the wrapper allows and at defaults, with a function that makes no process group and with one
that makes a gloo group in each iteration; there, the time to the last rank's group being ready counts as well.
"""

from __future__ import annotations

from . import floors
from .job import Job, JobFailed
from .launchers import NVRX, NVRX_ALONE, OURS, OURS_ALONE, OURS_WRAPPED, Launcher
from .scenario import Outcome, Scenario

RESTARTS = 6
"""Per job; each of them counts, the first too."""
VARIANTS = (("quick", "none"), ("quick", "gloo"), ("default", "none"), ("default", "gloo"))


def once(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """One job for each variant; one that fails is told, and the others still run."""
    failures = []
    for settings, group in VARIANTS:
        try:
            restarts(launcher, ranks, settings, group, outcome)
        except JobFailed as error:
            failures.append(f"{settings}, group {group}: {error}")
    if failures:
        raise JobFailed("; ".join(failures))


def restarts(launcher: Launcher, ranks: int, settings: str, group: str, outcome: Outcome) -> None:
    """One job. No rank raises before all are in the function, with their group."""
    prefix = "default_" if settings == "default" else ""
    last = "ready" if group == "gloo" else "enter"
    with Job(launcher, ranks, ["restart", settings, group, str(RESTARTS)]) as job:
        job.wait_ranks(last)
        for iteration in range(RESTARTS):
            job.tell(f"go.{iteration}")
            (raised,) = job.wait_ranks("raise", iteration, count=1)
            ends = {"ready": f"{prefix}gloo_ready_ms", "enter": f"{prefix}{'gloo_' * (group == 'gloo')}restart_ms"}
            job.wait_ranks(last, iteration + 1)
            for event in dict.fromkeys(("enter", last)):
                reached = job.stamps(event, iteration + 1)
                outcome.add(ends[event], (max(stamp.t for stamp in reached) - raised.t) / 1e6)
        if job.process.wait(60) != 0:
            raise JobFailed(f"exit code {job.process.returncode}; {job.last_output()}")


def peers(launcher: Launcher) -> list[Launcher]:
    """Ours under its launcher and alone, NVIDIA's alone."""
    if launcher is OURS:
        return [OURS_WRAPPED, OURS_ALONE]
    return [NVRX_ALONE] if launcher is NVRX else []


SCENARIO = Scenario(
    keys=("P8",),
    title="in process: an exception on one rank to the function called again on all",
    marks="last_call_wait 0: below 30 / 50 / 80 ms at 2 / 4 / 8, gloo 150 ms at 8; defaults: last_call_wait + 60 ms",
    sizes=(2, 4, 8),
    once=once,
    floor=floors.restart,
    peers=peers,
    trials=RESTARTS,
)
