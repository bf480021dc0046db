"""Starts a thread that the script does not see: it is not in `threading.enumerate()`, and it takes no signal.

The watchdog is one, and so are the threads that wait to inject a fault and that receive from a standalone agent. A
script may count its threads, or wait for all of them, and must not find ours.

What runs in a hidden thread must neither call `threading.current_thread()` nor log: `logging` calls that for each
record. The call enters the thread in the list of `threading` as a `_DummyThread`, which up to Python 3.12 stays there
for good. So a hidden thread calls code that logs, or that is the user's, by `run_in_ordinary`.

The kernel delivers a signal to any thread that does not block it (signal(7)). A signal that the script blocks in order
to wait for it must not be delivered to such a thread.
"""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable

_OF_THE_THREAD = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
"""Signals that the kernel sends to the thread that caused them. Such a fault while its signal is blocked has no defined
result (sigprocmask(2)), so these stay unblocked."""

_alive: set[object] = set()
"""One object for each hidden thread that runs."""


def count() -> int:
    """Returns how many hidden threads this process has. For `fork_warning.py`, which tells them from those of the
    script."""
    return len(_alive)


def reset() -> None:
    """Counts no thread any more. `fork_warning.py` calls this in a forked child, which has none of its parent's
    threads."""
    _alive.clear()


def start(run: Callable[[], object], takes: int | None = None) -> None:
    """Calls `run` in a hidden thread. Returns at once. The thread ends when `run` returns, or with the process.

    Args:
        run: what the thread does. Must not log, nor call `threading.current_thread()`.
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


def run_in_ordinary(run: Callable[[], object], name: str) -> None:
    """Calls `run` in a thread of `threading`, for as long as it takes. Returns at once. Called in a hidden thread.

    Where no thread can be started, `run` is called in this one: what it does matters more than what the script sees.

    Args:
        run: what the thread does; may log.
        name: of the thread, which log records show.
    """
    try:
        # `daemon` is given since `Thread` would ask `current_thread()` for it.
        threading.Thread(target=run, daemon=True, name=name).start()
    except RuntimeError:
        run()
