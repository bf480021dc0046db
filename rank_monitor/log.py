"""The monitor's own log lines, on the standard error that it has inherited. Never blocks and never raises.

Monitors, the template and the sweeper write them. Where standard error is full or closed, lines are lost, and the watch
goes on. An in-process wrapper can ask for a copy in a file of its own (`copy_to`), which gets some further lines.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import time

from rank_monitor.contract.wire.own_file import open_own

_LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
"""The numbers of `logging`, which a monitor does not import: it must start quickly."""
_MAX_LINE = 2000
"""Characters of one line. A line of ASCII then stays below PIPE_BUF (4096 bytes): up to that a write to a pipe is
atomic (pipe(7)), and lines of several monitors do not mix in one pipe."""
_STDERR = 2
"""The descriptor, which is written to directly: `sys.stderr` has a buffer."""


class Log:
    """Writes `12:34:56 [LEVEL] [name] text` lines at or above a level.

    After the local time of day they have the form of NVIDIA's monitors, which other programs search for.
    """

    def __init__(self, name: str) -> None:
        self.level = "INFO"
        self.name = name
        self._descriptor = _own_descriptor()
        self._file = -1

    def copy_to(self, path: str) -> None:
        """Also writes the log to the file at `path`, in the place of a file that was set before; empty: to no file.

        Raises:
            OSError: the file cannot be written, or is not a regular file.
        """
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if not path:
            return
        # The rank chooses the path: opening a FIFO must not block, and a link must not lead to another file.
        self._file = open_own(path, os.O_WRONLY | os.O_APPEND, 0o600)

    def copy(self, text: str) -> None:
        """Writes a line to the file of `copy_to` alone, with the date; does nothing where there is none."""
        if self._file < 0:
            return
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self.name}: {_printable(text)}\n"
        with contextlib.suppress(OSError):
            os.write(self._file, line.encode(errors="backslashreplace"))

    def info(self, text: str) -> None:
        """Logs what may help to understand what the monitor did."""
        self._write("INFO", text)

    def warning(self, text: str) -> None:
        """Logs what the user should know."""
        self._write("WARNING", text)

    def _write(self, level: str, text: str) -> None:
        """Writes one line, in one write; the file of `copy_to` gets it whatever the level is."""
        self.copy(text)
        if _LEVELS[level] < _LEVELS[self.level]:
            return
        line = f"{time.strftime('%H:%M:%S')} [{level}] [{self.name}] {_printable(text)}\n"
        try:
            if self._descriptor != _STDERR or _takes(_STDERR):
                os.write(self._descriptor, line.encode(errors="backslashreplace"))
        except OSError:
            pass


def _printable(text: str) -> str:
    """Returns a text without control characters, cut: it may hold a rank's words, and must stay one line."""
    if not text.isprintable():
        text = text.encode("unicode_escape").decode()
    return text[:_MAX_LINE]


def _own_descriptor() -> int:
    """Returns a descriptor of standard error that does not block.

    O_NONBLOCK belongs to the open file description, which other processes share (fcntl(2)). So a pipe or terminal is
    opened again through /proc; a regular file never blocks, and is used as it is.
    """
    try:
        if stat.S_ISREG(os.fstat(_STDERR).st_mode):
            return _STDERR
        return os.open(f"/proc/self/fd/{_STDERR}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return _STDERR


def _takes(descriptor: int) -> bool:
    """Whether a write would not block now. Asked where the shared description itself had to be used."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(events & select.POLLOUT for _, events in poll.poll(0))
