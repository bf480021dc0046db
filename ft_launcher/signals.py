"""Signals to the launcher as something a loop can wait for: a self-pipe. A handler does nothing, so none breaks a stop.

Knows no process and decides nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from types import FrameType


def _noted(number: int, frame: FrameType | None) -> None:
    """The byte in the wake-up pipe says it; nothing else happens in a handler."""


class SignalPipe:
    """Takes over the given signals until `close`; `read` returns those that came since."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before = {number: signal.signal(number, _noted) for number in numbers}
        for number in self._before:
            signal.siginterrupt(number, False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def fileno(self) -> int:
        """Readable when a signal came."""
        return self._reader

    def read(self) -> list[int]:
        """The signals that came since the last call, in order; others that Python handles are left out."""
        try:
            return [number for number in os.read(self._reader, 512) if number in self._before]
        except BlockingIOError:
            return []

    def close(self) -> None:
        """Gives every signal its former handler."""
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        os.close(self._reader)
        os.close(self._writer)


def numbers_of(names: str) -> tuple[int, ...]:
    """`SIGTERM,SIGINT` as numbers; names this system lacks are left out, as torch does."""
    known = (getattr(signal, name.strip(), None) for name in names.split(","))
    return tuple(int(number) for number in known if isinstance(number, signal.Signals))
