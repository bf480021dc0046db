"""P1c: a job whose ranks only wait: memory of the ranks and of everything, and CPU of the launcher's own process."""

from __future__ import annotations

import time

from . import floors
from .job import Job, cpu_s, descendants, memory_mib
from .launchers import OURS, OURS_EXEC, Launcher
from .scenario import Outcome, Scenario

WINDOW_S = 30.0


def once(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """One job that has made its group, watched for the window."""
    with Job(launcher, ranks, ["launch"]) as job:
        rank_pids = [s.pid for s in job.wait_ranks("ready")]
        time.sleep(2.0)
        before_s = cpu_s(job.process.pid)
        time.sleep(WINDOW_S)
        outcome.add("launcher_cpu_percent", (cpu_s(job.process.pid) - before_s) / WINDOW_S * 100)
        memory = {pid: memory_mib(pid) for pid in {job.process.pid, *descendants(job.process.pid)}}
        outcome.add("all_pss_MiB", sum(pss for pss, _ in memory.values()))
        outcome.add("rank_private_MiB", sum(memory[pid][1] for pid in rank_pids) / ranks)


SCENARIO = Scenario(
    keys=("P1c",),
    title="idle ranks: memory of all, private memory of a rank, CPU of the launcher",
    marks="half of exec's memory at 8 ranks, private not above exec's; CPU below 0.2 % of a core",
    sizes=(8,),
    once=once,
    floor=floors.idle,
    peers=lambda launcher: [OURS, OURS_EXEC] if launcher is OURS else [launcher],
)
