"""Jobs of one node: launch and end (P1, P1b), idle (P1c, P7), a crash (P2, P10) and a hang (P5)."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from .job import Job, cpu_s, deaths, descendants, memory_mib
from .launchers import Launcher
from .scenario import Outcome

CRASHES = 3
"""Per job: enough to tell the first restart from later ones, few enough for launchers to take turns."""
STOP_S = 2.0
LIMITS_S = {"heartbeat": 3.0, "section": 1.5}
SETTLE_S = 2.0
LEARNS_S = 120.0
"""The report takes up to 5 s, and the trial 3 s of CPU time at the lowest priority."""
IDLE_S, BEATING_S = 30.0, 20.0


def launch(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """P1, P1b: a job that starts, makes its group and ends well."""
    with Job(launcher, ranks, ["launch"]) as job:
        ready = job.wait_ranks("ready")
        dead = deaths([job.process.pid, *(s.pid for s in ready)], lambda: job.tell("go"))
        job.end_well(10)
        outcome.add("launch_s", (max(s.t for s in ready) - job.started_ns) / 1e9)
        end = dead.pop(job.process.pid)
        outcome.add("exit_s", (end - max(dead.values())) / 1e9)


def idle(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """P1c: ranks that only wait: memory of the ranks and of everything, and CPU of the launcher's own process."""
    with Job(launcher, ranks, ["launch"]) as job:
        rank_pids = [s.pid for s in job.wait_ranks("ready")]
        time.sleep(SETTLE_S)
        before_s = cpu_s(job.process.pid)
        time.sleep(IDLE_S)
        outcome.add("launcher_cpu_percent", (cpu_s(job.process.pid) - before_s) / IDLE_S * 100)
        memory = {pid: memory_mib(pid) for pid in {job.process.pid, *descendants(job.process.pid)}}
        outcome.add("all_pss_MiB", sum(pss for pss, _ in memory.values()))
        outcome.add("rank_private_MiB", sum(memory[pid][1] for pid in rank_pids) / ranks)


def sidecars(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """P7: memory and CPU of the sidecars while each rank beats ten times a second, and of all that is not a rank."""
    with Job(launcher, ranks, ["beat"]) as job:
        rank_pids = {s.pid for s in job.wait_ranks("ready")}
        time.sleep(SETTLE_S)
        of_ranks = {below for pid in rank_pids for below in descendants(pid)} | rank_pids
        others = {job.process.pid, *descendants(job.process.pid)} - of_ranks
        before = {pid: cpu_s(pid) for pid in others}
        time.sleep(BEATING_S)
        cpu = {pid: (cpu_s(pid) - before[pid]) * 60 / BEATING_S for pid in others}
        memory = {pid: memory_mib(pid) for pid in others}
        monitors = job.monitors()
        for name, pids, divisor in (("monitor", monitors, ranks), ("all", others, 1)):
            if pids:
                outcome.add(f"{name}_pss_MiB", sum(memory[pid][0] for pid in pids) / divisor)
                outcome.add(f"{name}_private_MiB", sum(memory[pid][1] for pid in pids) / divisor)
                outcome.add(f"{name}_cpu_s_a_minute", sum(cpu[pid] for pid in pids) / divisor)


def crashes(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """P2: one job with some crashes; a job that does not come back has not recovered from those left either."""
    with Job(launcher, ranks, ["crash", str(CRASHES)], max_restarts=CRASHES) as job:
        crash_each_cycle(job, CRASHES, outcome)
        job.end_well(30)


def first_steps(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """P2b: as P2, to the first step of a DDP model, once the launcher has learned what its ranks import."""
    with tempfile.TemporaryDirectory(prefix="ftb") as journal:
        flags = []
        if launcher.name == "ours":
            flags = [f"--ft-journal-dir={journal}", "--ft-preload=auto"]
        with Job(launcher, ranks, ["first_step", str(CRASHES)], flags, max_restarts=CRASHES) as job:
            job.wait_ranks("stepped")
            deadline = time.monotonic() + LEARNS_S
            while flags and not _has_learned(Path(journal)) and time.monotonic() < deadline:
                time.sleep(0.1)
            crash_each_cycle(job, CRASHES, outcome, "stepped", "step_s")
            job.end_well(30)


def _has_learned(journal: Path) -> bool:
    return any('"modules_preloaded"' in file.read_text() for file in journal.rglob("*.jsonl"))


def crash_each_cycle(job: Job, count: int, outcome: Outcome, until: str = "ready", metric: str = "recover_s") -> None:
    """From the SIGKILL of a rank to the stamp `until` of all, `count` times; then the job may end."""
    job.wait_ranks(until)
    for cycle in range(count):
        job.tell(f"go.{cycle}")
        (crash,) = job.wait_ranks("crash", cycle, count=1)
        ready = job.wait_ranks(until, cycle + 1)
        outcome.add(metric, (max(s.t for s in ready) - crash.t) / 1e9)
    job.tell(f"go.{count}")


def stubborn(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """P10: rank 0 kills itself, the others ignore SIGTERM: what death and group ready take beyond the stop time."""
    flags = [f"{launcher.stop_flag}={STOP_S:g}"]
    with Job(launcher, ranks, ["stubborn", "1"], flags, max_restarts=1) as job:
        pids = [s.pid for s in job.wait_ranks("ready")]
        dead = deaths(pids, lambda: job.tell("go.0"), deadline_s=90)
        (crash,) = job.wait_ranks("crash", count=1)
        outcome.add("stop_over_s", (max(dead.values()) - crash.t) / 1e9 - STOP_S)
        ready = job.wait_ranks("ready", 1)
        outcome.add("ready_over_s", (max(s.t for s in ready) - crash.t) / 1e9 - STOP_S)


def hang(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """P5: from a rank's last sign of life to its death, minus the limit.

    One job with the signal that is the default, and one with a signal whose arrival the rank can stamp.
    """
    for termination in ("SIGKILL", "SIGUSR2"):
        flags = [
            f"--ft-rank-heartbeat-timeout={LIMITS_S['heartbeat']}",
            f"--ft-rank-section-timeouts=work:{LIMITS_S['section']}",
            f"--ft-rank-termination-signal={termination}",
        ]
        arguments = ["hang", *LIMITS_S, str(launcher.check_interval_s)]
        with Job(launcher, ranks, arguments, flags, max_restarts=1) as job:
            for cycle, (kind, limit_s) in enumerate(LIMITS_S.items()):
                (ready,) = job.wait_ranks("ready", cycle)
                (dead,) = deaths([ready.pid]).values()
                (life,) = job.wait_ranks("life", cycle)
                if termination == "SIGKILL":
                    outcome.add(f"{kind}_dead_ms", (dead - life.t) / 1e6 - limit_s * 1000)
                else:
                    (seen,) = job.wait_ranks("signalled", cycle)
                    outcome.add(f"{kind}_signal_ms", (seen.t - life.t) / 1e6 - limit_s * 1000)
