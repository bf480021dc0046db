"""The launcher's standard output and standard error while a job runs: queues, each with a thread that writes.

A pipe holds 64 KiB. When nobody reads the pipe, a write blocks, and with it would block the restart after a fault and
the end after SIGTERM. So writers only append to a bounded queue; text that does not fit is dropped and counted, and a
line says so in its place. torch's C++ code writes to the descriptor itself; `quiet_torch` keeps it from doing so.

Threads: one `ft_console` for each of the two streams takes text from the queue and is the only one that blocks on the
pipe. Any thread may write. `install` is called by the command line; `launch()` does not, since the streams belong to
the user's program there.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from typing import Any, TextIO

from rank_monitor.contract.console_line import console_line
from rank_monitor.contract.processes import torch_log

MAX_HELD_BYTES = 4 << 20
"""Bytes of a queue: as many lines as a terminal shows in a few seconds. What ranks print is in their log files too."""
STALLED_S = 1.0
"""Seconds without progress after which a console counts as not read. The launcher's end does not wait for it then."""
_DRAIN_S = 10.0
"""Seconds that the launcher's end waits for a console that reads slowly."""
_PIECE = 16 << 10
"""Bytes of one write: a quarter of a pipe, so that a slow reader still makes visible progress."""


class Console:
    """A text stream whose `write` never blocks and never raises. All other attributes are those of `stream`.

    Args:
        stream: a stream with a descriptor. Nothing else may write to it from now on, or texts would be mixed.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._descriptor = stream.fileno()
        self._encoding = stream.encoding or "utf-8"
        self._held: deque[bytes] = deque()
        self._bytes = 0
        self._skips = False
        self._moved_at = 0.0
        self._changed = threading.Condition()
        self.dropped = 0
        """Number of lines that were dropped."""
        threading.Thread(target=self._run, daemon=True, name="ft_console").start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Appends `text` to the queue, or drops it when the queue is full; returns its length."""
        # Characters that the console's encoding lacks are escaped: a rank may have put anything into its message.
        self.write_bytes(text.encode(self._encoding, "backslashreplace"))
        return len(text)

    def write_bytes(self, data: bytes) -> None:
        """Appends bytes to the queue as they are, or drops them when the queue is full."""
        with self._changed:
            if self._skips or self._bytes + len(data) > MAX_HELD_BYTES:
                # Once something was dropped, all is dropped until the queue is empty: one gap, with one line about it.
                self._skips = True
                self.dropped += data.count(b"\n")
            else:
                self._append(data)

    def flush(self) -> None:
        """Does nothing; `drain` waits for the queue."""

    @property
    def stalled(self) -> bool:
        """Whether the queue has text and the console took none for `STALLED_S`."""
        with self._changed:
            return self._bytes > 0 and time.monotonic() - self._moved_at >= STALLED_S

    def await_room(self, limit_s: float) -> bool:
        """Waits until half of the queue is free; returns whether it is. Blocks for `limit_s` at most. For callers that
        can wait and must not lose lines: the log pump."""
        with self._changed:
            return self._changed.wait_for(lambda: self._bytes <= MAX_HELD_BYTES // 2, limit_s)

    def drain(self) -> None:
        """Waits until all text is written: for `_DRAIN_S` at most, and only as long as the console takes text."""
        deadline = time.monotonic() + _DRAIN_S
        with self._changed:
            while self._bytes and time.monotonic() < deadline:
                if time.monotonic() - self._moved_at >= STALLED_S:
                    return
                self._changed.wait(STALLED_S)

    def _append(self, data: bytes) -> None:
        if not self._bytes:
            self._moved_at = time.monotonic()
        self._held.append(data)
        self._bytes += len(data)
        self._changed.notify_all()

    def _run(self) -> None:
        """Writes what is queued, for ever; the loop of the thread."""
        with contextlib.suppress(OSError, ValueError):
            # What was written before is in the stream's own buffer, and comes first.
            self._stream.flush()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._held)
                data = self._held.popleft()
            self._put(data)
            with self._changed:
                if self._skips and not self._held:
                    self._skips = False
                    line = console_line(f"the console did not read; lines not shown: {self.dropped}", time.time())
                    self._append(f"{line}\n".encode())

    def _put(self, data: bytes) -> None:
        """Writes bytes to the descriptor, however long the reader takes. An error drops them: nobody reads any more."""
        while data:
            try:
                written = os.write(self._descriptor, data[:_PIECE])
            except BlockingIOError:  # another process that shares the pipe has set O_NONBLOCK
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()
                continue
            except OSError:  # nobody reads it any more
                written = len(data)
            data = data[written:]
            with self._changed:
                self._bytes -= written
                self._moved_at = time.monotonic()
                self._changed.notify_all()


def install() -> None:
    """Replaces `sys.stdout` and `sys.stderr` by consoles, also in existing log handlers. Registers `drain` for the end
    of the process. A second call does nothing to a stream that is a console already."""
    replaced: dict[int, Console] = {}
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if not isinstance(stream, Console):
                replaced[id(stream)] = Console(stream)
                setattr(sys, name, replaced[id(stream)])
    known = [logging.getLogger(), *logging.root.manager.loggerDict.values()]
    for log in known:
        for handler in getattr(log, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and id(handler.stream) in replaced:
                handler.stream = replaced[id(handler.stream)]  # setStream would flush the old one, and may block
    atexit.register(drain)


def drain() -> None:
    """Waits until both consoles have written their queues, for `_DRAIN_S` each at most."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Console):
            stream.drain()


def dropped() -> int:
    """Returns how many lines both consoles have dropped so far."""
    return sum(stream.dropped for stream in (sys.stdout, sys.stderr) if isinstance(stream, Console))


def quiet_torch() -> None:
    """Makes torch's C++ code print only what is fatal in this process, unless the user sets TORCH_CPP_LOG_LEVEL.

    Each connection that breaks makes the launcher's stores print twenty lines and a C++ stack to standard error. The
    same arrives as a Python exception, which is reported in one line. Processes forked before keep their level.
    """
    if torch_log.LEVEL not in os.environ:
        import torch

        torch_log.only_fatal(torch)
