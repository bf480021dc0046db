"""Keeps the end of what this process prints to its stderr, in case it prints its error itself and exits with a code.

It replaces the raw file below `sys.stderr`, so that the script finds the same stream with the same descriptor, encoding
and buffering. What C code or another process writes to the descriptor is not seen. `bootstrap.py` calls it.
"""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from typing import Any

# As much as is reported of a traceback (`exception_report.py`).
_MOST = 8000


class FileIO(io.FileIO):
    """A file that keeps the end of what is written to it. Class and name are those of the file it replaces."""

    __module__ = "_io"

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.name = "<stderr>"

    def write(self, data: Any) -> int:
        """Writes `data` and keeps its end. Returns the number of bytes written."""
        written = super().write(data)
        if written:
            _kept.extend(memoryview(data).cast("B")[:written])
            if len(_kept) > 2 * _MOST:
                del _kept[:-_MOST]
        return written


_kept = bytearray()


def keep() -> None:
    """Begins to keep what is written, if `sys.stderr` is unbuffered, as under `python -u`; else does nothing."""
    stream = sys.stderr
    if type(stream) is not io.TextIOWrapper or type(stream.buffer) is not io.FileIO:
        return
    with suppress(OSError, ValueError):
        tail = FileIO(stream.fileno())
        io.TextIOWrapper.__init__(
            stream, tail, stream.encoding, stream.errors, "\n", stream.line_buffering, stream.write_through
        )


def text() -> str:
    """The end of what was written, at most 8000 characters."""
    return _kept.decode(errors="replace")[-_MOST:]
