"""Reports how this rank ends to the launcher: an exception through the monitor and in torch's error file.

`bootstrap.py` calls it, with a traceback without our frames. The launcher finds by these reports which rank failed
first, and prints the error of that rank.

**Two reports of an error.** `report_failure` goes out at once and runs no code of the program; `report` follows with
the text of the exception, which is the program's own code and may never return.

The error file has the form of torch's `record` decorator. A file that the decorator has written already is left as it
is. torch is not needed.

**Without an exception.** A program may print its error itself and exit with a code. Then the end of what the process
printed to its stderr is reported instead. `keep_stderr` replaces the raw file below `sys.stderr`, so that the script
finds the same stream with the same descriptor, encoding and buffering. What C code or another process writes to the
descriptor is not seen.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from ft_client.rank.monitoring import process
from ft_client.rank.monitoring.watchdog import has_made_no_group
from rank_monitor.contract.errors import both_ends, text_of
from rank_monitor.contract.wire.messages import LastOutput, Message, ProgramFailed, RankException, Returned

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_MAX_MESSAGE, _MAX_TRACEBACK, _MAX_OUTPUT = 2000, 7000, 8000
"""Characters that are reported. A character takes at most six bytes in JSON (a control character does), so message and
traceback together fit into a message of 60,000 bytes."""
_MAX_FRAMES = (20, 8, 3)
"""Innermost frames of each exception of a chain or group, tried in this order where all frames would not fit. What is
raised says more than where, and stands behind the frames. Twenty are most of the way from a training step into
torch."""
_SEND_TIMEOUT_S = 0.2
"""The rank is about to exit: a monitor that does not read must not hold that up."""
_kept = bytearray()
"""The end of what was written to stderr: as much as is reported of it, and at most twice that."""


def report_failure(error: BaseException | None, trace: TracebackType | None, exit_code: int) -> None:
    """Reports at once that the program has ended with an error. Does nothing in a forked child: it is not the rank.

    Calls no code of the program. What follows is the program's own, and may never end: the text of its exception,
    threads that are no daemons, exit functions. The launcher limits that from now on.

    Args:
        error: the exception that is reported next; None: none is known.
        trace: the traceback to be reported.
        exit_code: with which the process will end.
    """
    if process.is_forked():
        return
    kind, text = "", ""
    if error is not None and not isinstance(error, (SystemExit, KeyboardInterrupt)):
        kind = _name(type(error))
        text = both_ends("Traceback (most recent call last):\n" + "".join(traceback.format_tb(trace)), _MAX_TRACEBACK)
    _send(ProgramFailed(kind, text, exit_code, time.time()))


def report(error: BaseException | None, trace: TracebackType | None) -> None:
    """Reports an uncaught exception other than KeyboardInterrupt, or that the program returned. Does nothing in a
    forked child: it is not the rank.

    Args:
        error: the exception. None: the rank exits with an error and without a known exception, and the end of its
            stderr is reported. `SystemExit()`: the program returned, and its threads and exit functions are done.
        trace: the traceback to be reported.
    """
    if process.is_forked() or isinstance(error, KeyboardInterrupt):
        return
    if error is None:
        printed = _kept.decode(errors="replace")[-_MAX_OUTPUT:]
        if printed:
            _send(LastOutput(printed, has_made_no_group()))
        return
    if isinstance(error, SystemExit) and error.code is None:
        # The connections to other ranks end now, and those may fail before this process has ended.
        _send(Returned())
        return
    text = "".join(traceback.format_exception(type(error), error, trace))
    message = text_of(error)
    with contextlib.suppress(OSError):
        _write_error_file(f"{type(error).__name__}: {message}", text)
    for frames in _MAX_FRAMES:
        if len(text) > _MAX_TRACEBACK:
            text = "".join(traceback.format_exception(type(error), error, trace, limit=-frames))
    kind, message = _name(type(error)), both_ends(message, _MAX_MESSAGE)
    _send(RankException(kind, message, both_ends(text, _MAX_TRACEBACK), time.time(), has_made_no_group()))


def _send(message: Message) -> None:
    """Sends a report to the monitor, if there is one. Blocks for up to 0.2 s."""
    link = process.current()
    if link is not None:
        link.post(message, time.monotonic_ns(), _SEND_TIMEOUT_S)


def _write_error_file(message: str, text: str) -> None:
    """Writes torch's error file, unless it exists. Raises OSError (FileExistsError too)."""
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with Path(path).open("x") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)


def _name(kind: type) -> str:
    """Returns the name of an exception's class as a traceback shows it."""
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


class FileIO(io.FileIO):
    """A file that keeps the end of what is written to it. Its class and its name look like those of the file that it
    replaces: a script may print or compare them."""

    __module__ = "_io"

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.name = "<stderr>"

    def __repr__(self) -> str:
        """Returns the text of the file that this one replaces: from Python 3.13 on the text of a class that is made in
        Python has no module in it."""
        return super().__repr__().replace("<FileIO", "<_io.FileIO", 1)

    def write(self, data: Any) -> int:
        """Writes `data` and keeps its end. Returns the number of bytes written."""
        written = super().write(data)
        if written:
            _kept.extend(memoryview(data).cast("B")[:written])
            if len(_kept) > 2 * _MAX_OUTPUT:
                del _kept[:-_MAX_OUTPUT]
        return written


def keep_stderr() -> None:
    """Begins to keep the end of what is written to stderr. Does nothing where `sys.stderr` is not as `python -u` makes
    it."""
    stream = sys.stderr
    if type(stream) is not io.TextIOWrapper or type(stream.buffer) is not io.FileIO:
        return
    with contextlib.suppress(OSError, ValueError):
        tail = FileIO(stream.fileno())
        io.TextIOWrapper.__init__(
            stream, tail, stream.encoding, stream.errors, "\n", stream.line_buffering, stream.write_through
        )
