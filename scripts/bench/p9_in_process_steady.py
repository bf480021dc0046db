"""P9: what a wrapped function costs while nothing happens: requests to the store, threads, processes, memory, time.

Requests are counted where they arrive: the kernel counts, for each connection of the server, the segments with data
that came in. A client sends each request at once (TCP_NODELAY) and waits for most answers, so a request is a segment.
No process is slowed down by that, whoever hosts the store. Under the launcher, the agent's own requests count too.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import time
from pathlib import Path

from . import floors
from .job import Job, JobFailed, cpu_s, memory_mib, tagged
from .launchers import Launcher
from .p8_in_process import peers
from .p13_straggler import took_ns
from .scenario import Outcome, Scenario

STEPS = 2000
SETTLE_S = 3.0
STEADY_S = 20.0
ENTRY_S = 240.0


def once(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """One job."""
    with Job(launcher, ranks, ["steady", str(STEPS)]) as job:
        pids = [stamp.pid for stamp in job.wait_ranks("before", deadline_s=ENTRY_S)]
        threads, before = {pid: tasks(pid) for pid in pids}, set(tagged(job.tag))
        job.tell("go")
        entered = job.wait_ranks("enter", deadline_s=ENTRY_S)
        called = job.stamps("call")
        outcome.add("entry_s", (max(stamp.t for stamp in entered) - max(stamp.t for stamp in called)) / 1e9)
        job.tell("step")
        job.wait_ranks("timed", count=1)
        time_of_steps(job, outcome)
        time.sleep(SETTLE_S)
        extra = sorted(set(tagged(job.tag)) - before)
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
        outcome.add_percentiles(f"{name}_step", took_ns(job, f"{name}_step"))
        outcome.add(f"{name}_step_cpu_us", took_ns(job, f"{name}_cpu")[0] / STEPS / 1000)
    outcome.add_percentiles("ping", took_ns(job, "ping"))


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
        return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        raise JobFailed(f"process {pid} ended") from None


SCENARIO = Scenario(
    keys=("P9",),
    title="in process: a wrapped function while nothing happens",
    marks="at most 0.05 requests per second and rank at 64, 2 threads, no process under the launcher; entry 0.1 s",
    sizes=(8, 64),
    once=once,
    floor=floors.nothing,
    peers=peers,
)
