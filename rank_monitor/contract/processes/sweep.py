"""Finds the processes of a job by a tag in their environment (/proc/PID/environ), and kills them.

`rank_monitor/lost_launcher.py` sweeps, in monitors, template and sweeper, once the launcher is gone; `end_cycle` sweeps
one cycle. The launcher only asks whose a process is (`node/processes/process_tree.py`), and a rank waits for the end of
the monitor of its standalone agent. The callers decide when to kill.

A process keeps the environment that it was started with, in another session or under another parent too. So a search
by environment also finds a process that has left the process group of its rank. A process that was started with a
cleared environment is not found. Template and monitors do not have the tag of the job, so a sweep does not hit the
process that runs it. Signals are sent through pidfds only, so that a recycled pid is never hit.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping

from rank_monitor.contract import env
from rank_monitor.contract.processes import proc
from rank_monitor.contract.processes.wait import readable

_RESCAN_S = 0.005
"""From one search to the next: a killed process stays in /proc for some milliseconds."""
_QUIET_S = 0.1
"""For how long none must be found. A process that is just being started has its parent's environment between fork and
exec, and none at all during exec."""


def processes_of(tag: str, also: Mapping[str, str] | None = None, key: str = env.JOB_TAG) -> list[int]:
    """Returns the pids of the processes that were started with this job's tag, without this process.

    Zombies have no environment any more, and the environments of other users' processes cannot be read: neither is
    found. Takes a read for each process of the machine.

    Args:
        tag: of the job.
        also: further variables that a process must have been started with, with their values.
        key: the variable that holds the tag: that of the ranks, or that of the template and the monitors.
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
    """Whether a process was started with this job's tag; cheaper than `environ_of`."""
    return os.fsencode(f"\0{env.JOB_TAG}={tag}\0") in b"\0" + proc.environ(pid)


def environ_of(pid: int) -> dict[str, str]:
    """Returns the environment that a process was started with; empty when the process is gone, is a zombie, or may not
    be read."""
    entries = (os.fsdecode(entry).partition("=") for entry in proc.environ(pid).split(b"\0") if entry)
    return {name: value for name, _, value in entries}


def kill(pid: int, tag: str, number: int = signal.SIGKILL, key: str = env.JOB_TAG) -> bool:
    """Sends signal `number` to a process of the job. The tag is checked again after the pidfd is open: a process that
    got a recycled pid is not hit.

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
    """Kills every process of the job, and what they start meanwhile. Blocks until none was found for 0.1 s.

    Args:
        tag: of the job.
        limit_s: how many seconds to go on at most.
        also: further variables, as for `processes_of`: then only processes with all of them are killed.

    Returns:
        The pids that are left after `limit_s` seconds: as a rule processes that wait in the kernel.
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
