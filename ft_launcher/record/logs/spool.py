"""Spools: files in memory that ranks print to in the place of the console, so that the launcher can read their output.

`--ft-watch-log` reads steps in what ranks print. Without log files that output would go straight to the console. A pipe
in between would hold up a rank whenever the launcher stands still, and a file on a full disk would end the rank. A
spool does neither: it is an unnamed file in memory (`memfd`). Text that all readers have read is freed, so a spool
stays small however long the training runs. A reader that is too far behind loses text, and the console says so.

`node/ranks/rank_context.py` makes the spools of a cycle (`SpooledOutput`), only where the output is to be read. Each
spool has two readers: a `SpoolStream`, by which `log_pump.py` brings the output to the console, and the log watch.

Threads: `ft_log_pump` reads through `SpoolStream`, `ft_log_watch` reads for itself, `ft_spools` bounds the memory. They
share a `Spool` under its lock.
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
"""Bytes that are freed at once, as a hole in the file. The size of the file stays, so no offset in it changes."""
MAX_BEHIND = 16 << 20
"""Bytes that are kept for a reader that is behind. For a slow console and 16 ranks that is 256 MiB at most."""
_MAX_AT_ONCE = 1 << 20
"""Bytes of one spool that are copied in one round. A rank that prints without end must not keep the console from the
other ranks."""
_LAST_SPOOLED_S = 2.0
"""Seconds after the ranks' end for a console that reads slowly. The restart after a fault must not wait longer; the
last 64 KiB of a spool are shown in any case."""
_PERIOD_S = 0.1
"""Seconds between two checks of the sizes while ranks print. A rank that prints 1 GB/s takes 100 MB in that time."""
_READER = "console"
_CONSOLE = ""


class Spool:
    """One file in memory. Ranks open `path` for appending; each reader opens it too, and is known here by a name.

    Text is freed in one of two ways. `release` frees what all readers have read. `trim` frees all but the last 16 MiB,
    read or not; it is called again and again while ranks may print, for the times in which nobody reads: between the
    end of a cycle and the end of its ranks, with a stalled console, after an error of a reader.

    Raises:
        OSError: the system makes no such file.
    """

    def __init__(self, name: str) -> None:
        self._descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        self._is_open = True
        self._lock = threading.Lock()
        self._offsets: dict[str, int] = {}
        self.begin = 0
        """Offset before which the text is freed: a reader that reads there gets zeros, and no text of the rank."""
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def add_reader(self, reader: str) -> int:
        """Keeps text for this reader from now on; returns the offset at which the reader is to begin."""
        with self._lock:
            self._offsets[reader] = self.begin
            return self.begin

    def remove_reader(self, reader: str) -> None:
        """Keeps no text for this reader any more."""
        with self._lock:
            self._offsets.pop(reader, None)

    def note_read(self, reader: str, until: int) -> None:
        """Notes how far a reader has read. Frees what all readers have read, and what lies more than `MAX_BEHIND`
        before this reader.

        Args:
            until: the offset up to which this reader has read.
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
                # A rank has emptied the file by opening it anew, and maybe no reader is left to notice.
                self.begin = 0
            self._free(size - MAX_BEHIND)

    def restart_reader(self, reader: str) -> None:
        """To be called by a reader whose offset is beyond the end of the file: a rank has emptied the file by opening
        it anew. The reader begins at 0 again."""
        with self._lock:
            self._offsets[reader] = 0
            if self._is_open and os.fstat(self._descriptor).st_size < self.begin:
                self.begin = 0

    def close(self) -> None:
        """Closes the file here. Ranks that still run keep it open, and the kernel frees it with the last of them."""
        with self._lock:
            self._is_open = False
            os.close(self._descriptor)

    def _free(self, until: int) -> None:
        """Frees what is before this offset, in whole parts of 1 MiB. The caller holds the lock."""
        until -= until % _PART
        if until <= self.begin:
            return
        libc = ctypes.CDLL(None)
        offset, length = ctypes.c_int64(self.begin), ctypes.c_int64(until - self.begin)
        # Set before the text is freed: a reader that checks `begin` after its read knows whether it has read text.
        self.begin = until
        # An error is ignored: then the text stays in memory.
        libc.fallocate(self._descriptor, _KEEP_SIZE | _PUNCH_HOLE, offset, length)


