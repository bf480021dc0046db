"""Interrupts what runs in the main thread: once, and again only where no cleanup is cut off.

`user_function.py` makes one `Interrupter` for each call of a wrapped function. The reason for an interruption is not
known here.

How the exception `Interrupted` gets into the main thread: the watcher's thread sends the main thread a signal, and the
signal's handler raises the exception there. Only in the main thread it is certain what the exception would cut off: the
current frame and the exception that is being handled are those of this moment, and nothing runs in between. A signal
also ends a wait in a system call, in which the thread would not see an exception.

When it is raised. The exception is held back while the thread cleans up, that is while

- an earlier interruption exists: it is pending, a handler deals with it, or something refers to it;
- an exception is handled, by an `except`, a `finally` or a `with`, that was not handled when the function was called;
- an `__exit__` or `__del__` runs.

It is also held back in the standard library's handling of locks. Raised between the acquisition of a lock and the `try`
that releases it, the exception would leave the lock held for good. A thread that waits for a lock there is interrupted,
as it does not have the lock: soon where a `try` is around the wait (as in `Condition.wait`), else when it has waited
long enough.

When it is raised all the same. A cleanup may hang, and a function may train inside an `except` for hours. After the
grace the exception is raised whatever it cuts off, and a report says so. An interruption that was swallowed, by a C
callback or an `except BaseException`, holds nothing back: it is raised again at once.

Without the signal. Where the user's code has set another handler meanwhile, the exception is raised from the watcher's
thread, by `PyThreadState_SetAsyncExc`. The main thread may then be a few instructions beyond the place that was
examined.

Threads: the methods are in three groups below: those that the other thread runs, those that the interrupted thread
runs, and two that both run. The interrupted thread never takes a lock in the signal's handler: the handler may run
while the same thread holds that lock.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

_T = TypeVar("_T")
logger = logging.getLogger(__name__)

_NUDGE = signal.SIGURG
"""The signal. Ignored by default, so that one that comes late does no harm; hardly any program uses it."""
_FIRST_LOOK_S, _LOOK_S = 0.002, 0.02
"""Seconds to the second attempt, and between later attempts. Each needs the GIL, which the function needs to end."""
_WAITS_S, _STUCK_S = 0.02, 1.0
"""Seconds after which a thread at one and the same instruction counts as waiting for a lock: handling one takes
microseconds. But the thread may have acquired the lock just now, which Python does not show, and a busy machine makes
that likely. Hence the longer limit where no `try` around the wait would release the lock."""
_AGAIN_S, _LAST_AGAIN_S = 0.2, 2.0
"""The first and the longest interval between calls of `again`, which double."""
_LOCKING = frozenset({"concurrent", "importlib", "logging", "multiprocessing", "queue", "threading"})
"""Packages of the standard library that take locks in functions of their own, such as `Condition.__enter__`."""
_LOCKS = frozenset({"multiprocessing.synchronize", "threading"})
"""Modules in which an `__exit__` releases a lock."""
_CLEANING = frozenset({"__aexit__", "__del__", "__exit__"})


class Interrupted(BaseException):
    """Raised in the function to end it, since it is to be called again."""


class Interrupter:
    """Calls functions in the thread that made this object, such that another thread can interrupt them.

    Example, with `interrupter = Interrupter(lambda: 15.0)` made in the main thread:

        interrupter.call(train)      # main thread: returns the result, or raises Interrupted
        interrupter.interrupt()      # another thread: returns when `train` has ended
        interrupter.reset()          # main thread: from here on functions may run again

    Args:
        grace_s: returns how long a cleanup may take, in seconds. Asked at each attempt.
        report: called in the other thread when that time has passed and the exception is raised all the same. Its
            arguments: the seconds that passed, the reason why the exception was held back, the stack of the function.
    """

    def __init__(
        self, grace_s: Callable[[], float], report: Callable[[float, str, str], object] = lambda *_: None
    ) -> None:
        self._grace_s, self._report = grace_s, report
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        """Of the way without the handler, which never takes it."""
        self._armed = self._asked = self._is_forced = self._is_async = self._is_looking = False
        self._arrived = threading.Event()
        self._raised = 0
        self._last: weakref.ref[Interrupted] | None = None
        self._outside: BaseException | None = None
        """What is handled around the call."""
        self._locking_at: tuple[FrameType, int, float] | None = None
        self._seen = ""
        """What the handler saw that held the exception back."""
        self._began = 0.0
        """When the function was interrupted last, or was to be."""
        self._before: object = None
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main and signal.getsignal(_NUDGE) is not None:  # a handler in C could not be put back
            self._before = signal.signal(_NUDGE, self._on_signal)

    def close(self) -> None:
        """Restores the previous handler of the signal, unless the user's code has set another one meanwhile."""
        if self._has_signal():
            signal.signal(_NUDGE, self._before)  # type: ignore[arg-type]

    def call(self, function: Callable[[], _T]) -> _T:
        """Calls `function`, which must be written in Python, and returns its result. Nothing is raised in this frame.

        Raises:
            Interrupted: another thread called `interrupt`, since the last `reset`.
            BaseException: what the function raises.
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
        """Ends an interruption: functions may run again. Called in the thread that calls them."""
        self._asked = False

    def begin(self) -> None:
        """Begins an interruption: from now on no function begins to run, until `reset`. Called in another thread.

        Called by itself where something must be done between this moment and the interruption of a function that runs.
        """
        self._asked = True

    def interrupt(self, again: Callable[[], object] = lambda: None) -> None:
        """Interrupts the function that runs, and lets none run until `reset`. Called in another thread.

        Blocks until no function runs, whatever time that takes: the monitor limits it.

        Args:
            again: called while the function has not ended, first after 0.2 s, then at growing intervals of up to 2 s.
        """
        self._began = time.monotonic()
        self.begin()
        look_s, again_s = _FIRST_LOOK_S, _AGAIN_S
        again_at = self._began + again_s
        while self._armed:
            now = time.monotonic()
            if now >= again_at:
                again()
                again_s = min(2 * again_s, _LAST_AGAIN_S)
                again_at = now + again_s
            self._try(now)
            if self._arrived.wait(look_s):
                return
            look_s = _LOOK_S

    # In the other thread.

    def _try(self, now: float) -> None:
        """Raises the exception if that is possible now, or has the signal handler check whether it is.

        The main thread is examined from outside first: a thread that cleans up gets no signal until the grace is over.
        """
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return
        is_by_signal = self._has_signal()
        reason = self._cleanup_at(frame, _handled_in(self._thread))
        if not reason and not is_by_signal:
            reason = self._lock_handling_at(frame)
        waited_s = now - self._began
        is_over = waited_s >= self._grace_s()
        if is_over:
            is_by_signal = is_by_signal and not self._is_forced  # else the handler did not run: the signal is blocked
            self._began, self._is_forced = now, True
        elif reason and not self._is_forced:
            return
        elif self._raised and logger.isEnabledFor(logging.DEBUG):
            logger.debug("the interruption was swallowed; the thread is at\n%s", _stack(frame))
        seen = self._seen
        if is_over:
            stack = _stack(frame)
        else:
            stack = ""
        if not is_by_signal:
            self._raise_from_here()
        if self._is_main:
            signal.pthread_kill(self._thread, _NUDGE)
        if is_over:  # the last step: to log is to wait for a lock, which the thread may have
            self._report(waited_s, reason or seen or "it executes no Python code", stack)

    def _raise_from_here(self) -> None:
        """Raises the exception without the signal, if the function still runs. The lock excludes `_disarm`."""
        with self._lock:
            if self._armed:
                self._is_async, self._is_forced = True, False
                _raise_in(self._thread, Interrupted)

    def _has_signal(self) -> bool:
        return self._before is not None and signal.getsignal(_NUDGE) == self._on_signal

    # In the thread that is interrupted.

    def _arm(self) -> None:
        """Begins the stretch in which an exception can be raised. Raises it if an interruption came before."""
        self._arrived.clear()
        self._raised, self._last, self._seen = 0, None, ""
        self._outside = sys.exc_info()[1]
        self._armed = True
        if self._asked:
            raise Interrupted

    def _disarm(self) -> None:
        """Ends the stretch in which an exception can be raised, and consumes one that is pending."""
        with self._lock:
            self._armed = self._is_forced = False
            if self._is_async:
                _let_arrive(self._thread)
            self._is_async = False
        self._outside = self._locking_at = None
        self._arrived.set()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if callable(self._before):
            self._before(number, frame)
        if frame is None or self._is_looking or not (self._armed and self._asked):
            return
        self._is_looking = True
        try:
            cleans = self._cleanup_at(frame, sys.exc_info()[1])
            if cleans:
                locks = ""
            else:
                locks = self._lock_handling_at(frame)
            self._seen = cleans or locks
        finally:
            self._is_looking = False
        if frame.f_code in _NEVER_IN or (self._seen and not self._is_forced):
            if locks:
                _ = [*map(_trip, (_NUDGE,))]  # see there why not simply so; nothing is to be called after it
            return
        self._is_forced = False
        self._raise()

    def _raise(self) -> None:
        interruption = Interrupted()
        self._raised += 1
        self._last, self._began = weakref.ref(interruption), time.monotonic()
        try:
            raise interruption
        finally:
            del interruption  # this frame is in its traceback, and it is to end with the last handler of it

    # In either.

    def _cleanup_at(self, frame: FrameType, handled: BaseException | None) -> str:
        """Returns the cleanup in the thread that an exception would cut off, in words; empty if none is seen."""
        if self._last is not None and self._last() is not None:
            return "the interruption is being handled"
        if handled is not None and handled is not self._outside:
            return f"{type(handled).__name__} is being handled"
        found: FrameType | None = frame
        while found is not None and found.f_code is not Interrupter.call.__code__:
            if found.f_code.co_name in _CLEANING and _module(found) not in _LOCKS:
                return f"{found.f_code.co_name} runs"
            found = found.f_back
        return ""

    def _lock_handling_at(self, frame: FrameType) -> str:
        """Returns in words that the thread is acquiring or releasing a lock, and in which module.

        Empty where the thread does something else, or waits for a lock.
        """
        name = _module(frame)
        if name.partition(".")[0] not in _LOCKING:
            self._locking_at = None
            return ""
        now, seen = time.monotonic(), self._locking_at
        if seen is None or seen[0] is not frame or seen[1] != frame.f_lasti:
            self._locking_at = seen = (frame, frame.f_lasti, now)
        if _is_in_try(frame):
            limit_s = _WAITS_S
        else:
            limit_s = _STUCK_S
        is_long = now - seen[2] >= limit_s
        if is_long:
            return ""
        return f"{name} handles a lock"


_NEVER_IN = frozenset({Interrupter.call.__code__, Interrupter._on_signal.__code__})
_trip = ctypes.pythonapi.PyErr_SetInterruptEx
"""Marks a signal as arrived, so that its handler is called again at the very next moment at which Python looks: thus a
thread is followed, step by step, out of a function that handles locks. To look at it now and then is not enough: a
thread that works with locks all the time is found waiting for one nearly always.

