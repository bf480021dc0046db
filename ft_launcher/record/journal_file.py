"""The file of a journal: whole lines, appended at once; rotated at a size, so that the sum on the disk is bounded.

Used by `journal.py`. `NODE.jsonl` is the file that grows. When it is full it becomes `NODE.1.jsonl`, which stays: it
has the start of the job. Later ones become `NODE.2.jsonl`, each in the place of the one before. So a journal takes at
most three times the size on the disk, and what it lacks lies between piece 1 and piece 2.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import stat
from collections import deque
from collections.abc import Callable
from pathlib import Path

from ft_launcher.record.access import Access

_MAX_UNSENT = 1 << 20
"""Bytes that wait for room on the disk: some thousand events, which tell the story of several failed cycles."""
_FIRST, _LATEST = 1, 2
"""Numbers of the two pieces that are kept beside the one that grows."""


class JournalFile:
    """A file that takes lines.

    Args:
        path: its name, ending in `.jsonl`. Where another launcher that lives writes there, `NAME_2.jsonl` and so on.
        access: who may read it.
        max_bytes: the size of a piece; None: it grows without a bound.
        first_line: makes the first line of each later piece; gets its number and the bytes of the piece that went.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(
        self, path: Path, access: Access, max_bytes: int | None, first_line: Callable[[int, int], str]
    ) -> None:
        self._access = access
        self._max_bytes = max_bytes
        self._first_line = first_line
        self._unsent: deque[bytes] = deque()
        self._mid_line = False
        self._pieces = 1
        self.dropped = 0
        """Lines that were not written, and never will be."""
        for number in itertools.count(2):
            descriptor = _open(path, access)
            if _lock(descriptor):
                break
            os.close(descriptor)
            path = path.with_name(f"{path.name.removesuffix('.jsonl').removesuffix(f'_{number - 1}')}_{number}.jsonl")
        self.path = path
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self._lines = min(1, self._size)
        # A launcher that was killed, or a full disk, may have left half a line.
        if _ends_within_line(descriptor, self._size):
            self._unsent.append(b"\n")
            self._mid_line = True

    def append(self, line: str) -> None:
        """Writes a line, after those that wait for room. After `close` it is dropped.

        Raises:
            OSError: not now. It waits for the next call if it is among the first MiB that do; else it is dropped.
        """
        if self._descriptor < 0:
            self.dropped += 1
            return
        with contextlib.suppress(OSError):
            self._send()
        data = line.encode() + b"\n"
        if sum(map(len, self._unsent)) + len(data) <= _MAX_UNSENT or not self._unsent:
            self._unsent.append(data)
        else:
            self.dropped += 1
        self._send()

    def close(self) -> None:
        """Closes the file. What still waits is dropped. A second call does nothing."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            self._send()
        self.dropped += len(self._unsent)
        self._unsent.clear()
        with contextlib.suppress(OSError):
            # Ranks that are forked functions, and what they leave running, have the open file and its lock too.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        self._descriptor = -1

    def _send(self) -> None:
        while self._unsent:
            if not self._mid_line and self._is_full(len(self._unsent[0])):
                self._rotate()
            data = self._unsent[0]
            written = os.write(self._descriptor, data)
            self._size += written
            # The rest of a line comes next: at the end of the disk the system takes a part of it.
            self._mid_line = written < len(data)
            if self._mid_line:
                self._unsent[0] = data[written:]
            else:
                self._unsent.popleft()
                self._lines += 1

    def _is_full(self, more: int) -> bool:
        # A piece takes at least one line beside its first: a line that is longer than a piece would begin one after
        # the other.
        return self._max_bytes is not None and self._lines > 0 and self._size + more > self._max_bytes

    def _rotate(self) -> None:
        """Begins a new piece. On an error all is as before.

        Raises:
            OSError: it cannot be made.
        """
        kept, lost = self._place_of_piece()
        # Under another name at first: after a rename a failure to open would leave nothing to append to.
        new = self.path.with_suffix(".new")
        descriptor = _open(new, self._access)
        try:
            os.ftruncate(descriptor, 0)
            _lock(descriptor)
            with contextlib.suppress(FileNotFoundError):  # somebody has removed it
                self.path.replace(kept)
            new.replace(self.path)
        except OSError:
            os.close(descriptor)
            raise
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._size = 0
        self._lines = -1
        self._pieces += 1
        self._unsent.appendleft(self._first_line(self._pieces, lost).encode() + b"\n")

    def _place_of_piece(self) -> tuple[Path, int]:
        """Returns where the piece that is full goes, and the bytes of the piece that it replaces."""
        first, latest = (self.path.with_suffix(f".{number}.jsonl") for number in (_FIRST, _LATEST))
        if not first.exists():
            return first, 0
        with contextlib.suppress(FileNotFoundError):
            return latest, latest.stat().st_size
        return latest, 0


def _open(path: Path, access: Access) -> int:
    access.make_folder(path.parent)
    return access.opener(str(path), os.O_RDWR | os.O_APPEND | os.O_CREAT)


def _lock(descriptor: int) -> bool:
    """Whether no other launcher has the file. Holds the lock until the descriptor is closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: nobody has it
        return True
    return True


def _ends_within_line(descriptor: int, size: int) -> bool:
    if size == 0 or not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return False
    return os.pread(descriptor, 1, size - 1) != b"\n"
