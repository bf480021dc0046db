"""The journal: one JSON line per event, one file per node, append-only, written at once.

Written by `recorder.py`; `events/` says what a line holds, `journal_file.py` how lines get to the disk. A line that
cannot be written is dropped and counted, with one warning: training goes on.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ft_launcher.record.access import Access
from ft_launcher.record.contained import contained
from ft_launcher.record.events import Event, JournalPiece, LinesDropped, ReportsEnd
from ft_launcher.record.journal_file import JournalFile

logger = logging.getLogger(__name__)

# Lines in memory, of which a job without any fault has more the longer it runs.
_MAX_HELD = 10_000
_MAX_REPORTED = 64 << 20
"""Bytes of lines whose content ranks choose. Lines of the launcher itself are always written."""
_MIB = 1 << 20


class Journal:
    """The events of this node, held in memory until `open`, so that a run with nothing to keep leaves no file.

    Args:
        max_mb: MiB of a piece of the file (`--ft-journal-max-mb`); None: it grows without a bound.
    """

    def __init__(self, max_mb: float | None = None) -> None:
        self._max_bytes = None
        if max_mb is not None:
            self._max_bytes = int(max_mb * _MIB)
        # The agent's calls with a limit run in threads: two of them in one append would write a line twice.
        self._lock = threading.Lock()
        self._held: list[str] = []
        self._held_dropped = 0
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
        """Appends one event; never raises. Any thread may call this."""
        line = as_line(event, time.time())
        self._tell(event)
        with self._lock:
            self._put(line)

    def report(self, event: Event) -> None:
        """As `write`, for what a rank sent: bounded over the whole run, so that no rank can fill the disk."""
        line = as_line(event, time.time())
        self._tell(event)
        with self._lock:
            if self._reported > _MAX_REPORTED:
                return
            self._reported += len(line)
            if self._reported <= _MAX_REPORTED:
                self._put(line)
                return
            self._put(as_line(ReportsEnd(self._reported), time.time()))
        logger.warning("the journal holds %d MiB of what ranks reported and takes no more", _MAX_REPORTED >> 20)

    def _tell(self, event: Event) -> None:
        for listen in self.listeners:
            with contained("the status of the job is not complete"):
                listen(event, time.time())

    def _put(self, line: str) -> None:
        if self._file is not None:
            self._append(self._file, line)
        elif len(self._held) < _MAX_HELD:
            self._held.append(line)
        else:
            self._held_dropped += 1

    def open(self, path: Path, access: Access | None = None) -> None:
        """Opens `path` and writes the held events to it, and all later ones; a second call is ignored.

        Args:
            path: its name, which ends in `.jsonl`.
            access: who may read it; None: this user.
        """
        with self._lock:
            if self._file is not None:
                return
            try:
                self._file = JournalFile(path, access or Access(), self._max_bytes, self._first_line)
            except OSError as error:
                self._warn_once(error)
                return
            held, self._held = self._held, []
            for line in held:
                self._append(self._file, line)

    def _first_line(self, piece: int, lost_bytes: int) -> str:
        event = JournalPiece(self.run_id, self.node, self._started, piece, lost_bytes)
        return as_line(event, time.time())

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()

    def _append(self, file: JournalFile, line: str) -> None:
        try:
            file.append(line)
            if self.dropped > self._noted:
                unnoted = self.dropped - self._noted
                self._noted = self.dropped
                file.append(as_line(LinesDropped(unnoted), time.time()))
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
    facts = event.facts()
    try:
        return _as_json(head | facts)
    except ValueError:
        pass  # NaN or an infinity, which are no JSON
    except (TypeError, RecursionError) as error:
        return _as_json(head | {"not_written": f"{type(error).__name__}: {error}"})
    try:
        return _as_json(head | finite(facts))
    except (TypeError, ValueError, RecursionError) as error:  # a fact that came from a rank and is not JSON
        return _as_json(head | {"not_written": f"{type(error).__name__}: {error}"})


def _as_json(facts: Mapping[str, Any]) -> str:
    # `default=str`: a value that is not JSON must not cost the event.
    return json.dumps(facts, default=str, allow_nan=False)


def finite(value: Any) -> Any:
    """Returns a value with null for each number that is not finite, which JSON does not have, at any depth."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case Mapping():
            return {key: finite(part) for key, part in value.items()}
        case list() | tuple():
            return [finite(part) for part in value]
    return value
