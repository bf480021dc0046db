"""Starts a thread that the script does not see: it is not in `threading.enumerate()`, and it takes no signal.

The kernel delivers a signal to any thread that does not block it (signal(7)). A signal that the script blocks in order
to wait for it must not be delivered to this thread.
"""

from __future__ import annotations

import _thread
import signal
from collections.abc import Callable

# Sent to the thread that caused them. Such a fault while its signal is blocked has no defined result (sigprocmask(2)).
_OF_THE_THREAD = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}

_alive: set[object] = set()


def count() -> int:
    """Returns how many such threads this process has."""
    return len(_alive)


def reset() -> None:
    """Called in a forked child, which has none of its parent's threads."""
    _alive.clear()


def start(run: Callable[[], object], takes: int | None = None) -> None:
    """Calls `run` in such a thread, which ends with the process.

    Args:
        takes: the one signal that the thread does not block.

    Raises:
        RuntimeError: no thread can be started.
    """
    # A new thread inherits the mask of the one that starts it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {takes} - _OF_THE_THREAD)
    counted = object()
    _alive.add(counted)
    try:
        _thread.start_new_thread(_run, (run, counted))
    except RuntimeError:
        _alive.discard(counted)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(run: Callable[[], object], counted: object) -> None:
    try:
        run()
    finally:
        _alive.discard(counted)
