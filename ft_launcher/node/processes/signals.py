"""Signals to the launcher as a descriptor that a loop can wait for: a self-pipe.

Python writes each signal's number to the pipe (`signal.set_wakeup_fd`), and the handlers themselves do nothing. So no
signal raises an exception in the middle of a stop, and the agent's thread handles signals where it is ready for them.

Also decides three things, by pure functions: which signals the launcher handles (`to_handle`), which signal the ranks
get for one that the launcher got (`rank_signal`), and how long ranks may take to end then (`time_to_end`). Knows no
process. The signals are acted on in `agent/ending_signal.py`.
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
_ACTION_BYTES = 512  # More than enough for struct sigaction, which has 152.

_LEFT_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Left ignored where they were ignored at the start, as `nohup` does it with SIGHUP, and a shell script with SIGINT and
SIGQUIT of a command that it starts by `&`. Not SIGTERM: schedulers end a job by it."""
_SECOND_INTERRUPT_S = 3.0
"""Seconds that ranks have after a second Ctrl-C: who presses it again does not want to wait, and a small file can still
be written."""


def _noted(number: int, frame: FrameType | None) -> None:
    """Does nothing: Python has already written the signal's number to the wake-up pipe."""


def to_handle(numbers: Iterable[int], named: Collection[int]) -> set[int]:
    """Returns those of `numbers` that the launcher handles.

    Leaves out a signal of `_LEFT_IGNORED` that this process was started with as ignored.

    Args:
        named: the signals that the user named in `--signals-to-handle`. These are always handled: an option counts more
            than what the process inherited.
    """
    return {
        number
        for number in numbers
        if number in named or number not in _LEFT_IGNORED or signal.getsignal(number) is not signal.SIG_IGN
    }


class SignalPipe:
    """Handles the given signals until `close`; `read` returns those that have arrived.

    Threads: made on the main thread, the only one on which Python installs handlers. A pipe without signals can be made
    on any thread, and stays empty (`launch()` on another thread of a user's program). The agent's thread calls `read`
    and `wait`. The thread of `end_limit.py` calls `await_first`, `peek`, `arrived` and `read_at`.

    Args:
        numbers: the signals to handle.

    Attributes:
        were_ignored: those of the signals that this process ignored before.
        arrived: the signals that were read, in order of their arrival.
        read_at: when `read` was called last (monotonic seconds), whether or not a signal had arrived.
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
        """Returns the signals that have arrived since the last call, in order. Does not block.

        Leaves out signals that the pipe was not made for: Python writes the number of every signal that has a handler.
        """
        self.read_at = time.monotonic()
        arrived = self._drain()
        if arrived:
            self.arrived = [*self.arrived, *arrived]
            self.wake()
        return arrived

    def _drain(self) -> list[int]:
        """Returns the numbers that are in the pipe, without those of other signals. Does not block."""
        try:
            return [number for number in os.read(self._reader, 512) if number in self._before]
        except BlockingIOError:
            return []

    # For a thread that watches whether somebody reads them.

    def await_first(self) -> None:
        """Blocks until a signal has arrived, whether or not it was read, or another thread calls `wake`."""
        readable([self._reader, self._wakeup], None)

    def wake(self) -> None:
        """Ends `await_first`."""
        os.eventfd_write(self._wakeup, 1)

    def peek(self) -> list[int]:
        """Returns the signals that nobody has read yet. They stay in the pipe, perhaps in another order."""
        waiting = self._drain()
        if waiting:
            os.write(self._writer, bytes(waiting))
        return waiting

    def wait(self, limit_s: float) -> int | None:
        """Blocks for `limit_s` seconds at most; returns the first signal that has arrived or arrives; None: none did.

        Reads all signals that have arrived together with that one: `arrived` has them.
        """
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
        """Returns why a launcher ends that gets this signal. Called by `job/rendezvous/guarded_handler.py`."""
        return told_to_end(number)

    def close(self) -> None:
        """Restores the previous handlers and closes the pipe."""
        self.restore_handlers()
        os.close(self._reader)
        os.close(self._writer)
        os.close(self._wakeup)

    def restore_handlers(self) -> None:
        """Restores the previous handlers; the pipe stays open."""
        _in_use.discard(self)
        if not self._before:
            return
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            # Python knows no handler that C code has installed (faulthandler's), and no flags of any.
            _LIBC.sigaction(number, self._actions[number], None)


_in_use: set[SignalPipe] = set()
"""The pipes of this process that handle signals now. A fork inherits them, and must not."""


def restore_handlers_in_child() -> None:
    """Restores the handlers from before the pipes were made. To be called in a fork of this process, such as a rank.

    A rank that kept the handlers would ignore SIGTERM: nobody reads the pipe there.
    """
    for pipe in list(_in_use):
        pipe.restore_handlers()


@contextlib.contextmanager
def children_reported() -> Iterator[None]:
    """Context in which SIGCHLD is not ignored; any thread may enter it.

    While SIGCHLD is ignored, the kernel takes the exit codes of children, and the launcher would see none. The context
    is for a program that calls `launch()` and ignores SIGCHLD. It uses sigaction(2) itself, since Python changes
    handlers on the main thread only.
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
    """Returns why a launcher ends that gets this signal, such as "told to end by SIGTERM"."""
    return f"told to end by {signal_name(number)}"


@dataclass(frozen=True)
class RankSignal:
    """The signal that ends the ranks.

    Attributes:
        number: of the signal.
        always: whether a rank without a handler for `number` gets it too. If not, such a rank gets SIGTERM.
    """

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

    | signals that have arrived             | time                                             |
    |---------------------------------------|--------------------------------------------------|
    | none, or one other than Ctrl-C        | infinity: other limits apply (the time to save)  |
    | one Ctrl-C, or any two others         | `stop_timeout_s` (`--workers-stop-timeout`)      |
    | two Ctrl-C                            | `_SECOND_INTERRUPT_S`, if that is less           |
    | three Ctrl-C                          | 0: the ranks are killed at once                  |
    """
    interrupts = arrived.count(signal.SIGINT)
    if interrupts > 2:
        return 0.0
    if interrupts == 2:
        return min(_SECOND_INTERRUPT_S, stop_timeout_s)
    if interrupts == 1 or len(arrived) > 1:
        return stop_timeout_s
    return math.inf
