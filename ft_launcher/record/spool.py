"""`Spool`: a file in memory that a rank prints to in the place of the console, where its output is read on the way.

A pipe would hold up a rank whenever the launcher stands still, and a file on a disk that is full would end it. What all
its readers have read is given back, so a spool stays small however long the training runs. A reader that is far behind
loses what it has not read. `trim` bounds it where nobody reads: from the end of a cycle until that of its ranks, with
a console that stands still, after an error of a reader. It is called again and again while ranks may print.
"""

from __future__ import annotations

import ctypes
import os
import threading

# From <linux/falloc.h>.
_KEEP_SIZE, _PUNCH_HOLE = 0x1, 0x2
_PART = 1 << 20
"""Bytes that are given back at once. The size of the file stays, so nobody's place in it changes."""
MOST_BEHIND = 16 << 20
"""Bytes that are kept for a reader: for a slow console, and 16 ranks, 256 MiB at most."""


class Spool:
    """One file without a name. Writers open `path` for appending. Its readers are called by names of their own.

    Raises:
        OSError: the system makes none.
    """

    def __init__(self, name: str) -> None:
        self._descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        self._is_open = True
        self._lock = threading.Lock()
        self._places: dict[str, int] = {}
        self.begin = 0
        """Bytes before it are given back: what a reader reads there is no text of the rank."""
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def join(self, reader: str) -> int:
        """Keeps from now on what this reader has not given back; returns the place where it begins to read."""
        with self._lock:
            self._places[reader] = self.begin
            return self.begin

    def leave(self, reader: str) -> None:
        """Keeps nothing for this reader any more."""
        with self._lock:
            self._places.pop(reader, None)

    def give_back(self, reader: str, until: int) -> None:
        """Frees the memory of what all readers have read, in whole parts, and of what is too far behind this one.

        Args:
            until: the place of this reader.
        """
        with self._lock:
            if not self._is_open:
                return
            self._places[reader] = until
            self._free(max(min(self._places.values()), until - MOST_BEHIND))

    def trim(self) -> None:
        """Frees all but the last `MOST_BEHIND` bytes, read or not."""
        with self._lock:
            if not self._is_open:
                return
            size = os.fstat(self._descriptor).st_size
            if size < self.begin:
                # A rank has emptied it, and maybe no reader is left to notice.
                self.begin = 0
            self._free(size - MOST_BEHIND)

    def begin_anew(self, reader: str) -> None:
        """To be called by each reader whose place is beyond the end: a rank has emptied the file by opening it."""
        with self._lock:
            self._places[reader] = 0
            if self._is_open and os.fstat(self._descriptor).st_size < self.begin:
                self.begin = 0

    def close(self) -> None:
        """Closes it; writers that are left keep it."""
        with self._lock:
            self._is_open = False
            os.close(self._descriptor)

    def _free(self, until: int) -> None:
        """Frees what is before this place, in whole parts. The lock is held."""
        until -= until % _PART
        if until <= self.begin:
            return
        libc = ctypes.CDLL(None)
        offset, length = ctypes.c_int64(self.begin), ctypes.c_int64(until - self.begin)
        # Before it is freed: a reader that looks afterwards knows whether it has read the text.
        self.begin = until
        # Where it cannot be freed, it stays.
        libc.fallocate(self._descriptor, _KEEP_SIZE | _PUNCH_HOLE, offset, length)
