"""Spools: files in memory that ranks print to in the place of the console, where their output is read on the way.

A pipe would hold up a rank whenever the launcher stands still, and a file on a disk that is full would end it. What all
its readers have read is given back, so a spool stays small however long the training runs. A reader that is far behind
loses what it has not read. `node/ranks/rank_context.py` makes those of a cycle, only where that was asked for: else
ranks print to the console themselves. A `SpoolStream` is for `log_pump.py`, which brings the output to the console.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from typing import TextIO

from ft_launcher.record.console.console import Console
from ft_launcher.record.console.console_lines import PARTIAL_S
from ft_launcher.record.journal.contained import contained
from ft_launcher.record.logs.log_pump import CHUNK, Stream, WrittenFiles, identity
from rank_monitor.contract.console_line import console_line
from rank_monitor.contract.wire.foreign import open_regular

logger = logging.getLogger(__name__)

# From <linux/falloc.h>.
_KEEP_SIZE, _PUNCH_HOLE = 0x1, 0x2
_PART = 1 << 20
"""Bytes that are given back at once. The size of the file stays, so nobody's place in it changes."""
MAX_BEHIND = 16 << 20
"""Bytes that are kept for a reader: for a slow console, and 16 ranks, 256 MiB at most."""
_MAX_AT_ONCE = 1 << 20
"""Bytes of a spool in one round: a rank that prints without end must not keep the console from the others."""
_LAST_SPOOLED_S = 2.0
"""Seconds after the ranks' end, for a console that reads slowly. The end of a spool is shown in any case, and the
restart after a fault must not wait longer."""
_PERIOD_S = 0.1
"""Seconds between two looks at the spools, while ranks print: a rank that prints 1 GB/s takes 100 MB meanwhile."""
_READER = "console"
_CONSOLE = ""


