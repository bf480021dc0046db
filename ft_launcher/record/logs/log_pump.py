"""Copies what ranks write to their log files to the console: one thread for all streams, woken by inotify.

Ranks write to files and not to a pipe of ours. So a launcher that is slow or gone stops no rank, and a console that
nobody reads stops neither launcher nor rank. `node/ranks/rank_context.py` uses a `LogPump` in the place of torch's
`TailLog`, which has a polling thread for each file; which file goes where is read from torch's objects (their
underscored attributes, `streams_of`). `cycle_files.py` uses one for the log of a cycle.

Threads: `ft_log_pump` reads the files and writes the text; it may wait for a console that is slow. The agent's thread
calls `start` and `stop`; `stop` blocks for some seconds at most.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import IO, Any, TextIO

from ft_launcher.record.console.console import STALLED_S, Console
from ft_launcher.record.console.console_lines import ConsoleLines, Screen
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.wire.foreign import open_regular

logger = logging.getLogger(__name__)

# From <sys/inotify.h>; the standard library has no inotify.
_IN_MODIFY = 0x2
CHUNK = 1 << 16
"""Bytes of one read of a file."""
_PERIOD_S = 0.1
"""Seconds between two reads of the files, where the system has no inotify instance left
(fs.inotify.max_user_instances)."""
_LAST_LINES_S = 10.0
"""Seconds that `stop` waits for a console that reads slowly. The lines are in the ranks' files in any case."""
# Seconds between two checks whether the pump is to end, while the console has no room.
_ROOM_S = 0.2


class WrittenFiles:
    """Wakes a thread when one of several files was written, and when the thread is to end.

    Uses one inotify instance; where the system has none left, the thread wakes ten times a second. One thread calls
    `wait` and `close`; another one calls `end`, once.

    Args:
        paths: the files. A file that does not exist yet is created empty, since only a file can be watched.
    """

    def __init__(self, paths: Collection[str]) -> None:
        self._end_reader, self._end_writer = os.pipe2(os.O_CLOEXEC)
        self._inotify = _watch(paths)

    def wait(self, limit_s: float = math.inf, least_s: float = 0.0) -> bool:
        """Blocks until a file was written or `limit_s` has passed; returns False when the thread is to end.

        Args:
            limit_s: seconds at most.
            least_s: seconds at least, even if a file is written before: a rank that writes without end must not keep
                the thread busy.
        """
        if least_s and readable([self._end_reader], least_s):
            return False
        if not self._inotify:
            limit_s = min(limit_s, _PERIOD_S)
        timeout_s = None
        if limit_s < math.inf:
            timeout_s = limit_s
        ready = readable([self._end_reader, *self._inotify], timeout_s)
        for descriptor in ready.intersection(self._inotify):
            # Which file was written does not matter: each file is read from where the last read ended.
            os.read(descriptor, CHUNK)
        return self._end_reader not in ready

    def end(self) -> None:
        """Wakes the thread for good; another one calls this, once."""
        os.close(self._end_writer)

    def close(self) -> None:
        """Closes what the thread waited for, after `end`."""
        for descriptor in (self._end_reader, *self._inotify):
            os.close(descriptor)


def _watch(paths: Collection[str]) -> list[int]:
    """Returns one inotify descriptor, readable when a file was written; none where the system has none left."""
    libc = ctypes.CDLL(None)
    inotify: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    for path in paths:
        with contextlib.suppress(OSError):
            # A file must exist to be watched; ranks create theirs when they start.
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644))
    watched = [libc.inotify_add_watch(inotify, os.fsencode(path), _IN_MODIFY) >= 0 for path in paths]
    if inotify < 0:
        return []
    if not all(watched):
        os.close(inotify)
        return []
    return [inotify]


@dataclass
class Stream:
    """One log file of a rank, and where its lines go.

    Attributes:
        path: the file.
        prefix: stands before each line.
        to: the console, or a file.
        wanted: whether a line is copied; not asked for a console.
        live: for a console: decides what is shown and when. None: whole lines are copied.
        file: the open file; None until the first copy.
        partial: the begin of a line that has no end yet.
        last_lines_s: how long `LogPump.stop` may wait for the last lines (seconds).
    """

    path: str
    prefix: str
    to: TextIO
    wanted: Callable[[str], bool]
    live: ConsoleLines | None = None
    file: IO[bytes] | None = None
    partial: bytes = b""
    last_lines_s: float = _LAST_LINES_S

    def copy_new(self, has_room: Callable[[TextIO], bool], ended: bool = False) -> bool:
        """Copies what was written to the file since the last call.

        Args:
            has_room: asked before each chunk; it may block while the console is full.
            ended: the rank has ended: a last line without an end is copied too.

        Returns:
            False if `has_room` returned False before all was copied.
        """
        if self.file is None:
            self.file = open_regular(self.path, follow_link=True, buffering=0)
        wrote = False
        while has_room(self.to):
            content = self.file.read(CHUNK)
            text = self._text(content, last=ended and not content)
            if text:
                self.to.write(text)
                wrote = True
            if not content:
                if wrote:
                    self.to.flush()
                return True
        return False

    def due(self) -> float:
        """When `copy_new` must be called again for a line without an end (monotonic seconds); infinity: no line
        waits."""
        if self.live is None:
            return math.inf
        return self.live.due()

    def close(self) -> None:
        """Closes the file."""
        if self.file is not None:
            self.file.close()

    def _text(self, content: bytes, last: bool) -> str:
        if self.live is not None:
            return self.live.feed(content, time.monotonic(), last)
        *whole, self.partial = (self.partial + content).split(b"\n")
        if last and self.partial:
            whole.append(self.partial)
            self.partial = b""
        texts = (line.decode(errors="replace") for line in whole)
        return "".join(f"{self.prefix}{line}\n" for line in texts if self.wanted(line))


