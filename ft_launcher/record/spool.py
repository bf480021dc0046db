"""`Spool`: a file in memory that a rank prints to in the place of the console, where its output is read on the way.

A pipe would hold up a rank whenever the launcher stands still, and a file on a disk that is full would end it. What all
have read is given back, so a spool stays small however long the training runs.
"""

from __future__ import annotations

import ctypes
import os

# From <linux/falloc.h>.
_KEEP_SIZE, _PUNCH_HOLE = 0x1, 0x2
_PART = 1 << 20
"""Bytes that are given back at once. The size of the file stays, so nobody's place in it changes."""


class Spool:
    """One file without a name. Writers open `path` for appending.

    Raises:
        OSError: the system makes none.
    """

    def __init__(self, name: str) -> None:
        self._descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        self._given_back = 0
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def give_back(self, until: int) -> None:
        """Frees the memory of what comes before `until`, in whole parts; it must have been read."""
        until -= until % _PART
        if until > self._given_back:
            libc = ctypes.CDLL(None)
            offset, length = ctypes.c_int64(self._given_back), ctypes.c_int64(until - self._given_back)
            # Where it cannot be freed, it stays.
            libc.fallocate(self._descriptor, _KEEP_SIZE | _PUNCH_HOLE, offset, length)
            self._given_back = until

    def close(self) -> None:
        """Closes it; writers that are left keep it."""
        os.close(self._descriptor)
