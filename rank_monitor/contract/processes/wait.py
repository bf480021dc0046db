"""Waits for descriptors and children. Uses poll(2), since select(2) takes no descriptor from 1024 on."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
from collections.abc import Iterable


def readable(descriptors: Iterable[int], timeout_s: float | None) -> set[int]:
    """Returns the descriptors that are readable, or closed at the other end. A pidfd is readable when its process has
    ended.

    Args:
        descriptors: to be waited for.
        timeout_s: how many seconds to block until there is one; None: without limit; 0 or less: not at all.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    if timeout_s is None:
        timeout_ms = None
    else:
        # Rounded up: rounded down, the last part of a millisecond would become a loop without any wait.
        timeout_ms = math.ceil(max(0.0, timeout_s) * 1000)
    return {descriptor for descriptor, _ in poll.poll(timeout_ms)}


def end_of(pid: int) -> int:
    """Returns a descriptor that is readable once a process has ended: its pidfd. The caller closes it.

    A process that its parent has reaped already has no pidfd any more; a fork server may be that fast. The result is
    then a descriptor that is readable at once, and no pidfd: a signal sent through that descriptor raises OSError.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.close(writer)
        return reader


def await_child(pid: int, limit_s: float) -> None:
    """Waits up to `limit_s` seconds for a child that was asked to end, and reaps it. A stopped child is continued.

    Harmless where `pid` is not a child of this process: then nothing is reaped.
    """
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            readable([pidfd], limit_s)
        finally:
            os.close(pidfd)
        os.waitpid(pid, os.WNOHANG)
