"""Has the ranks save as often as it pays (`--ft-save-interval auto`): an interval is chosen at the start of each cycle.

`composition.py` makes a `SaveIntervals` where the option says so, and gives its choice to the ranks of a cycle in their
environment. The node of rank 0 decides, by the journals of earlier attempts and by its own events of this one.
`advice.py` chooses the number.

What cannot be read in time only makes the choice less accurate: the last findings apply then.

Threads: the agent's thread calls `choose`, which blocks for `wait_s` seconds at most. `ft_saves` reads journals and
makes the findings: the journals of a long job take seconds, and a folder on another machine may hang for ever. Where
`ft_saves` still runs at the next choice, no second one is started. Any thread may write an event; `_on_event` only
appends it to a deque, and `ft_saves` takes it from there.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from pathlib import Path

from ft_launcher.record import events
from ft_launcher.record.journal.contained import contained
from ft_launcher.record.journal_reader import JournalEntry, Problems, journals_in, read_journals
from ft_launcher.record.recorder import Recorder
from ft_launcher.tools.report.advice import choose_save_interval
from ft_launcher.tools.report.collection import Collection
from ft_launcher.tools.report.findings import find
from ft_launcher.tools.report.job_findings import JobFindings

_MAX_READ = 32 << 20
"""Bytes of earlier journals that are read, the newest first: two seconds. The journal of any node has the time of the
whole job."""
_WAIT_S = 2.0
"""Seconds. A start of a cycle waits no longer. Reading `_MAX_READ` takes about as long."""
_READ = frozenset({"ledger", "cycle_start", "cycle_end", "fault", "in_process_fault", "in_process_restart"})
"""Events from which the choice is made."""


class SaveIntervals:
    """Chooses the seconds between two saves, cycle by cycle.

    Args:
        journals: the folder with the journals of earlier attempts; None: journals are not written to files.
        recorder: gets the choice; its journal's events are listened to.
        wait_s: seconds that the start of a cycle waits for `ft_saves`.
    """

    def __init__(self, journals: str | None, recorder: Recorder, wait_s: float = _WAIT_S) -> None:
        self.wait_s = wait_s
        self._folder = journals
        self._recorder = recorder
        self._earlier = Collection()
        self._has_read = False
        self._present = Collection()
        # Events that any thread has written; `ft_saves` takes them out.
        self._received: deque[JournalEntry] = deque()
        self._findings: JobFindings | None = None
        self._reading: threading.Thread | None = None
        recorder.journal.listeners.append(self._on_event)

    def choose(self, cycle: int, has_rank0: bool) -> float:
        """Returns the seconds between two saves for a cycle that starts now. Blocks for `wait_s` seconds at most.

        Args:
            has_rank0: whether rank 0 starts on this node. Its choice counts, and is written to the journal. The choice
                of another node counts only after a restart in process has made one of its ranks rank 0; such a node has
                not read earlier journals.
        """
        with contained("the journal is not used for --ft-save-interval auto"):
            if self._reading is None or not self._reading.is_alive():
                self._reading = threading.Thread(target=self._find, args=(has_rank0,), name="ft_saves", daemon=True)
                self._reading.start()
                self._reading.join(self.wait_s)
        chosen = choose_save_interval(cycle, self._findings)
        if has_rank0:
            self._recorder.save_interval(chosen)
        return chosen.interval_s

    @contained("the journal is not used for --ft-save-interval auto")
    def _find(self, has_rank0: bool) -> None:
        """The thread `ft_saves`: adds what was written since the last time, and earlier journals once, and finds
        anew."""
        while self._received:
            self._present.add(self._received.popleft())
        if has_rank0 and not self._has_read:
            self._has_read = True
            self._read_earlier()
        known = Collection()
        # A launch without a cycle is left out: it may belong to this attempt, on a node that began before this one.
        known.launches = [launch for launch in self._earlier.launches if launch.cycles] + self._present.launches
        known.faults = self._earlier.faults + self._present.faults
        self._findings = find(known)

    def _read_earlier(self) -> None:
        """Adds the events of this job in the folder of journals that were written before this attempt began."""
        if not self._folder:
            return
        began = min((launch.since for launch in self._present.launches), default=float("inf"))
        journals: list[tuple[float, int, list[Path]]] = []
        for pieces in journals_in([Path(self._folder)]):
            with contextlib.suppress(OSError):  # another launcher may be renaming a piece
                found = [piece.stat() for piece in pieces]
                journals.append((found[-1].st_mtime, sum(file.st_size for file in found), pieces))
        left = _MAX_READ
        files: list[Path] = []
        for _, size, pieces in sorted(journals, reverse=True):
            if size <= left:
                left -= size
                files += pieces
        for entry in read_journals(files, Problems(), self._recorder.journal.run_id):
            if entry.t < began:
                self._earlier.add(entry)

    def _on_event(self, event: events.Event, t: float) -> None:
        """Keeps an event for `ft_saves`. Called by the journal, in the thread that writes the event."""
        if event.event not in _READ:
            return
        journal = self._recorder.journal
        # As a journal's reader would return it: with lists and plain values.
        facts = json.loads(json.dumps(event.facts(), default=str))
        self._received.append(JournalEntry(event.event, event.v, t, facts, journal.run_id, journal.node))
