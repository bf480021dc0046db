"""Signals to the launcher as something a loop can wait for: a self-pipe. A handler does nothing, so none breaks a stop.

Also names of signals as numbers, and which signal the ranks get for one that the launcher got. Knows no process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from types import FrameType

from ft_launcher.options import nearest
from rank_monitor.contract.wait import readable

_LIBC = ctypes.CDLL(None)
_ACTION_BYTES = 512  # struct sigaction has 152


def _noted(number: int, frame: FrameType | None) -> None:
    """The byte in the wake-up pipe says it; nothing else happens in a handler."""


class SignalPipe:
    """Takes over the given signals until `close`; `read` returns those that came since.

    Only the main thread can take signals over; without any the pipe can be made in all, and stays silent.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        numbers = set(numbers)
        self._actions = {number: _action(number) for number in numbers}
        self._before = {number: signal.signal(number, _noted) for number in numbers}
        for number in self._before:
            signal.siginterrupt(number, False)
        if self._before:
            self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        _in_use.add(self)

    def fileno(self) -> int:
        """Readable when a signal came."""
        return self._reader

    def read(self) -> list[int]:
        """The signals that came since the last call, in order; others that Python handles are left out."""
        try:
            return [number for number in os.read(self._reader, 512) if number in self._before]
        except BlockingIOError:
            return []

    def wait(self, limit_s: float) -> int | None:
        """The first signal that comes within `limit_s`, or had come before; None: none did."""
        deadline = time.monotonic() + limit_s
        while not (came := self.read()) and (left := deadline - time.monotonic()) > 0:
            readable([self._reader], left)
        return came[0] if came else None

    def close(self) -> None:
        """Gives every signal its former handler."""
        self.let_go()
        os.close(self._reader)
        os.close(self._writer)

    def let_go(self) -> None:
        """Gives every signal its former handler; the pipe stays open."""
        _in_use.discard(self)
        if not self._before:
            return
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            _LIBC.sigaction(number, self._actions[number], None)  # one that C installed (faulthandler), and its flags


_in_use: set[SignalPipe] = set()


def let_go_in_child() -> None:
    """In a fork of this process: its signals are as they were before the pipes were made."""
    for pipe in list(_in_use):
        pipe.let_go()


def _action(number: int) -> ctypes.Array[ctypes.c_char]:
    """The kernel's action for a signal, as `sigaction` tells it."""
    action = ctypes.create_string_buffer(_ACTION_BYTES)
    _LIBC.sigaction(number, None, action)
    return action


@dataclass(frozen=True)
class RankSignal:
    """The signal that ends the ranks. `always`: a rank without a handler gets it too, instead of SIGTERM."""

    number: int
    always: bool


_TRANSLATED = (signal.SIGTERM, signal.SIGHUP)


def rank_signal(number: int, named: Collection[int], preemption_signal: int) -> RankSignal:
    """The signal that the ranks get when the launcher got `number`.

    A signal that the user named in `--signals-to-handle` reaches the ranks as it is, as under torchrun. SIGTERM and
    SIGHUP become `preemption_signal` otherwise; other signals stay what they are.
    """
    if number in named:
        return RankSignal(number, always=True)
    return RankSignal(preemption_signal if number in _TRANSLATED else number, always=False)


def named_signals(names: str) -> frozenset[int]:
    """The numbers of the signals in `--signals-to-handle`, unknown names left out.

    Raises:
        ValueError: no process can handle one of them.
    """
    numbers = frozenset(numbers_of(names))
    if impossible := numbers & {signal.SIGKILL, signal.SIGSTOP}:
        name = signal.Signals(min(impossible)).name
        raise ValueError(f"{name} cannot be handled by a process")
    return numbers


def about_names(names: str) -> list[str]:
    """A warning about each name in `--signals-to-handle` that is not a signal here."""
    known = signal.Signals.__members__
    unknown = [name for name in map(str.strip, names.split(",")) if name and name not in known]
    return [f"--signals-to-handle: {name} is not a signal, left out{nearest(name, known)}" for name in unknown]


def numbers_of(names: str) -> tuple[int, ...]:
    """`SIGTERM,SIGINT` as numbers; names this system lacks are left out, as torch does."""
    known = (getattr(signal, name.strip(), None) for name in names.split(","))
    return tuple(int(number) for number in known if isinstance(number, signal.Signals))
