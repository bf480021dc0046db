"""Copies what ranks write to their log files to the console: one thread for all streams, woken by inotify.

Ranks write to files, not to a pipe of ours: a launcher that is slow or gone stops no rank, and a console that does not
read stops neither. Used by `ranks/rank_context.py` in the place of torch's `TailLog`, and by `cycle_files.py` for the
log of a cycle, whose threads poll; which file goes where is read from those (their underscored attributes).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import stat
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import IO, Any, TextIO

from ft_launcher.record.console import STALLED_S, Console
from ft_launcher.record.console_lines import PARTIAL_S, ConsoleLines, Screen
from ft_launcher.record.spool import MOST_BEHIND, Spool
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.wire.foreign import open_regular

logger = logging.getLogger(__name__)

# From <sys/inotify.h>; the standard library has no inotify.
_IN_MODIFY = 0x2
# Bytes of one read.
_CHUNK = 1 << 16
_PERIOD_S = 0.1
"""Seconds between two reads of the files where no inotify instance is left (fs.inotify.max_user_instances)."""
_LAST_LINES_S, _LAST_SPOOLED_S = 10.0, 2.0
"""Seconds after the ranks' end, for a console that reads slowly. The lines are in the ranks' files as well; of what is
in spools the end is shown in any case, and the restart after a fault must not wait longer."""
_CONSOLE = "console"
# Seconds between two looks whether the pump is to end, while the console has no room.
_ROOM_S = 0.2
_MOST_AT_ONCE = 1 << 20
"""Bytes of a spool in one round: a rank that prints without end must not keep the console from the others."""


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

    def carry(self, has_room: Callable[[TextIO], bool], ended: bool = False) -> bool:
        """Copies what was written since the last call: whole lines, with `ended` also a last one without an end.

        Returns:
            False when `has_room(to)` became false before all was copied.
        """
        if self.file is None:
            self.file = open_regular(self.path, follow_link=True, buffering=0)
        wrote = False
        while has_room(self.to):
            content = self.file.read(_CHUNK)
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
        """When `carry` is to be called for a line without an end (monotonic seconds); infinity: there is none."""
        if self.live is None:
            return math.inf
        return self.live.due()

    def close(self) -> None:
        """Closes the file."""
        if self.file is not None:
            self.file.close()

    def _text(self, content: bytes, last: bool) -> str:
        if self.live is not None:
            return self.live.take(content, time.monotonic(), last)
        *whole, self.partial = (self.partial + content).split(b"\n")
        if last and self.partial:
            whole.append(self.partial)
            self.partial = b""
        texts = (line.decode(errors="replace") for line in whole)
        return "".join(f"{self.prefix}{line}\n" for line in texts if self.wanted(line))


class SpoolStream(Stream):
    """What a rank prints to a spool, which goes to a console as it is: byte by byte, without a prefix.

    A line without an end is held back for `PARTIAL_S`: Python writes the parts of a line one by one, and another rank's
    line would come in between more often than where both write to the console themselves.
    """

    def __init__(self, spool: Spool, to: TextIO) -> None:
        super().__init__(spool.path, "", to, lambda line: True, last_lines_s=_LAST_SPOOLED_S)
        self._spool = spool
        self._held_since = math.inf
        self._has_more = False
        spool.join(_CONSOLE)

    def due(self) -> float:
        """When `carry` is to be called again (monotonic seconds): for a line without an end, and while more is left."""
        if self._has_more:
            return 0.0
        return self._held_since + PARTIAL_S

    def carry(self, has_room: Callable[[TextIO], bool], ended: bool = False) -> bool:
        """Copies what was written since the last call, at most `_MOST_AT_ONCE` of it.

        What a console that does not read leaves too far behind is left out, and said in its place. With `ended` the
        end is written whether there is room or not.

        Returns:
            True: nothing is left out without a word.
        """
        if self.file is None:
            self.file = open_regular(self.path, follow_link=True, buffering=0)
        size = os.fstat(self.file.fileno()).st_size
        if size < self.file.tell():
            self._begin_anew()
        most = _MOST_AT_ONCE if ended else MOST_BEHIND
        if size - self.file.tell() > most:
            self._skip_to(size - _CHUNK)
        until = min(size, self.file.tell() + _MOST_AT_ONCE)
        while self.file.tell() < until:
            if not has_room(self.to):
                if not ended:
                    break
                if size - self.file.tell() > _CHUNK:
                    self._skip_to(size - _CHUNK)
            if not self._carry_chunk():
                break
        self._has_more = until < size and self.file.tell() >= until
        self._put(self._without_open_line(b"", time.monotonic(), last=ended))
        return True

    def _carry_chunk(self) -> bool:
        """Copies one read; returns whether there was anything."""
        assert self.file is not None
        place = self.file.tell()
        content = self.file.read(_CHUNK)
        if place < self._spool.begin:
            # Another reader is so far ahead that this was given back, maybe while it was read.
            self._skip_to(max(self._spool.begin, os.fstat(self.file.fileno()).st_size - _CHUNK), place)
            return True
        try:
            self._put(self._without_open_line(content, time.monotonic(), last=False))
        finally:  # also what a console that is gone does not take
            self._spool.give_back(_CONSOLE, self.file.tell())
        return bool(content)

    def _begin_anew(self) -> None:
        assert self.file is not None
        self.file.seek(0)
        self._put(self.partial)
        self.partial, self._held_since = b"", math.inf
        self._spool.begin_anew(_CONSOLE)

    def _skip_to(self, place: int, before: int | None = None) -> None:
        """Leaves out what is before `place`, from `before` or from here."""
        assert self.file is not None
        if before is None:
            before = self.file.tell()
        self.file.seek(place)
        self._spool.give_back(_CONSOLE, place)
        held, self.partial, self._held_since = self.partial, b"", math.inf
        self._put(held + f"\nft_launcher: the console did not read; bytes not shown: {place - before}\n".encode())

    def _without_open_line(self, content: bytes, now: float, last: bool) -> bytes:
        """Returns what is to be shown now of what was held back and of `content`."""
        text = self.partial + content
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if last or now >= self.due() or len(text) - end > _CHUNK:
            end = len(text)
        was_held = bool(self.partial)
        self.partial = text[end:]
        if not self.partial:
            self._held_since = math.inf
        elif end or not was_held:
            self._held_since = now
        return text[:end]

    def _put(self, content: bytes) -> None:
        if not content:
            return
        if isinstance(self.to, Console):
            self.to.write_bytes(content)
        elif hasattr(self.to, "buffer"):
            self.to.flush()
            self.to.buffer.write(content)
            self.to.buffer.flush()
        else:  # a notebook's
            self.to.write(content.decode(errors="replace"))


class LogPump:
    """Copies streams from `start` until `stop`, which returns after the last line, or when it waited for too long.

    A stream that is no `Console` may block its writer without limit; then the thread is left behind.
    """

    def __init__(self, streams: Iterable[Stream]) -> None:
        self._streams = list(streams)
        self._thread: threading.Thread | None = None
        self._stop_by = math.inf
        self._is_given_up = False
        self._cut: set[str] = set()
        self._stop_reader, self._stop_writer = -1, -1

    @property
    def paths(self) -> set[str]:
        """The log files that it copies."""
        return {stream.path for stream in self._streams}

    def start(self) -> None:
        """Starts the thread; the files need not exist yet."""
        if not self._streams:
            return
        self._stop_reader, self._stop_writer = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, daemon=True, name="ft_log_pump")
        self._thread.start()

    def stop(self) -> None:
        """Copies what is left and ends the thread; a second call does nothing."""
        if self._thread is None:
            return
        limit_s = min(stream.last_lines_s for stream in self._streams)
        # From now on `_has_room` gives up on a console that does not read.
        self._stop_by = time.monotonic() + limit_s
        # The end of the pipe wakes the thread.
        os.close(self._stop_writer)
        self._thread.join(self._join_limit_s(limit_s))
        self._is_given_up = self._thread.is_alive()
        self._thread = None

    def _join_limit_s(self, limit_s: float) -> float | None:
        """How long to wait for the last lines (seconds; None: without limit). Files take what they are given."""
        if all(_is_file(stream.to) for stream in self._streams):
            return None
        return limit_s + STALLED_S

    def _run(self) -> None:
        try:
            self._follow()
        finally:
            self._carry(ended=True)
            os.close(self._stop_reader)
            for stream in self._streams:
                stream.close()

    def _follow(self) -> None:
        inotify = watch_files({stream.path for stream in self._streams})
        while True:
            self._carry()
            ready = readable([self._stop_reader, *inotify], self._limit_s(bool(inotify)))
            for descriptor in inotify:
                if descriptor in ready:
                    # What it says is not needed: each file is read from where it was left.
                    os.read(descriptor, _CHUNK)
            if self._stop_reader in ready:
                break
        for descriptor in inotify:
            os.close(descriptor)

    def _limit_s(self, is_woken: bool) -> float | None:
        """How long to wait for more (seconds; None: without limit): a line without an end is shown after a while."""
        due = min((stream.due() for stream in self._streams), default=math.inf)
        limit_s = due - time.monotonic()
        if not is_woken:
            limit_s = min(limit_s, _PERIOD_S)
        if limit_s == math.inf:
            return None
        return max(0.0, limit_s)

    def _carry(self, ended: bool = False) -> None:
        for stream in self._streams:
            if self._is_given_up:  # its files may be others' now
                return
            with contextlib.suppress(OSError, ValueError):  # a console that is gone stops no rank
                if not stream.carry(self._has_room, ended) and stream.path not in self._cut:
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


def _is_file(stream: TextIO) -> bool:
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):
        return False


def watch_files(paths: Collection[str]) -> list[int]:
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
