"""Keeps our descriptors out of the numbers that a script sees.

Knows nothing of what a descriptor is for.
"""

from __future__ import annotations

import fcntl
import os

FIRST_HIGH = 200
"""A script's own files are not expected to get a number from here on."""


def moved_up(descriptor: int) -> int:
    """The same open file under a high number, closed on exec, so that a script's own files get the numbers they always
    had; `descriptor` is closed. Stays as it is where the limit of open files is too low for that.
    """
    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_HIGH)
    except OSError:
        return descriptor
    os.close(descriptor)
    return high
