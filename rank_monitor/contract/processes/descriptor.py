"""Moves our descriptors to high numbers, so that a script gets the same numbers as without us.

The client calls it for its socket, its stack file and its companion, the zygote for the channel of a rank.
"""

from __future__ import annotations

import fcntl
import os

FIRST_HIGH = 200
"""A script's own files are not expected to get a number from here on."""


def moved_up(descriptor: int) -> int:
    """Duplicates a descriptor to a number from `FIRST_HIGH` on, with close-on-exec, and closes `descriptor`.

    Returns `descriptor` itself where the limit of open files is too low.
    """
    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_HIGH)
    except OSError:
        return descriptor
    os.close(descriptor)
    return high
