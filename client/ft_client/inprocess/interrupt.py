"""Interrupts what runs in a thread: an exception that is raised there again and again until it arrives.

Raised once, it may be swallowed: by a `__del__`, a C callback, an `except BaseException` of the user's. It cannot reach
a thread that waits in a system call; a signal whose handler does nothing ends such a wait, where the thread is the main
one. Knows nothing of why.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
logger = logging.getLogger(__name__)

_NUDGE = signal.SIGURG
"""Ignored where nobody handles it, and hardly ever used."""
_FIRST_NUDGE_S, _NUDGE_S = 0.002, 0.02
_RAISE_S, _LAST_RAISE_S = 0.2, 2.0


class Interrupted(BaseException):
    """The function is to end, since it is called again."""


class Interrupter:
    """Calls functions in the thread that made it, such that another thread can interrupt them."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._armed = self._asked = self._raised = False
        self._arrived = threading.Event()
        self._before: object = None
        self._nudges = threading.current_thread() is threading.main_thread()
        if self._nudges and signal.getsignal(_NUDGE) in (signal.SIG_DFL, signal.SIG_IGN):
            self._before = signal.signal(_NUDGE, _nothing)

    def close(self) -> None:
        """Puts the signal back to what it was."""
        if self._before is not None and signal.getsignal(_NUDGE) is _nothing:
            signal.signal(_NUDGE, self._before)  # type: ignore[arg-type]

    def call(self, function: Callable[[], _T]) -> _T:
        """What `function` returns.

        Raises:
            Interrupted: another thread called `interrupt`, since the last `reset`.
            BaseException: whatever the function raises.
        """
        error: BaseException | None = None
        interrupted = False
        try:
            self._arm()
            result = function()
        except Interrupted:
            interrupted = True
        except BaseException as raised:
            error = raised
        while True:
            try:
                self._disarm()
                break
            except Interrupted:  # it was on its way
                interrupted = True
            except BaseException as raised:  # by the handler of a signal
                error = raised
        if error is not None:
            try:
                raise error
            finally:
                del error  # this frame is in its traceback
        if interrupted:
            raise Interrupted
        return result

    def reset(self) -> None:
        """What was interrupted is over: functions may run again."""
        self._asked = False

    def interrupt(self, again: Callable[[], object] = lambda: None) -> None:
        """Lets no function run until `reset`. Called in another thread; returns when none runs.

        Args:
            again: called whenever the interruption has not arrived and is repeated.
        """
        wait_s, raise_again_s, waited_s = _FIRST_NUDGE_S, 0.0, 0.0
        pause_s = _RAISE_S
        while True:
            with self._lock:
                self._asked = True
                if not self._armed:
                    return
                if waited_s >= raise_again_s:
                    if waited_s and logger.isEnabledFor(logging.DEBUG):
                        logger.debug("the interruption has not arrived; the thread is at\n%s", self._stack())
                    self._raised = True
                    _raise_in(self._thread, Interrupted)
                    raise_again_s, pause_s = waited_s + pause_s, min(2 * pause_s, _LAST_RAISE_S)
                if self._nudges and waited_s:
                    signal.pthread_kill(self._thread, _NUDGE)
            if self._arrived.wait(wait_s):
                return
            waited_s += wait_s
            if waited_s >= raise_again_s:
                again()
            wait_s = _NUDGE_S

    def _arm(self) -> None:
        with self._lock:
            if self._asked:
                raise Interrupted
            self._arrived.clear()
            self._armed, self._raised = True, False

    def _disarm(self) -> None:
        """From here on nothing is raised, and what was raised is not on its way any more."""
        with self._lock:
            self._armed = False
            if self._raised:
                _let_arrive(self._thread)
        self._arrived.set()

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""


def _raise_in(thread: int, exception: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(exception))


def _let_arrive(own_thread: int) -> None:
    """Takes what may be on its way to this thread: one more takes its place, and that one is waited for.

    Python can take one back, but forgets to look no longer for it: the interpreter is then slower for good, and Python
    3.11 runs in a circle when a profiler or a debugger is at work.
    """
    try:
        _raise_in(own_thread, Interrupted)
        while True:
            pass
    except Interrupted:
        pass


def _nothing(_signal: int, _frame: object) -> None:
    """The handler: that it is called is enough."""
