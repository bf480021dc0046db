"""The journal: one JSON line per event, one file per node, append-only, written by a thread at once.

Written by `recorder.py`; `events/` says what a line holds. A line that cannot be written is dropped and counted, with
one warning: training goes on. Only `FileThread` works on the file: where the disk does not answer, lines wait in
memory.

The file holds whole lines and is rotated at a size, so that the sum on the disk is bounded. `NODE.jsonl` is the file
that grows. When it is full it becomes `NODE.1.jsonl`, which stays: it has the start of the job. Later ones become
`NODE.2.jsonl`, each in the place of the one before. So a journal takes at most three times the size on the disk, and
what it lacks lies between piece 1 and piece 2.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import math
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ft_launcher.record.events import Event, JournalPieceEvent, LinesDroppedEvent, ReportsEndEvent
from ft_launcher.record.journal.access import Access
from ft_launcher.record.journal.contained import contained
from ft_launcher.record.journal.file_thread import FileThread, NoAnswer

logger = logging.getLogger(__name__)

# Lines in memory, of which a job without any fault has more the longer it runs.
_MAX_HELD = 10_000
_MAX_REPORTED = 64 << 20
"""Bytes of lines whose content ranks choose. Lines of the launcher itself are always written."""
_MIB = 1 << 20
_MAX_QUEUED = 4 << 20
"""Bytes that wait for a disk that does not answer: as the journal of some thousand cycles that fail."""
_OPEN_S = 1.0
"""Seconds that `open` waits for the file. It is opened later where the disk does not answer."""
_CLOSE_S = 5.0
"""Seconds at the job's end, for a disk that is slow. A disk that stands still is not waited for."""
_MAX_UNSENT = 1 << 20
"""Bytes that wait for room on the disk: some thousand events, which tell the story of several failed cycles."""
_FIRST, _LATEST = 1, 2
"""Numbers of the two pieces that are kept beside the one that grows."""


