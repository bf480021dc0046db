"""A thread of ours that the script does not meet: it is not in `threading.enumerate()`, and it takes no signal.

A signal that the script blocks, to wait for it, must not find a thread that lets it through.
"""

from __future__ import annotations

import _thread
import signal
from collections.abc import Callable

_OF_THE_THREAD = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}  # faults of its own


def start(run: Callable[[], object], takes: int | None = None) -> None:
    """Calls `run` in such a thread, which ends with the process.

    Args:
        takes: the one signal that may come there.

    Raises:
        RuntimeError: no thread can be started.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {takes} - _OF_THE_THREAD)
    try:
        _thread.start_new_thread(run, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
