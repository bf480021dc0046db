"""The monitor's own log lines, on the standard error it inherited. Never blocks and never raises.

A full or closed standard error loses lines; the watch goes on.
"""

from __future__ import annotations

import os
import select
import stat

_LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
_MAX_LINE = 2000
_STDERR = 2


class Log:
    """Writes `[LEVEL] [name] text` lines at or above a level."""

    def __init__(self, level: str, name: str) -> None:
        self.level = level
        self.name = name
        self._descriptor = _own_descriptor()

    def info(self, text: str) -> None:
        """What happened."""
        self._write("INFO", text)

    def warning(self, text: str) -> None:
        """What somebody should know of."""
        self._write("WARNING", text)

    def _write(self, level: str, text: str) -> None:
        if _LEVELS[level] < _LEVELS[self.level]:
            return
        if not text.isprintable():
            text = text.encode("unicode_escape").decode()
        line = f"[{level}] [{self.name}] {text[:_MAX_LINE]}\n"
        try:
            if self._descriptor != _STDERR or _takes(_STDERR):
                os.write(self._descriptor, line.encode(errors="backslashreplace"))
        except OSError:
            pass


def _own_descriptor() -> int:
    """Standard error; a pipe or terminal opened anew, so that not blocking is for us alone."""
    try:
        if stat.S_ISREG(os.fstat(_STDERR).st_mode):
            return _STDERR
        return os.open(f"/proc/self/fd/{_STDERR}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return _STDERR


def _takes(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(events & select.POLLOUT for _, events in poll.poll(0))
