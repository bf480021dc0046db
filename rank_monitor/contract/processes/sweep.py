"""Finds the processes of a job by a tag in their environment (/proc/PID/environ), and kills them.

Launcher, monitors and the sweeper call it, and a rank that replaces its companion. A process keeps the environment it
was started with, in another session or under another parent too; one that was started with a cleared environment is not
found. Signals are sent through pidfds only, so that a recycled pid is never hit.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping

from rank_monitor.contract import env
from rank_monitor.contract.processes import proc
from rank_monitor.contract.processes.wait import readable

# A killed process stays in /proc for some milliseconds.
_RESCAN_S = 0.005
# For a process that is just being started: between fork and exec it has its parent's environment, during exec none.
_QUIET_S = 0.1


def processes_of(tag: str, also: Mapping[str, str] | None = None, key: str = env.JOB_TAG) -> list[int]:
    """Pids of the processes started with this job's tag, and with every variable of `also`; not this one's.

    `key` is the variable that holds the tag: of the ranks, or of the template and the monitors.

    Zombies have no environment any more, and those of other users cannot be read: neither is found.
    """
    wanted = [os.fsencode(f"\0{name}={value}\0") for name, value in {key: tag, **(also or {})}.items()]
    own = os.getpid()
    found = []
    for pid in proc.pids():
        if pid != own:
            environment = b"\0" + proc.environ(pid)
            if all(entry in environment for entry in wanted):
                found.append(pid)
    return found


def carries(pid: int, tag: str) -> bool:
    """Whether the process was started with this job's tag; cheaper than `environ_of`."""
    return os.fsencode(f"\0{env.JOB_TAG}={tag}\0") in b"\0" + proc.environ(pid)


def environ_of(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty when it is gone, a zombie, or not ours to read."""
    entries = (os.fsdecode(entry).partition("=") for entry in proc.environ(pid).split(b"\0") if entry)
    return {name: value for name, _, value in entries}


def kill(pid: int, tag: str, number: int = signal.SIGKILL, key: str = env.JOB_TAG) -> bool:
    """Sends a signal to a process of the job; one that took over a recycled pid is not hit.

    Returns:
        Whether the process was there and belongs to the job.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if environ_of(pid).get(key) != tag or readable([pidfd], 0.0):
            return False
        signal.pidfd_send_signal(pidfd, number)
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


def sweep(tag: str, limit_s: float = 10.0, also: Mapping[str, str] | None = None) -> list[int]:
    """Kills every process of the job, and what they start meanwhile, until none is found for a while.

    `also` are further variables, as of `processes_of`: then only processes with all of them are killed. Blocks until
    none was found for 0.1 s.

    Returns:
        Pids that are left after `limit_s` seconds: processes that wait in the kernel, as a rule.
    """
    deadline = time.monotonic() + limit_s
    quiet_until = 0.0
    while True:
        left = processes_of(tag, also)
        now = time.monotonic()
        if left or not quiet_until:
            quiet_until = now + _QUIET_S
        if now > deadline or now > quiet_until:
            return left
        for pid in left:
            kill(pid, tag)
        time.sleep(_RESCAN_S)
