"""Measures state in memory (P17): how long a save blocks and a load takes, in copies of the state, beside other ways to
keep it; and how long it takes from a SIGKILL to the first step that is new.

A copy of the state (memcpy) is measured by each rank right before: a ratio says the same on a busy machine.
BENCH_STATE_MIB in the environment names other sizes than the default, 2048 for example.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

from .job import Job, JobFailed
from .launchers import Launcher
from .scenario import Outcome

SIZES_MIB = tuple(int(text) for text in os.environ.get("BENCH_STATE_MIB", "64,512").split(","))
"""Of the state of each rank."""
KILLED_MIB = 512
"""Of each of the two ranks of the training that is killed."""
LIMIT_S = 300.0
_MEMORY = "/dev/shm"


def blocked(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """P17: saves in one process, and a load in the next one, for each size."""
    for mib in SIZES_MIB:
        with contextlib.ExitStack() as stack:
            parent = None
            if launcher.name in ("ours", "ours-overlap", "dcp-shm", "lm-resiliency"):
                parent = _MEMORY
            folder = folder_of(stack, parent)
            arguments = [launcher.name.removesuffix("-shm"), str(mib), str(folder)]
            if launcher.name.startswith("ours"):
                flags = ["--ft-memory-interval=1", *flags_of(folder)]
                job = stack.enter_context(Job(launcher, ranks, ["killed", *arguments], flags, max_restarts=1))
                job.wait_ranks("loaded", 1, LIMIT_S)
                note(job, "killed", mib, outcome)
                note(job, "load", mib, outcome)
                continue
            for part, event in (("saved", "saved"), ("load", "loaded")):
                with Job(launcher, ranks, [part, *arguments]) as job:
                    job.wait_ranks(event, 0, LIMIT_S)
                    note(job, part, mib, outcome)


def folder_of(stack: contextlib.ExitStack, parent: str | None) -> Path:
    """A new folder that is removed at the end: after a SIGKILL of all its processes a job leaves its files there."""
    folder = Path(tempfile.mkdtemp(prefix="ftb", dir=parent))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def flags_of(folder: Path) -> list[str]:
    """The options of a job whose files lie in a folder, however large they are."""
    return [f"--ft-memory-dir={folder}", "--ft-memory-limit=16GiB"]


def note(job: Job, part: str, mib: int, outcome: Outcome) -> None:
    """Notes what the slowest rank has measured."""
    found = [json.loads((job.folder / f"{part}.{rank}.json").read_text()) for rank in range(job.ranks)]
    for name in found[0]:
        outcome.add(f"{name}_{mib}MiB_x", max(values[name] for values in found))


def killed(launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """P17: SIGKILL of one rank, of all ranks, and of the launcher with its ranks, which is started again at once."""
    with contextlib.ExitStack() as stack:
        flags = ["--ft-memory-interval=10", "--ft-preload=torch.distributed.fsdp,ft_client.memory"]
        flags += flags_of(folder_of(stack, _MEMORY))
        arguments = ["train", "ours", str(KILLED_MIB), "none"]
        job = stack.enter_context(Job(launcher, ranks, arguments, flags, max_restarts=4))
        seen: set[int] = set()
        for name in ("one", "all", "launcher"):
            pids = wait_new(job, "saved", seen)
            seen |= set(pids.values())
            victims = sorted(pids.values())
            if name == "one":
                victims = victims[:1]
            if name == "launcher":
                victims = [job.process.pid, *victims]
            began = time.monotonic_ns()
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if name == "launcher":
                job.start_again()
            new = wait_new(job, "stepped", seen)
            for event in ("start", "made", "loaded", "stepped"):
                last = max(stamp.t for stamp in job.stamps(event) if stamp.pid in new.values())
                outcome.add(f"{name}_to_{event}_s", (last - began) / 1e9)


def wait_new(job: Job, event: str, seen: set[int]) -> dict[int, int]:
    """Waits until all ranks have written an event in processes that were not seen before. Returns these by rank."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        found = {stamp.rank: stamp.pid for stamp in job.stamps(event) if stamp.pid not in seen}
        if len(found) == job.ranks:
            return found
        if job.process.poll() is not None:
            raise JobFailed(f"{event}: the launcher ended with {job.process.returncode}; {job.last_output()}")
        time.sleep(0.01)
    raise JobFailed(f"{event}: not within {LIMIT_S:g} s; {job.last_output()}")
