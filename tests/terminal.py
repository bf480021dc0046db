"""A terminal for tests: a program runs in it, reads keys, and what it shows is read as text without its commands."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence

from tests.patience import patient

_COMMAND = re.compile(rb"\x1b(\[[0-?]*[ -/]*[@-~]|[@-Z\\-_])")
"""Escape sequences of ECMA-48."""


class Terminal:
    """One program in a terminal of its own.

    Attributes:
        raw: what it has written since the last key.
    """

    def __init__(self, process: subprocess.Popen[bytes], end: int) -> None:
        self.process, self._end = process, end
        self.raw = b""

    def press(self, keys: str) -> None:
        """Types keys. What was shown before is forgotten."""
        self.raw = b""
        os.write(self._end, keys.encode())

    def until(self, text: str, limit_s: float = 60.0) -> str:
        """Waits until a text was shown; returns all that was since the last key."""
        deadline = time.monotonic() + patient(limit_s)
        while text not in self.shown():
            left_s = deadline - time.monotonic()
            assert left_s > 0 and select.select([self._end], [], [], left_s)[0], f"waited for {text!r}: {self.shown()}"
            assert self._read(), f"the program ended before {text!r}: {self.shown()}"
        return self.shown()

    def shown(self) -> str:
        """All that was shown since the last key."""
        return _COMMAND.sub(b"", self.raw).decode(errors="replace")

    def finish(self, limit_s: float = 60.0) -> int:
        """Waits for the end of the program; returns its exit code."""
        deadline = time.monotonic() + patient(limit_s)
        while select.select([self._end], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not self._read():
                break
        return self.process.wait(patient(limit_s))

    def _read(self) -> bytes:
        try:
            found = os.read(self._end, 65536)
        except OSError:  # the other end was closed: the program has ended
            found = b""
        self.raw += found
        return found


@contextlib.contextmanager
def terminal(
    words: Sequence[str], environ: Mapping[str, str], columns: int = 120, lines: int = 40
) -> Iterator[Terminal]:
    """Runs a program in a terminal of this size; it is killed at the end if it still lives."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))
    process = subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, env={**environ, "TERM": "xterm-256color"}
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