Python looks after each call in Python code. Were this called so by the handler, the handler itself would be what is
followed. A list that is filled by `map` calls it as well, and Python looks next when the handler has returned.
"""


def _handled_in(thread: int) -> BaseException | None:
    """Returns the exception that a thread is handling; None if there is none."""
    found = sys._current_exceptions().get(thread)
    if isinstance(found, tuple):  # before Python 3.12: as by `sys.exc_info`
        return found[1]
    return found


def _module(frame: FrameType) -> str:
    """Returns the name of the module whose code a frame runs."""
    return str(frame.f_globals.get("__name__", ""))


def _is_in_try(frame: FrameType) -> bool:
    """Returns whether a `try` or `with` of the frame's own function is around what the frame executes.

    Before Python 3.11 there is no table of exception handlers, and the answer is False.

    The table (Objects/exception_handling_notes.txt of CPython) has four numbers for each entry: start, length, target,
    in units of two bytes, and depth. Each has 6 bits a byte, the highest first; 0x40 says that more follow.
    """
    table = iter(getattr(frame.f_code, "co_exceptiontable", b""))

    def number(byte: int) -> int:
        value = byte & 0x3F
        while byte & 0x40:
            byte = next(table)
            value = value << 6 | byte & 0x3F
        return value

    for byte in table:
        start, length = 2 * number(byte), 2 * number(next(table))
        number(next(table))
        number(next(table))
        if start <= frame.f_lasti < start + length:
            return True
    return False


def _stack(frame: FrameType) -> str:
    return "".join(traceback.format_stack(frame))


def _raise_in(thread: int, exception: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(exception))


def _let_arrive(own_thread: int) -> None:
    """Consumes an exception that may be pending in this thread: replaces it by another, and waits for that one.

    Python can withdraw a pending exception, but keeps its flag for one: the interpreter is then slower for good, and
    Python 3.11 loops without end under a profiler or a debugger.
    """
    try:
        _raise_in(own_thread, Interrupted)
        while True:
            pass
    except Interrupted:
        pass