class Journal:
    """The events of this node, held in memory until `open`, so that a run with nothing to keep leaves no file.

    Args:
        max_mb: MiB of a piece of the file (`--ft-journal-max-mb`); None: it grows without a bound.
        files: does what is done to the file; None: one of its own.
    """

    def __init__(self, max_mb: float | None = None, files: FileThread | None = None) -> None:
        self._pid = os.getpid()
        self._files = files or FileThread()
        self._owns_files = files is None
        self._max_bytes = None
        if max_mb is not None:
            self._max_bytes = int(max_mb * _MIB)
        # The agent's calls with a limit run in threads: two of them in one append would write a line twice.
        self._lock = threading.Lock()
        self._held: list[str] = []
        self._held_dropped = 0
        self._queued: deque[str] = deque()
        self._queued_bytes = 0
        self._is_scheduled = False
        self._is_opening = False
        self._file: JournalFile | None = None
        self._noted = 0
        self._warned = False
        self._reported = 0
        self._started = time.time()
        self.listeners: list[Callable[[Event, float], object]] = []
        """Called with each event and its time (seconds since 1970), in the thread that writes it, without the lock."""
        self.run_id = ""
        self.node = ""
        """With `run_id`: for the first line of each later piece, which may be all that is left of this attempt."""

    @property
    def path(self) -> Path | None:
        """The file; None: it is not open."""
        if self._file is None:
            return None
        return self._file.path

    @property
    def dropped(self) -> int:
        """Events that are in no file, and never will be."""
        if self._file is None:
            return self._held_dropped
        return self._held_dropped + self._file.dropped

    def write(self, event: Event) -> None:
        """Appends one event; never raises. Any thread may call this. In a fork of the process it does nothing: the
        journal is its parent's, and so is the thread that writes."""
        if os.getpid() != self._pid:
            return
        line = as_line(event, time.time())
        self._notify(event)
        with self._lock:
            self._put(line)

    def report(self, event: Event) -> None:
        """As `write`, for what a rank sent: bounded over the whole run, so that no rank can fill the disk."""
        if os.getpid() != self._pid:
            return
        line = as_line(event, time.time())
        self._notify(event)
        with self._lock:
            if self._reported > _MAX_REPORTED:
                return
            self._reported += len(line)
            if self._reported <= _MAX_REPORTED:
                self._put(line)
                return
            self._put(as_line(ReportsEndEvent(self._reported), time.time()))
        logger.warning("the journal holds %d MiB of what ranks reported and takes no more", _MAX_REPORTED >> 20)

    def _notify(self, event: Event) -> None:
        for listen in self.listeners:
            with contained("the status of the job is not complete"):
                listen(event, time.time())

    def _put(self, line: str) -> None:
        """Holds or queues a line. The lock is held."""
        if self._file is None:
            if len(self._held) < _MAX_HELD:
                self._held.append(line)
            else:
                self._held_dropped += 1
        elif self._queued_bytes + len(line) <= _MAX_QUEUED and self._schedule():
            self._queued.append(line)
            self._queued_bytes += len(line)
        else:
            self._held_dropped += 1

    def _schedule(self) -> bool:
        """Has the thread of files write what is queued, when the lock is free; returns whether it will."""
        self._is_scheduled = self._is_scheduled or self._files.submit(self._write_queued)
        return self._is_scheduled

    def flush(self, limit_s: float) -> bool:
        """Waits until all lines are in the file, or it refused them, `limit_s` seconds at most; returns whether."""
        return self._files.flush(limit_s)

    def open(self, path: Path, access: Access | None = None) -> None:
        """Opens `path` and writes the held events to it, and all later ones; a second call is ignored.

        Args:
            path: its name, which ends in `.jsonl`.
            access: who may read it; None: this user.
        """
        with self._lock:
            if self._file is not None or self._is_opening:
                return
            self._is_opening = True
        with contextlib.suppress(NoAnswer):
            self._files.call(partial(self._open_file, path, access or Access()), _OPEN_S)

    def _open_file(self, path: Path, access: Access) -> None:
        """Opens the file and writes what was held. In the thread of files, as all below that works on the file."""
        try:
            file = JournalFile(path, access, self._max_bytes, self._first_line)
        except OSError as error:
            self._warn_once(error)
            with self._lock:
                self._is_opening = False
            return
        with self._lock:
            self._file = file
            held, self._held = self._held, []
        for line in held:
            self._append(file, line)

    def _write_queued(self) -> None:
        file = self._file
        assert file is not None, "lines are queued for a file that is open"
        while True:
            with self._lock:
                lines, self._queued = self._queued, deque()
                self._queued_bytes = 0
                if not lines:
                    self._is_scheduled = False
                    return
            for line in lines:
                self._append(file, line)

    def _first_line(self, piece: int, lost_bytes: int) -> str:
        event = JournalPieceEvent(self.run_id, self.node, self._started, piece, lost_bytes)
        return as_line(event, time.time())

    def close(self) -> None:
        """Closes the file, when all is written. Waits `_CLOSE_S` at most."""
        self._files.submit(self._close_file)
        if self._owns_files:
            self._files.close(_CLOSE_S)
        else:
            self._files.flush(_CLOSE_S)

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()

    def _append(self, file: JournalFile, line: str) -> None:
        try:
            file.append(line)
            if self.dropped > self._noted:
                unnoted = self.dropped - self._noted
                self._noted = self.dropped
                file.append(as_line(LinesDroppedEvent(unnoted), time.time()))
        except OSError as error:
            self._warn_once(error)

    def _warn_once(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("the journal cannot be written (%s); training goes on without it", error)


def as_line(event: Event, t: float) -> str:
    """Returns the line of an event, without its end.

    Args:
        t: when it is written (seconds since 1970).
    """
    head = {"v": event.v, "t": round(t, 6), "event": event.event}
    try:
        return json_text(head | event.facts())
    except (TypeError, ValueError, RecursionError) as error:  # a fact that came from a rank and is not JSON
        return json_text(head | {"not_written": f"{type(error).__name__}: {error}"})


def json_text(facts: Mapping[str, Any]) -> str:
    """Returns JSON in ASCII; numbers that JSON does not have are null, and values of other types are texts.

    Raises:
        TypeError, ValueError, RecursionError: it cannot be written: a key is no text, or it holds itself.
    """
    try:
        return json.dumps(facts, default=str, allow_nan=False)
    except ValueError:  # seldom: to look at each number first takes longer than to write all of them
        return json.dumps(_finite(facts), default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    """Returns a value with null for each number that is not finite, which JSON does not have, at any depth."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case Mapping():
            return {key: _finite(part) for key, part in value.items()}
        case list() | tuple():
            return [_finite(part) for part in value]
    return value


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
