"""The journal: one JSON line per event, one file per node, append-only, flushed per event.

Written by `recorder.py`. A line that cannot be written is dropped and counted, with one warning: training goes on.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import IO, Any

from ft_launcher.record.access import Access

logger = logging.getLogger(__name__)

# Of the lines' format, so that readers can tell a later one apart.
VERSION = 1
# Lines in memory, of which a job without any fault has more the longer it runs.
_MAX_HELD = 10_000
_MAX_REPORTED = 64 << 20
"""Bytes of lines whose content ranks choose. Lines of the launcher itself are always written."""


class Journal:
    """The events of this node, held in memory until `open`, so that a run with nothing to keep leaves no file."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._file: IO[str] | None = None
        self.path: Path | None = None
        self.dropped = 0
        self._reported = 0

    def write(self, event: str, **facts: Any) -> None:
        """Appends one event with its facts (JSON values); never raises."""
        self._put(self._line(event, facts))

    def report(self, event: str, **facts: Any) -> None:
        """As `write`, for what a rank sent: bounded over the whole run, so that no rank can fill the disk."""
        line = self._line(event, facts)
        if self._reported > _MAX_REPORTED:
            return
        self._reported += len(line)
        if self._reported > _MAX_REPORTED:
            self._put(self._line("reports_end", {"after_bytes": self._reported}))
            logger.warning("the journal holds %d MiB of what ranks reported and takes no more", _MAX_REPORTED >> 20)
            return
        self._put(line)

    @staticmethod
    def _line(event: str, facts: dict[str, Any]) -> str:
        head = {"v": VERSION, "t": round(time.time(), 6), "event": event}
        try:
            # `default=str`: a value that is no JSON must not cost the event.
            return json.dumps({**head, **facts}, default=str)
        except (TypeError, ValueError, RecursionError) as error:  # a fact that came from a rank and is no JSON
            return json.dumps({**head, "not_written": f"{type(error).__name__}: {error}"})

    def _put(self, line: str) -> None:
        if self._file is None:
            if len(self._held) < _MAX_HELD:
                self._held.append(line)
            else:
                self.dropped += 1
            return
        self._append(line)

    def open(self, path: Path, access: Access | None = None) -> None:
        """Opens `path` and writes the held events to it, and all later ones; a second call is ignored.

        Args:
            access: who may read it; None: this user.
        """
        if self._file is not None:
            return
        try:
            access = access or Access()
            access.make_folder(path.parent)
            self._file = open(path, "a", encoding="utf-8", opener=access.opener)  # noqa: SIM115
        except OSError as error:
            self._say_once(error)
            return
        self.path = path
        held, self._held = self._held, []
        for line in held:
            self._append(line)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._say_once(error)

    def _append(self, line: str) -> None:
        assert self._file is not None
        try:
            self._file.write(line + "\n")
            # A launcher that is killed has written each event up to then.
            self._file.flush()
        except OSError as error:
            self._say_once(error)

    def _say_once(self, error: OSError) -> None:
        if self.dropped == 0:
            logger.warning("the journal cannot be written (%s); training goes on without it", error)
        self.dropped += 1
