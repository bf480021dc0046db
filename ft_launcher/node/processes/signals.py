"""Signals to the launcher as a descriptor that a loop can wait for: a self-pipe. Handlers do nothing themselves, so
that no signal can raise in the middle of a stop.

Also decides which signals the launcher handles, which signal the ranks get for one that the launcher got, and how long
they may take to end then. Knows no process.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.settings.kinds import signal_name

_LIBC = ctypes.CDLL(None)
_ACTION_BYTES = 512  # struct sigaction has 152

_LEFT_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Left ignored where they were ignored at the start, as `nohup` does it with SIGHUP, and a shell script with SIGINT and
SIGQUIT of a command that it starts by `&`. Not SIGTERM: schedulers end a job by it."""
_SECOND_INTERRUPT_S = 3.0
"""Seconds that ranks have after a second Ctrl-C: who presses it again does not want to wait, and a small file can still
be written."""


def _noted(number: int, frame: FrameType | None) -> None:
    """Does nothing: Python has already written the signal's number to the wake-up pipe."""


def to_handle(numbers: Iterable[int], named: Collection[int]) -> set[int]:
    """Returns those of `numbers` that the launcher handles: all but those that this process ignores and is to ignore.

    Args:
        named: the signals that the user named in `--signals-to-handle`: an option counts more than what was inherited.
    """
    return {
        number
        for number in numbers
        if number in named or number not in _LEFT_IGNORED or signal.getsignal(number) is not signal.SIG_IGN
    }


class SignalPipe:
    """Handles the given signals until `close`; `read` returns those that have arrived.

    Only the main thread can install handlers. Without signals the pipe can be made in any thread, and stays empty.

    `were_ignored`: those of the signals that this process ignored before. `arrived`: those that were read, in order.
    `read_at`: when they were read last (monotonic seconds).
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.arrived: list[int] = []
        self.read_at = time.monotonic()
        numbers = set(numbers)
        self._actions = {number: _action(number) for number in numbers}
        self._before = {number: signal.signal(number, _noted) for number in numbers}
        self.were_ignored = sorted(number for number, handler in self._before.items() if handler is signal.SIG_IGN)
        for number in self._before:
            # Restarted system calls (SA_RESTART): C code that does not expect EINTR goes on.
            signal.siginterrupt(number, False)
        # A full pipe is readable anyway, and a warning would be printed from within the handler.
        if self._before:
            self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        _in_use.add(self)

    def fileno(self) -> int:
        """Returns a descriptor that is readable when a signal has arrived."""
        return self._reader

    def read(self) -> list[int]:
        """Returns the signals since the last call, in order, without others that Python handles. Does not block."""
        self.read_at = time.monotonic()
        arrived = self._drain()
        if arrived:
            self.arrived = [*self.arrived, *arrived]
            self.wake()
        return arrived

    def _drain(self) -> list[int]:
        try:
            return [number for number in os.read(self._reader, 512) if number in self._before]
        except BlockingIOError:
            return []

    # For a thread that watches whether somebody reads them.

    def await_first(self) -> None:
        """Waits until the first signal has arrived, read or not, or another thread calls `wake`."""
        readable([self._reader, self._wakeup], None)

    def wake(self) -> None:
        """Ends `await_first`."""
        os.eventfd_write(self._wakeup, 1)

    def peek(self) -> list[int]:
        """Returns the signals that nobody has read yet, which stay. A reader meanwhile may get another order."""
        waiting = self._drain()
        if waiting:
            os.write(self._writer, bytes(waiting))
        return waiting

    def wait(self, limit_s: float) -> int | None:
        """Returns the first signal that is pending or arrives within `limit_s` seconds; None without one."""
        deadline = time.monotonic() + limit_s
        while True:
            arrived = self.read()
            if arrived:
                return arrived[0]
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            readable([self._reader], left_s)

    def why_ended(self, number: int) -> str:
        """Returns why a launcher ends that gets a signal, by the signal's name."""
        return told_to_end(number)

    def close(self) -> None:
        """Restores the former handlers and closes the pipe."""
        self.let_go()
        os.close(self._reader)
        os.close(self._writer)
        os.close(self._wakeup)

    def let_go(self) -> None:
        """Restores the former handlers; the pipe stays open."""
        _in_use.discard(self)
        if not self._before:
            return
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            _LIBC.sigaction(number, self._actions[number], None)  # one that C installed (faulthandler), and its flags


_in_use: set[SignalPipe] = set()


def let_go_in_child() -> None:
    """Restores, in a fork of this process, the handlers from before the pipes were made."""
    for pipe in list(_in_use):
        pipe.let_go()


@contextlib.contextmanager
def children_reported() -> Iterator[None]:
    """Context in which SIGCHLD is not ignored: the kernel takes the exit codes of children where it is.

    For a program that calls `launch()`, in any thread; Python sets signals in the main thread only.
    """
    if signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
        yield
        return
    before = _action(signal.SIGCHLD)
    _LIBC.sigaction(signal.SIGCHLD, ctypes.create_string_buffer(_ACTION_BYTES), None)  # zeros: SIG_DFL, no flags
    try:
        yield
    finally:
        _LIBC.sigaction(signal.SIGCHLD, before, None)


def _action(number: int) -> ctypes.Array[ctypes.c_char]:
    """Returns the kernel's action for a signal (`struct sigaction`)."""
    action = ctypes.create_string_buffer(_ACTION_BYTES)
    _LIBC.sigaction(number, None, action)
    return action


def told_to_end(number: int) -> str:
    """Returns why a launcher ends that gets a signal, by the signal's name."""
    return f"told to end by {signal_name(number)}"


@dataclass(frozen=True)
class RankSignal:
    """The signal that ends the ranks. `always`: a rank without a handler for it gets it too, instead of SIGTERM."""

    number: int
    always: bool


# Schedulers end a launcher by SIGTERM, a lost terminal by SIGHUP; to the ranks both are a preemption.
_TRANSLATED = (signal.SIGTERM, signal.SIGHUP)


def rank_signal(number: int, named: Collection[int], preemption_signal: int) -> RankSignal:
    """Returns the signal that the ranks get when the launcher got `number`.

    A signal that the user named in `--signals-to-handle` reaches the ranks as it is, as under torchrun. SIGTERM and
    SIGHUP become `preemption_signal` otherwise; other signals stay what they are.
    """
    if number in named:
        return RankSignal(number, always=True)
    if number in _TRANSLATED:
        return RankSignal(preemption_signal, always=False)
    return RankSignal(number, always=False)


def time_to_end(arrived: Sequence[int], stop_timeout_s: float) -> float:
    """Returns how long ranks may still take to end when these signals have arrived at the launcher (seconds). Pure.

    The first signal leaves them their time, but for Ctrl-C: it and every second signal leave `stop_timeout_s`. A second
    Ctrl-C leaves less, and the third nothing.
    """
    interrupts = arrived.count(signal.SIGINT)
    if interrupts > 2:
        return 0.0
    if interrupts == 2:
        return min(_SECOND_INTERRUPT_S, stop_timeout_s)
    if interrupts == 1 or len(arrived) > 1:
        return stop_timeout_s
    return math.inf