class SpoolStream(Stream):
    """Brings what a rank prints to a spool to the console as it is: byte by byte, without a prefix.

    A line without an end is held back for `PARTIAL_S`. Python writes the parts of a line one by one, and a line of
    another rank would come in between more often than where both ranks write to the console themselves.
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
        """Copies what was written since the last call, `_MAX_AT_ONCE` bytes at most.

        Where a console that does not read falls too far behind, text is left out, and a line in its place says how
        much. With `ended` the end of the text is written whether there is room or not.

        Returns:
            Always True: nothing is left out without a line about it, so the pump need not warn.
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
        """Copies one chunk; returns whether there was any text."""
        assert self.file is not None
        offset = self.file.tell()
        content = self.file.read(CHUNK)
        if offset < self._spool.begin:
            # Another reader is so far ahead that this text was freed, maybe during this read: it may be zeros.
            self._skip_to(max(self._spool.begin, os.fstat(self.file.fileno()).st_size - CHUNK), offset)
            return True
        try:
            self._put(self._without_open_line(content, time.monotonic(), last=False))
        finally:  # also where the console is gone and the write fails: the text must not fill the memory
            self._spool.note_read(_READER, self.file.tell())
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
        self._spool.note_read(_READER, offset)
        held, self.partial, self._held_since = self.partial, b"", math.inf
        line = console_line(f"the console did not read; bytes not shown: {offset - before}", time.time())
        self._put(held + f"\n{line}\n".encode())

    def _without_open_line(self, content: bytes, now: float, last: bool) -> bytes:
        """Returns the text to show now, of the line that was held back and of `content`; holds back the rest."""
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
    """The spools of one cycle; none where ranks print to the console or to files themselves.

    From the start of the ranks until all have ended, a thread bounds the memory of the spools. Readers alone would not:
    a stream that is not shown is read by the log watch alone, which ends with the cycle, and a rank may go on printing
    until it is stopped.
    """

    def __init__(self) -> None:
        self.streams: list[SpoolStream] = []
        """The streams that a log pump has to copy to the console."""
        self.spools: dict[str, Spool] = {}
        """Path -> spool."""
        self._local_ranks: set[int] = set()
        self._thread: threading.Thread | None = None
        self._written: WrittenFiles | None = None

    @classmethod
    def instead_of_console(cls, stdouts: MutableMapping[int, str], stderrs: MutableMapping[int, str]) -> SpooledOutput:
        """Makes spools for the streams that would be inherited or discarded, and puts their paths into the mappings.

        Where both streams of a rank go to the same terminal, pipe or file, they share a spool: that keeps the order of
        what the rank prints. Where the system makes no spool, the rank prints to the console, with one warning.

        Args:
            stdouts, stderrs: local rank -> the file that the stream goes to, as torch has it; `""`: the console.
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
        """Returns whether a stream of this rank is spooled."""
        return local_rank in self._local_ranks

    def start(self) -> None:
        """Starts the thread that bounds the memory of the spools until `close`, even if nobody reads them."""
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
        """Trims the spools whenever a rank has printed; the loop of the thread."""
        spools = self.spools
        with contained("what ranks print is no longer bounded in memory"):
            goes_on = True
            while goes_on:  # the first round comes at once, since the ranks have begun already
                for spool in spools.values():
                    spool.trim()
                goes_on = written.wait(least_s=_PERIOD_S)  # a rank that prints nothing wakes nobody

    def _replace(self, local_rank: int, paths: MutableMapping[int, str], console: TextIO | None) -> None:
        """Puts a spool in the place of one stream of a rank, unless that stream goes to a file."""
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
