"""Keeps our descriptors out of the numbers that a script sees.

Knows nothing of what a descriptor is for.
"""

from __future__ import annotations

import fcntl
import os

_FROM = 200


def moved_up(descriptor: int) -> int:
    """The same open file under a high number, closed on exec, so that a script's own files get the numbers they always
    had; `descriptor` is closed. Stays as it is where the limit of open files is too low for that.
    """
    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FROM)
    except OSError:
        return descriptor
    os.close(descriptor)
    return high
