"""The journal: one JSON line per event, one file per node, append-only, written as soon as the disk takes it.

`recorder.py` writes events; `events/` says what a line holds; `journal_reader.py` reads. A line that cannot be written
is dropped and counted, with one warning: training goes on. A line passes these stages:

    write --(until `open`)--> held in memory --> queued --(file thread)--> JournalFile --> disk

- Held: a run with nothing to keep leaves no file. The recorder opens the journal at the first event worth keeping.
- Queued: the file thread (`file_thread.py`) takes all queued lines at once. Where the disk does not answer, they wait,
  4 MiB at most.
- Unsent: where the disk is full, `JournalFile` keeps 1 MiB of lines and tries again with each new line.

Threads: any thread may call `write` and `report`, which do not block. All work on the file is done by the file thread.

The file holds whole lines and is rotated at a size, so that the sum on the disk is bounded. `NODE.jsonl` is the file
that grows. When it is full for the first time, it becomes `NODE.1.jsonl`, which stays, since it has the start of the
job. Each later full file becomes `NODE.2.jsonl` and replaces the one before. So a journal takes at most three times the
size on the disk, and the events that it lacks lie between piece 1 and piece 2.
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
"""Bytes of lines whose content ranks choose (`Journal.report`), over a whole run. Lines of the launcher itself have no
such bound: their number follows from what the job does."""
_MIB = 1 << 20
_MAX_QUEUED = 4 << 20
"""Bytes of lines that wait for a disk that does not answer: the journal of some thousand failed cycles."""
_OPEN_S = 1.0
"""Seconds that `open` waits for the file. Where the disk does not answer, the file is opened later."""
_CLOSE_S = 5.0
"""Seconds that `close` waits for a slow disk at the job's end. It does not wait for a disk that is stalled."""
_MAX_UNSENT = 1 << 20
"""Bytes of lines that wait for room on a full disk: some thousand events, which tell the story of several failed
cycles."""
_FIRST, _LATEST = 1, 2
"""Numbers of the two pieces that are kept beside the one that grows."""


class Journal:
    """The journal of this node. Events are held in memory until `open`, so that a run with nothing to keep leaves no
    file. `write` and `report` never raise, never block, and do nothing in a fork of the process.

    Args:
        max_mb: size of a piece of the file in MiB (`--ft-journal-max-mb`); None: the file grows without a bound.
        files: the file thread of the job; None: the journal has one of its own, and closes it.
    """

    def __init__(self, max_mb: float | None = None, files: FileThread | None = None) -> None:
        self._pid = os.getpid()
        self._files = files or FileThread()
        self._owns_files = files is None
        self._max_bytes = None
        if max_mb is not None:
            self._max_bytes = int(max_mb * _MIB)
        # Guards the held and the queued lines. Several threads write events: the agent's, and its calls with a limit.
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
        """Functions that get each event and its time (seconds since 1970). They are called in the thread that writes
        the event, without the lock; the status page keeps up to date by one."""
        self.run_id = ""
        self.node = ""
        """Set by the recorder, as `run_id`. Both stand in the first line of each later piece, which may be the only
        line left that says whose journal it is."""

    @property
    def path(self) -> Path | None:
        """The path of the file; None: the journal is not open."""
        if self._file is None:
            return None
        return self._file.path

    @property
    def dropped(self) -> int:
        """How many events are lost: they are in no file, and never will be."""
        if self._file is None:
            return self._held_dropped
        return self._held_dropped + self._file.dropped

    def write(self, event: Event) -> None:
        """Appends one event of the launcher. In a fork of the process this does nothing: the journal and the file
        thread are the parent's."""
        if os.getpid() != self._pid:
            return
        line = as_line(event, time.time())
        self._notify(event)
        with self._lock:
            self._put(line)

    def report(self, event: Event) -> None:
        """Appends one event whose content a rank chose. All such lines of a run together are bounded (`_MAX_REPORTED`),
        so that no rank can fill the disk; the event `reports_end` stands where the bound is reached."""
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
        """Holds a line until `open`, else queues it for the file thread. The caller holds the lock."""
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
        """Asks the file thread to write all queued lines, unless it was asked already; returns whether it will."""
        self._is_scheduled = self._is_scheduled or self._files.submit(self._write_queued)
        return self._is_scheduled

    def flush(self, limit_s: float) -> bool:
        """Waits until each line so far is in the file or was refused by it; returns whether that is so. Blocks for
        `limit_s` seconds at most."""
        return self._files.flush(limit_s)

    def open(self, path: Path, access: Access | None = None) -> None:
        """Opens the file; the held events and all later ones go there. A second call does nothing.

        Blocks for `_OPEN_S` at most. Where the disk does not answer in time, the file is opened when it does.

        Args:
            path: ends in `.jsonl`.
            access: who may read the file; None: this user alone.
        """
        with self._lock:
            if self._file is not None or self._is_opening:
                return
            self._is_opening = True
        with contextlib.suppress(NoAnswer):
            self._files.call(partial(self._open_file, path, access or Access()), _OPEN_S)

    def _open_file(self, path: Path, access: Access) -> None:
        """Opens the file and writes the held lines. Runs in the file thread, as does all below that works on the
        file."""
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
        """Closes the file after all lines are written. Blocks for `_CLOSE_S` at most."""
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
    """Returns the line of an event in JSON, without a line end. Never raises: a field that is no JSON (a rank may have
    sent anything) makes a line with the error in the place of the fields.

    Args:
        t: when the event is written (seconds since 1970).
    """
    head = {"v": event.v, "t": round(t, 6), "event": event.event}
    try:
        return json_text(head | event.facts())
    except (TypeError, ValueError, RecursionError) as error:  # a fact that came from a rank and is not JSON
        return json_text(head | {"not_written": f"{type(error).__name__}: {error}"})


