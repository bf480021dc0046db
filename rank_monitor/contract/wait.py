"""Waiting for descriptors, whatever their number. Decides nothing."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
from collections.abc import Iterable


def readable(descriptors: Iterable[int], timeout_s: float | None = 0.0) -> set[int]:
    """The descriptors that can be read or are closed at the other end.

    Args:
        timeout_s: how long to wait for the first; None: for ever; 0: not at all.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    timeout_ms = None if timeout_s is None else math.ceil(max(0.0, timeout_s) * 1000)
    return {descriptor for descriptor, _ in poll.poll(timeout_ms)}


def await_child(pid: int, limit_s: float) -> None:
    """Waits so long for a child that was told to end, stopped or not, and takes its exit code.

    Harmless where it is no child of this process.
    """
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            readable([pidfd], limit_s)
        finally:
            os.close(pidfd)
        os.waitpid(pid, os.WNOHANG)
