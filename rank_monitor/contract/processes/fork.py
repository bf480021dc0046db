"""Forks a process of ours without Python's warning about threads. Every fork of launcher, monitors and client is here.

From Python 3.12 on `os.fork` warns (DeprecationWarning) in a process that has threads, those of C libraries included.
torch's libraries keep pools of such threads; our children call nothing that waits for any of them. The warning is meant
for the author of the program that forks, and a user can do nothing about a fork of ours.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings

# Python names the module that calls `os.fork`: the filter is for no fork but the one below.
_FILTER = ("ignore", None, DeprecationWarning, re.compile(re.escape(__name__) + r"\Z"), 0)


def fork() -> int:
    """Forks this process. Returns the child's pid, and 0 in the child.

    The filter is in place during the fork alone, so that a rank has the filters of its own program, and in the list
    itself: `warnings.catch_warnings` exchanges the list under other threads, and has all warnings shown again that are
    shown once for each line.

    Raises:
        OSError: the system refuses.
    """
    filters: list[object] = warnings.filters  # type: ignore[assignment]  # its type says that it is read only
    filters.insert(0, _FILTER)
    try:
        return os.fork()
    finally:
        with contextlib.suppress(ValueError):  # another thread has reset the filters
            filters.remove(_FILTER)
