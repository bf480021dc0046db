"""Starts a thread that the script does not see: it is not in `threading.enumerate()`, and it takes no signal.

The watchdog is one, and so are the threads that inject faults and that receive from a standalone agent. A script may
count its threads, or wait for all of them, and must not find ours.

The kernel delivers a signal to any thread that does not block it (signal(7)). A signal that the script blocks in order
to wait for it must not be delivered to such a thread.
"""

from __future__ import annotations

import _thread
import signal
from collections.abc import Callable

_OF_THE_THREAD = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
"""Signals that the kernel sends to the thread that caused them. Such a fault while its signal is blocked has no defined
result (sigprocmask(2)), so these stay unblocked."""

_alive: set[object] = set()
"""One object for each hidden thread that runs."""


def count() -> int:
    """Returns how many hidden threads this process has."""
    return len(_alive)


def reset() -> None:
    """Called in a forked child, which has none of its parent's threads."""
    _alive.clear()


def start(run: Callable[[], object], takes: int | None = None) -> None:
    """Calls `run` in a hidden thread. Returns at once. The thread ends when `run` returns, or with the process.

    Args:
        run: what the thread does.
        takes: the one signal that the thread does not block; None: it blocks all.

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
