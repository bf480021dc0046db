"""Measures jobs whose ranks wrap a function: a call again after an exception (P8), and a call in which nothing happens
(P9).

P8 runs with the least wait that the wrapper allows, and at defaults. There are three functions. The first makes no
process group. The second makes a gloo group in each round, and the time until the last rank's group is ready counts.
The third then takes the first step of a DDP model, and after that the first step of another DDP model: the second of
these steps shows what a step takes where nothing was restarted.

P9 counts requests where they arrive: for each connection of the server the kernel counts the segments with data that
came in. A client sends each request at once (TCP_NODELAY) and waits for most answers, so a request is a segment. No
process is slowed down by the counting, whoever hosts the store. Under the launcher, the agent's own requests count too.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import time

import psutil

from .job import Job, JobFailed, Stamp, cpu_s, memory_mib
from .launchers import Launcher
from .scenario import Outcome

RESTARTS = 6
"""Per job; each of them counts, the first too."""
VARIANTS = (("quick", "none"), ("quick", "gloo"), ("quick", "ddp"), ("default", "none"), ("default", "gloo"))
STEPS = 2000
SETTLE_S = 3.0
STEADY_S = 20.0
ENTRY_S = 240.0


def restarts(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """P8: one job for each variant; one that fails is told, and the others still run."""
    failures = []
    for settings, group in VARIANTS:
        try:
            restarts_of_variant(launcher, ranks, settings, group, outcome)
        except JobFailed as error:
            failures.append(f"{settings}, group {group}: {error}")
    if failures:
        raise JobFailed("; ".join(failures))


def restarts_of_variant(launcher: Launcher, ranks: int, settings: str, group: str, outcome: Outcome) -> None:
    """One job. No rank raises before all are in the function, with their group."""
    prefix = ""
    if settings == "default":
        prefix = "default_"
    if group == "gloo":
        metrics = {"enter": f"{prefix}gloo_restart_ms", "ready": f"{prefix}gloo_ready_ms"}
    elif group == "ddp":
        metrics = {"stepped": f"{prefix}ddp_step_ms"}
    else:
        metrics = {"enter": f"{prefix}restart_ms"}
    last = list(metrics)[-1]
    with Job(launcher, ranks, ["restart", settings, group, str(RESTARTS)]) as job:
        job.wait_ranks(last)
        for iteration in range(RESTARTS):
            job.tell(f"go.{iteration}")
            (raised,) = job.wait_ranks("raise", iteration, count=1)
            job.wait_ranks(last, iteration + 1)
            for event, metric in metrics.items():
                reached = job.stamps(event, iteration + 1)
                outcome.add(metric, (max(stamp.t for stamp in reached) - raised.t) / 1e6)
            if group == "ddp":
                again = job.wait_ranks("stepped again", iteration + 1)
                took = [end.t - begin.t for begin, end in zip(in_order(reached), in_order(again), strict=True)]
                outcome.add(f"{prefix}another_ddp_step_ms", max(took) / 1e6)
        job.end_well(60)


def in_order(stamps: list[Stamp]) -> list[Stamp]:
    """Stamps of all ranks, by rank."""
    return sorted(stamps, key=lambda stamp: stamp.rank)


def steady(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """P9: what the wrapper costs while nothing happens: requests to the store, threads, processes, memory, time."""
    with Job(launcher, ranks, ["steady", str(STEPS)]) as job:
        pids = [stamp.pid for stamp in job.wait_ranks("before", deadline_s=ENTRY_S)]
        threads, before = {pid: tasks(pid) for pid in pids}, set(job.processes())
        job.tell("go")
        entered = job.wait_ranks("enter", deadline_s=ENTRY_S)
        called = job.stamps("call")
        outcome.add("entry_s", (max(stamp.t for stamp in entered) - max(stamp.t for stamp in called)) / 1e9)
        job.tell("step")
        job.wait_ranks("timed", count=1)
        time_of_steps(job, outcome)
        time.sleep(SETTLE_S)
        extra = sorted(set(job.processes()) - before)
        outcome.add("threads_a_rank", statistics.median(tasks(pid) - threads[pid] for pid in pids))
        outcome.add("threads_of_rank_most", max(tasks(pid) - threads[pid] for pid in pids))
        outcome.add("processes_a_rank", len(extra) / ranks)
        outcome.add("process_threads_a_rank", sum(map(tasks, extra)) / ranks)
        for name, values in zip(("pss", "private"), zip(*map(memory_mib, extra), strict=True), strict=False):
            outcome.add(f"process_{name}_MiB_a_rank", sum(values) / ranks)
        in_steady_state(job, [*pids, *extra], ranks, outcome)


def time_of_steps(job: Job, outcome: Outcome) -> None:
    """The same steps of work on rank 0 without the wrapper and in it, and a ping."""
    for name in ("bare", "wrapped"):
        outcome.add_percentiles(f"{name}_step", job.took_ns(f"{name}_step"))
        outcome.add(f"{name}_step_cpu_us", job.took_ns(f"{name}_cpu")[0] / STEPS / 1000)
    outcome.add_percentiles("ping", job.took_ns("ping"))


def in_steady_state(job: Job, pids: list[int], ranks: int, outcome: Outcome) -> None:
    """Requests; and the CPU time of ranks, which look for a file four times a second, and of their processes."""
    port = int((job.folder / "port").read_text())
    began, requests, cpu = time.monotonic(), arrived(port), sum(map(cpu_s, pids))
    time.sleep(STEADY_S)
    took_s = time.monotonic() - began
    outcome.add("requests_per_s_a_rank", (arrived(port) - requests) / took_s / ranks)
    outcome.add("cpu_ms_per_s_a_rank", (sum(map(cpu_s, pids)) - cpu) * 1000 / took_s / ranks)


def arrived(port: int) -> int:
    """Segments with data that arrived at the server of this port, over all connections that it has now."""
    command = ["ss", "-tinH", "state", "established", f"( sport = :{port} )"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = [int(number) for number in re.findall(r"\bdata_segs_in:(\d+)", listed)]
    if not found:
        raise JobFailed(f"nobody is connected to a store at port {port}")
    return sum(found)


def tasks(pid: int) -> int:
    """Threads of a process."""
    try:
        return int(psutil.Process(pid).num_threads())
    except psutil.NoSuchProcess:
        raise JobFailed(f"process {pid} ended") from None
