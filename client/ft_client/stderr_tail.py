"""Keeps the end of what this process prints to its stderr, in case it prints its error itself and exits with a code.

It stands beneath `sys.stderr`, in the place of the file object there, so that the script finds the same stream with the
same descriptor, encoding and buffering. What C code or another process writes to the descriptor is not seen.
"""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from typing import Any

_MOST = 8000  # as of a traceback that is reported


class FileIO(io.FileIO):
    """A file that remembers the end of what was written to it; it has the name of what it stands for."""

    __module__ = "_io"

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.name = "<stderr>"

    def write(self, data: Any) -> int:
        """Writes as a file does."""
        written = super().write(data)
        if written:
            _kept.extend(memoryview(data).cast("B")[:written])
            if len(_kept) > 2 * _MOST:
                del _kept[:-_MOST]
        return written


_kept = bytearray()


def keep() -> None:
    """Begins to keep what is written, if `sys.stderr` writes to its descriptor at once, as under `python -u`."""
    stream = sys.stderr
    if type(stream) is not io.TextIOWrapper or type(stream.buffer) is not io.FileIO:
        return
    with suppress(OSError, ValueError):
        tail = FileIO(stream.fileno())
        io.TextIOWrapper.__init__(
            stream, tail, stream.encoding, stream.errors, "\n", stream.line_buffering, stream.write_through
        )


def text() -> str:
    """The end of what was written."""
    return _kept.decode(errors="replace")[-_MOST:]