def json_text(facts: Mapping[str, Any]) -> str:
    """Returns JSON in ASCII. NaN and infinities become null; values of types that JSON does not have become texts.

    Raises:
        TypeError, ValueError, RecursionError: `facts` cannot be written: a key is no text, or a value contains itself.
    """
    try:
        return json.dumps(facts, default=str, allow_nan=False)
    except ValueError:  # rare: checking each number of each line first would take longer than writing the lines
        return json.dumps(_finite(facts), default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    """Returns a value with None in the place of each number that is not finite, at any depth."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case Mapping():
            return {key: _finite(part) for key, part in value.items()}
        case list() | tuple():
            return [_finite(part) for part in value]
    return value


class JournalFile:
    """The file of a journal, and its rotation. Only the file thread uses it, and its calls may block on the disk.

    The file is locked while it is open, so that two launchers never write to one file.

    Args:
        path: ends in `.jsonl`. Where another living launcher has locked that file, `NAME_2.jsonl` is taken, and so on.
        access: who may read the file.
        max_bytes: size of a piece; None: the file grows without a bound.
        first_line: makes the first line of each later piece, from its number and the bytes of the piece that was
            removed for it.

    Raises:
        OSError: the file cannot be opened.
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
        """How many lines were not written, and never will be."""
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
        # A launcher that was killed, or a disk that was full, may have left half a line. It is ended first.
        if _ends_within_line(descriptor, self._size):
            self._unsent.append(b"\n")
            self._mid_line = True

    def append(self, line: str) -> None:
        """Writes a line after the lines that wait for room on the disk. After `close` the line is dropped.

        Raises:
            OSError: the line was not written. It waits for the next call if `_MAX_UNSENT` allows; else it is dropped.
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
        """Closes the file, after one more try to write the lines that wait; what is left of them is dropped. A second
        call does nothing."""
        if self._descriptor < 0:
            return
        with contextlib.suppress(OSError):
            self._send()
        self.dropped += len(self._unsent)
        self._unsent.clear()
        with contextlib.suppress(OSError):
            # Unlocked explicitly: ranks that are forked functions, and what they leave running, inherit the open file
            # and with it the lock.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        self._descriptor = -1

    def _send(self) -> None:
        """Writes the lines that wait, and rotates the file between two lines where it is full.

        Raises:
            OSError: the rest cannot be written now.
        """
        while self._unsent:
            if not self._mid_line and self._is_full(len(self._unsent[0])):
                self._rotate()
            data = self._unsent[0]
            written = os.write(self._descriptor, data)
            self._size += written
            # At the end of the disk the system may write only a part of a line. The rest of that line comes next.
            self._mid_line = written < len(data)
            if self._mid_line:
                self._unsent[0] = data[written:]
            else:
                self._unsent.popleft()
                self._lines += 1

    def _is_full(self, more: int) -> bool:
        # A piece takes at least one line beside its first. Else a line that is longer than a piece would begin new
        # pieces without end.
        return self._max_bytes is not None and self._lines > 0 and self._size + more > self._max_bytes

    def _rotate(self) -> None:
        """Begins a new piece. On an error the present piece stays the one that grows.

        Raises:
            OSError: the new piece cannot be made.
        """
        kept, lost = self._path_of_full_piece()
        # The new file is opened under another name first. Were the present one renamed first, and the open then failed,
        # there would be nothing to append to.
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

    def _path_of_full_piece(self) -> tuple[Path, int]:
        """Returns the path to which the full piece is renamed, and the bytes of the piece that it replaces there."""
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
    """Locks a file, until the descriptor is closed. Returns False if another launcher has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: taken as free
        return True
    return True


def _ends_within_line(descriptor: int, size: int) -> bool:
    if size == 0 or not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return False
    return os.pread(descriptor, 1, size - 1) != b"\n"
