"""P7: memory and CPU of the sidecars while each rank sends ten heartbeats a second, and of all that is not a rank."""

from __future__ import annotations

import time

from . import floors
from .job import Job, cpu_s, descendants, memory_mib
from .launchers import Launcher
from .scenario import Outcome, Scenario

WINDOW_S = 20.0


def once(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """One job that beats for the window."""
    with Job(launcher, ranks, ["beat"]) as job:
        rank_pids = {s.pid for s in job.wait_ranks("ready")}
        time.sleep(2.0)
        of_ranks = {below for pid in rank_pids for below in descendants(pid)} | rank_pids
        others = {job.process.pid, *descendants(job.process.pid)} - of_ranks
        before = {pid: cpu_s(pid) for pid in others}
        time.sleep(WINDOW_S)
        cpu = {pid: (cpu_s(pid) - before[pid]) * 60 / WINDOW_S for pid in others}
        memory = {pid: memory_mib(pid) for pid in others}
        monitors = job.monitors()
        for name, pids, divisor in (("monitor", monitors, ranks), ("all", others, 1)):
            if pids:
                outcome.add(f"{name}_pss_MiB", sum(memory[pid][0] for pid in pids) / divisor)
                outcome.add(f"{name}_private_MiB", sum(memory[pid][1] for pid in pids) / divisor)
                outcome.add(f"{name}_cpu_s_a_minute", sum(cpu[pid] for pid in pids) / divisor)


SCENARIO = Scenario(
    keys=("P7",),
    title="sidecars at 10 heartbeats a second (each), and launcher with sidecars (all)",
    marks="4 MiB PSS, 2 private, 0.05 s CPU a minute each; all below torchrun alone",
    sizes=(8,),
    once=once,
    floor=floors.sidecars,
)
