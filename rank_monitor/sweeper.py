"""The sweeper: a process that kills what is left of a job when launcher, zygote, template and monitors were killed.

The template forks it first of all, so that it costs no import. It leads a session of its own and waits in one `read`
on a channel whose other end only the launcher has: the kernel closes that however the launcher ends.
"""

from __future__ import annotations

import contextlib
import os
import socket

from rank_monitor.job import MonitoredJob
from rank_monitor.log import Log


def fork(launcher: socket.socket, unwanted: list[int], job: MonitoredJob, log: Log) -> int:
    """Starts the sweeper; returns its pid.

    Args:
        launcher: the sweeper's end of the channel to the launcher, closed in this process. The sweeper sends its pid,
            and ends when it receives anything.
        unwanted: descriptors of this process that would keep others from seeing its end.
    """
    pid = os.fork()
    if pid:
        launcher.close()
        return pid
    try:
        for descriptor in unwanted:
            os.close(descriptor)
        os.setsid()
        _serve(launcher, job, log)
    finally:  # the frames below are the template's: nothing may come out
        os._exit(0)


def _serve(launcher: socket.socket, job: MonitoredJob, log: Log) -> None:
    with contextlib.suppress(OSError), open("/proc/self/comm", "wb", buffering=0) as comm:  # noqa: PTH123
        comm.write(b"ft_sweeper")
    launcher.setblocking(True)
    try:
        launcher.send(str(os.getpid()).encode())
        goodbye = launcher.recv(1)
    except OSError:
        goodbye = b""
    if not goodbye:
        log.name = "Sweeper"
        job.end(log)