class Spool:
    """One file without a name. Writers open `path` for appending. Its readers are called by names of their own.

    `trim` bounds it where nobody reads: from the end of a cycle until that of its ranks, with a console that stands
    still, after an error of a reader. It is called again and again while ranks may print.

    Raises:
        OSError: the system makes none.
    """

    def __init__(self, name: str) -> None:
        self._descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        self._is_open = True
        self._lock = threading.Lock()
        self._offsets: dict[str, int] = {}
        self.begin = 0
        """Bytes before it are given back: what a reader reads there is no text of the rank."""
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def add_reader(self, reader: str) -> int:
        """Keeps from now on what this reader has not given back; returns the place where it begins to read."""
        with self._lock:
            self._offsets[reader] = self.begin
            return self.begin

    def remove_reader(self, reader: str) -> None:
        """Keeps nothing for this reader any more."""
        with self._lock:
            self._offsets.pop(reader, None)

    def release(self, reader: str, until: int) -> None:
        """Frees the memory of what all readers have read, in whole parts, and of what is too far behind this one.

        Args:
            until: the place of this reader.
        """
        with self._lock:
            if not self._is_open:
                return
            self._offsets[reader] = until
            self._free(max(min(self._offsets.values()), until - MAX_BEHIND))

    def trim(self) -> None:
        """Frees all but the last `MAX_BEHIND` bytes, read or not."""
        with self._lock:
            if not self._is_open:
                return
            size = os.fstat(self._descriptor).st_size
            if size < self.begin:
                # A rank has emptied it, and maybe no reader is left to notice.
                self.begin = 0
            self._free(size - MAX_BEHIND)

    def restart_reader(self, reader: str) -> None:
        """To be called by each reader whose place is beyond the end: a rank has emptied the file by opening it."""
        with self._lock:
            self._offsets[reader] = 0
            if self._is_open and os.fstat(self._descriptor).st_size < self.begin:
                self.begin = 0

    def close(self) -> None:
        """Closes it; writers that are left keep it."""
        with self._lock:
            self._is_open = False
            os.close(self._descriptor)

    def _free(self, until: int) -> None:
        """Frees what is before this offset, in whole parts. The lock is held."""
        until -= until % _PART
        if until <= self.begin:
            return
        libc = ctypes.CDLL(None)
        offset, length = ctypes.c_int64(self.begin), ctypes.c_int64(until - self.begin)
        # Before it is freed: a reader that looks afterwards knows whether it has read the text.
        self.begin = until
        # Where it cannot be freed, it stays.
        libc.fallocate(self._descriptor, _KEEP_SIZE | _PUNCH_HOLE, offset, length)


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
        spool.add_reader(_READER)

    def due(self) -> float:
        """When `copy_new` is to be called again, for a line without an end or for more text (monotonic seconds)."""
        if self._has_more:
            return 0.0
        return self._held_since + PARTIAL_S

    def copy_new(self, has_room: Callable[[TextIO], bool], ended: bool = False) -> bool:
        """Copies what was written since the last call, at most `_MAX_AT_ONCE` of it.

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
        most = _MAX_AT_ONCE if ended else MAX_BEHIND
        if size - self.file.tell() > most:
            self._skip_to(size - CHUNK)
        until = min(size, self.file.tell() + _MAX_AT_ONCE)
        while self.file.tell() < until:
            if not has_room(self.to):
                if not ended:
                    break
                if size - self.file.tell() > CHUNK:
                    self._skip_to(size - CHUNK)
            if not self._copy_chunk():
                break
        self._has_more = until < size and self.file.tell() >= until
        self._put(self._without_open_line(b"", time.monotonic(), last=ended))
        return True

    def _copy_chunk(self) -> bool:
        """Copies one read; returns whether there was anything."""
        assert self.file is not None
        offset = self.file.tell()
        content = self.file.read(CHUNK)
        if offset < self._spool.begin:
            # Another reader is so far ahead that this was given back, maybe while it was read.
            self._skip_to(max(self._spool.begin, os.fstat(self.file.fileno()).st_size - CHUNK), offset)
            return True
        try:
            self._put(self._without_open_line(content, time.monotonic(), last=False))
        finally:  # also what a console that is gone does not take
            self._spool.release(_READER, self.file.tell())
        return bool(content)

    def _begin_anew(self) -> None:
        assert self.file is not None
        self.file.seek(0)
        self._put(self.partial)
        self.partial, self._held_since = b"", math.inf
        self._spool.restart_reader(_READER)

    def _skip_to(self, offset: int, before: int | None = None) -> None:
        """Leaves out what is before `offset`, from `before` or from here."""
        assert self.file is not None
        if before is None:
            before = self.file.tell()
        self.file.seek(offset)
        self._spool.release(_READER, offset)
        held, self.partial, self._held_since = self.partial, b"", math.inf
        line = console_line(f"the console did not read; bytes not shown: {offset - before}", time.time())
        self._put(held + f"\n{line}\n".encode())

    def _without_open_line(self, content: bytes, now: float, last: bool) -> bytes:
        """Returns what is to be shown now of what was held back and of `content`."""
        text = self.partial + content
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if last or now >= self.due() or len(text) - end > CHUNK:
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


class SpooledOutput:
    """The spools of one cycle; at first none.

    A thread bounds them from the start of the ranks until all have ended, also where no reader is left: those of
    streams that are not shown are read by `--ft-watch-log` alone, which ends with the cycle, and a rank may print until
    it is stopped.
    """

    def __init__(self) -> None:
        self.streams: list[SpoolStream] = []
        """What a pump has to copy to the console."""
        self.spools: dict[str, Spool] = {}
        """All spools, by path."""
        self._local_ranks: set[int] = set()
        self._thread: threading.Thread | None = None
        self._written: WrittenFiles | None = None

    @classmethod
    def instead_of_console(cls, stdouts: MutableMapping[int, str], stderrs: MutableMapping[int, str]) -> SpooledOutput:
        """Makes spools for streams that would be inherited or discarded, and puts their paths into the mappings.

        Where both streams of a rank go to the same terminal, pipe or file, they share a spool, which keeps the order
        of what the rank prints.
        """
        made = cls()
        same = identity(sys.stdout) == identity(sys.stderr)
        try:
            for local_rank in stdouts:
                made._replace(local_rank, stdouts, sys.stdout)
                is_shown = stdouts[local_rank] in {stream.path for stream in made.streams}
                if same and is_shown and stderrs[local_rank] == _CONSOLE:
                    stderrs[local_rank] = stdouts[local_rank]
                else:
                    made._replace(local_rank, stderrs, sys.stderr)
        except OSError as error:
            logger.warning("what some ranks print cannot be read (--ft-watch-log): %s", error.strerror)
        return made

    def of(self, local_rank: int) -> bool:
        """Whether a stream of this rank is spooled."""
        return local_rank in self._local_ranks

    def start(self) -> None:
        """Bounds the spools from now on, until `close`, even if nobody reads them."""
        if not self.spools:
            return
        self._written = WrittenFiles(self.spools)
        self._thread = threading.Thread(target=self._bound, args=(self._written,), daemon=True, name="ft_spools")
        self._thread.start()

    def close(self) -> None:
        """Closes all spools. A second call does nothing."""
        if self._thread is not None and self._written is not None:
            self._written.end()
            self._thread.join()
            self._written.close()
            self._thread = None
        for spool in self.spools.values():
            spool.close()
        self.spools = {}

    def _bound(self, written: WrittenFiles) -> None:
        spools = self.spools
        with contained("what ranks print is no longer bounded in memory"):
            goes_on = True
            while goes_on:  # the first time at once, since the ranks have begun already
                for spool in spools.values():
                    spool.trim()
                goes_on = written.wait(least_s=_PERIOD_S)  # a rank that prints nothing wakes nobody

    def _replace(self, local_rank: int, paths: MutableMapping[int, str], console: TextIO | None) -> None:
        path = paths[local_rank]
        if path not in (_CONSOLE, os.devnull):
            return
        spool = Spool(f"ft_output{local_rank}")
        self.spools[spool.path] = spool
        # Python has no stream where the descriptor was closed at its start.
        if path == _CONSOLE and console is not None:
            self.streams.append(SpoolStream(spool, console))
        paths[local_rank] = spool.path
        self._local_ranks.add(local_rank)