class LogPump:
    """Copies streams from `start` until `stop`, in a thread of its own.

    `stop` returns after the last line, or when its time is over. A destination that is no `Console` may block a write
    without limit; then the thread is left behind, and copies nothing more when it comes back.
    """

    def __init__(self, streams: Iterable[Stream]) -> None:
        self._streams = list(streams)
        self._thread: threading.Thread | None = None
        self._written: WrittenFiles | None = None
        self._stop_by = math.inf
        self._is_given_up = False
        self._cut: set[str] = set()

    @property
    def paths(self) -> set[str]:
        """The log files that it copies."""
        return {stream.path for stream in self._streams}

    def start(self) -> None:
        """Starts the thread; the files need not exist yet."""
        if not self._streams:
            return
        self._written = WrittenFiles(self.paths)
        self._thread = threading.Thread(target=self._run, args=(self._written,), daemon=True, name="ft_log_pump")
        self._thread.start()

    def stop(self) -> None:
        """Copies what is left and ends the thread. Blocks for `last_lines_s` and a second at most; a second call does
        nothing. Called after the ranks have ended."""
        if self._thread is None or self._written is None:
            return
        limit_s = min(stream.last_lines_s for stream in self._streams)
        # From now on `_has_room` gives up on a console that does not read.
        self._stop_by = time.monotonic() + limit_s
        self._written.end()
        self._thread.join(limit_s + STALLED_S)
        self._is_given_up = self._thread.is_alive()
        self._thread = None

    def _run(self, written: WrittenFiles) -> None:
        try:
            self._copy_all()
            # A line without an end is shown after a while.
            while written.wait(min(stream.due() for stream in self._streams) - time.monotonic()):
                self._copy_all()
        finally:
            self._copy_all(ended=True)
            written.close()
            for stream in self._streams:
                stream.close()

    def _copy_all(self, ended: bool = False) -> None:
        for stream in self._streams:
            if self._is_given_up:  # the thread was left behind: the files may be those of the next cycle now
                return
            with contextlib.suppress(OSError, ValueError):  # a console that is gone stops no rank
                if not stream.copy_new(self._has_room, ended) and stream.path not in self._cut:
                    self._cut.add(stream.path)
                    logger.warning("the console does not read: the last lines of %s are not shown", stream.path)

    def _has_room(self, to: TextIO) -> bool:
        """Blocks until more can be written to a console; the files keep the lines meanwhile.

        Returns:
            False if the pump is to end, and the console does not read or the time for the last lines is over.
        """
        if not isinstance(to, Console):
            return True
        while True:
            ends = self._stop_by < math.inf
            if ends and (to.stalled or time.monotonic() > self._stop_by):
                return False
            if to.await_room(_ROOM_S):
                return True


def streams_of(name: str, tails: Iterable[Any]) -> list[Stream]:
    """Returns the streams that torch's `TailLog` objects would copy.

    Args:
        name: the name of the role, for the prefix of streams without one of their own.
        tails: torch's objects; their underscored attributes say which file goes where, and with which prefix.
    """
    streams, screens = [], defaultdict[object, Screen](Screen)
    for tail in tails:
        is_console = tail._dst in (sys.stdout, sys.stderr)
        prefixes = tail._log_line_prefixes or {}
        wanted = getattr(tail, "_log_line_filter", None) or (lambda line: True)
        for local_rank, path in tail._log_files.items():
            prefix = prefixes.get(local_rank, f"[{name}{local_rank}]:")
            if is_console:
                live = ConsoleLines(prefix, screens[identity(tail._dst)])
            else:
                live = None
            streams.append(Stream(path, prefix, tail._dst, wanted, live))
    return streams


def identity(stream: TextIO) -> object:
    """Returns a key for where a stream goes: equal for stdout and stderr if both are one terminal or pipe."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return id(stream)
    return found.st_dev, found.st_ino
