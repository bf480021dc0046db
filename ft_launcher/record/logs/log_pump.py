"""Copies what ranks write to their log files to the console: one thread for all streams, woken by inotify.

Ranks write to files, not to a pipe of ours: a launcher that is slow or gone stops no rank, and a console that does not
read stops neither. Used by `node/ranks/rank_context.py` in the place of torch's `TailLog`, and by `cycle_files.py` for
the log of a cycle, whose threads poll; which file goes where is read from those (their underscored attributes).
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
"""Bytes of one read."""
_PERIOD_S = 0.1
"""Seconds between two reads of the files where no inotify instance is left (fs.inotify.max_user_instances)."""
_LAST_LINES_S = 10.0
"""Seconds after the ranks' end, for a console that reads slowly. The lines are in the ranks' files as well."""
# Seconds between two looks whether the pump is to end, while the console has no room.
_ROOM_S = 0.2


class WrittenFiles:
    """Wakes a thread when files were written, and when it is to end. One inotify instance, if the system has one left.

    Args:
        paths: of the files, which need not exist yet.
    """

    def __init__(self, paths: Collection[str]) -> None:
        self._end_reader, self._end_writer = os.pipe2(os.O_CLOEXEC)
        self._inotify = _watch(paths)

    def wait(self, limit_s: float = math.inf, least_s: float = 0.0) -> bool:
        """Waits until a file was written; returns False when the thread is to end.

        Args:
            limit_s: how long at most (seconds).
            least_s: how long at least, also where a file was written before: a rank may write again and again.
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
            # What it says is not needed: each file is read from where it was left.
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
    """One log file and where its lines go. `partial`: a line that has no end yet.

    For a console, `live` decides what is written and when. Otherwise only whole lines are, if `wanted`.
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
        """Copies what was written since the last call: whole lines, with `ended` also a last one without an end.

        Returns:
            False when `has_room(to)` became false before all was copied.
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
        """When `copy_new` is to be called for a line without an end (monotonic seconds); infinity: there is none."""
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
    """Copies streams from `start` until `stop`, which returns after the last line, or when it waited for too long.

    A stream that is no `Console` may block its writer without limit; then the thread is left behind.
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
        """Copies what is left and ends the thread; a second call does nothing."""
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
            if self._is_given_up:  # its files may be others' now
                return
            with contextlib.suppress(OSError, ValueError):  # a console that is gone stops no rank
                if not stream.copy_new(self._has_room, ended) and stream.path not in self._cut:
                    self._cut.add(stream.path)
                    logger.warning("the console does not read: the last lines of %s are not shown", stream.path)

    def _has_room(self, to: TextIO) -> bool:
        """Waits until more can be written to a console: it may be slow, and the files keep the lines meanwhile.

        Returns:
            False when the pump is to end and the console does not read.
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
    """Returns the streams that torch's `TailLog`s would copy.

    Args:
        name: of the role, for streams without a prefix of their own.
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
    """Identifies where a stream goes: the same for stdout and stderr if both are one terminal or pipe."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return id(stream)
    return found.st_dev, found.st_ino
