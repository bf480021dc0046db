"""Waits until the launcher can open descriptors: its RLIMIT_NOFILE can be lowered while it runs (`prlimit`).

The node agent calls it between cycles. A restart opens a few dozen at once. Without this wait it failed half-way and
ended the job with code 81. Fails open: after a bounded wait the restart is tried all the same.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_NEEDED = 24
"""Pipes, sockets and files of /proc that a restart opens in addition to those of the ranks, with room to spare."""
_PER_RANK = 3
"""A pidfd in each of two tables, and a log file."""
# No event reports a raised limit, so it is polled.
_RETRY_S = 0.5
_MOST_S = 600.0
"""After this time the restart is tried all the same: its error then names what it cannot open."""


class Reserve:
    """Descriptors that are held open while ranks train, and closed when a restart could open no others.

    Args:
        nprocs: ranks of this node.
    """

    def __init__(self, nprocs: int) -> None:
        self._needed = _NEEDED + _PER_RANK * nprocs
        self._held: list[int] = []
        self._hard_at_start = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def fill(self) -> None:
        """Opens as many as a restart needs, if the limit leaves twice as many for others. Does nothing if held."""
        if not self._held and _can_open(3 * self._needed):
            self._held = _open(self._needed)

    def release(self) -> None:
        """Closes them."""
        while self._held:
            os.close(self._held.pop())

    def await_enough(self, wait: Callable[[float], object | None]) -> bool:
        """Waits until a restart can open what it needs; logs one line for each measure that it takes.

        Raises the soft limit of this process to the hard one, then releases what is held, then waits for ten minutes at
        most.

        Args:
            wait: waits for the given seconds; returns anything but None when a signal arrived, which ends the wait.

        Returns:
            Whether there are enough.
        """
        deadline, is_logged = time.monotonic() + _MOST_S, False
        while not _can_open(self._needed):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            if soft != hard and _raise_soft(hard):
                logger.warning("RLIMIT_NOFILE of the launcher was lowered to %d; it is %d again", soft, hard)
            elif self._held:
                logger.warning("RLIMIT_NOFILE of the launcher was lowered to %d; it uses its reserve", hard)
                self.release()
            elif hard >= self._hard_at_start:
                return False  # a limit that was always tight, and that the first cycle did with
            else:
                if not is_logged:
                    logger.warning(
                        "RLIMIT_NOFILE of the launcher is %d, and a restart needs %d descriptors more: it waits "
                        "(prlimit --pid %d --nofile=4096)", hard, self._needed, os.getpid()
                    )  # fmt: skip
                is_logged = True
                if wait(_RETRY_S) is not None or time.monotonic() > deadline:
                    return False
        return True


def _raise_soft(hard: int) -> bool:
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return False
    return True


def _can_open(number: int) -> bool:
    opened = _open(number)
    for descriptor in opened:
        os.close(descriptor)
    return len(opened) == number


def _open(number: int) -> list[int]:
    """Opens `number` descriptors, or as many as the limit allows."""
    opened: list[int] = []
    try:
        while len(opened) < number:
            # O_PATH opens no file, so no permission is needed and no file system does any work.
            opened.append(os.open("/", os.O_PATH | os.O_CLOEXEC))
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    return opened
