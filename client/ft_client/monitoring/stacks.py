"""Registers the signal on which faulthandler appends this process's stacks to a file; the monitor sends it.

faulthandler works in C, so also while the GIL is held.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import stat
from collections.abc import Mapping

from rank_monitor.contract import env
from rank_monitor.contract.processes.descriptor import moved_up


def register(environment: Mapping[str, str]) -> int | None:
    """Registers the signal and the file that the environment names. Returns the signal; None if it could not."""
    path, number = environment.get(env.STACK_FILE), environment.get(env.STACK_SIGNAL)
    if not path or not number:
        return None
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        descriptor = moved_up(_opened(path))
        faulthandler.register(int(number), file=descriptor, all_threads=True, chain=False)
        return int(number)
    return None


def _opened(path: str) -> int:
    """A descriptor that appends to a regular file. A rank of an earlier cycle may have put a FIFO or a link there."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    with contextlib.suppress(OSError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            os.unlink(path)  # noqa: PTH108  (pathlib costs each rank 4 ms at its start)
    return os.open(path, flags, 0o600)
