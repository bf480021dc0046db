"""Has the ranks save as often as it pays (`--ft-save-interval auto`): chosen at the start of each cycle, for its ranks.

The node of rank 0 chooses, by the journals of earlier attempts and by its own events of this one; `report/` decides.
What is not known, or cannot be read, costs accuracy only: the first value applies then.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

from ft_launcher.record import events
from ft_launcher.record.contained import contained
from ft_launcher.record.journal_reader import Entry, Findings, journals_in, read_journals
from ft_launcher.record.recorder import Recorder
from ft_launcher.report.collection import Collection
from ft_launcher.report.findings import find
from ft_launcher.report.save_interval import choose
from rank_monitor.contract.settings.config import Settings
from rank_monitor.contract.settings.kinds import AUTO

_MOST_READ = 32 << 20
"""Bytes of earlier journals, the newest first: two seconds. The journal of any node has the time of the whole job."""
_READ = frozenset({"ledger", "cycle_start", "cycle_end", "fault", "in_process_fault", "in_process_restart"})
"""Events of which the choice is made."""


class SaveIntervals:
    """The interval between two saves, cycle by cycle.

    Args:
        settings: of this launcher. Where it does not ask for a choice, nothing is kept or read.
        recorder: the events of this attempt, which are listened to, and where the choice is written.
    """

    def __init__(self, settings: Settings, recorder: Recorder) -> None:
        self._is_auto = settings.monitor.save_interval == AUTO
        self._folder = settings.record.journal_dir
        self._recorder = recorder
        self._earlier: Collection | None = None
        # Any thread may write an event.
        self._lock = threading.Lock()
        self._present = Collection()
        if self._is_auto:
            recorder.journal.listeners.append(self._take)

    def choose(self, cycle: int) -> float | None:
        """Returns the seconds between two saves for a cycle that starts now; None: they are not to be chosen."""
        if not self._is_auto:
            return None
        findings = None
        with contained("the journal is not used for --ft-save-interval auto"), self._lock:
            if self._earlier is None:
                self._earlier = Collection()
                self._read_earlier(self._earlier)
            known = Collection()
            # A launch without a cycle may be of this attempt, on a node that began before this one.
            known.launches = [launch for launch in self._earlier.launches if launch.cycles] + self._present.launches
            known.faults = self._earlier.faults + self._present.faults
            findings = find(known)
        chosen = choose(findings)
        self._recorder.save_interval(
            events.SaveInterval(cycle, chosen.interval_s, chosen.reason, chosen.faults, chosen.save_s, chosen.mtbf_s)
        )
        return chosen.interval_s

    def _read_earlier(self, earlier: Collection) -> None:
        """Takes the events of this job that are in the folder of the journals, but those of this attempt."""
        if not self._folder:
            return
        began = min((launch.since for launch in self._present.launches), default=float("inf"))
        left = _MOST_READ
        files: list[Path] = []
        for pieces in sorted(journals_in([Path(self._folder)]), key=lambda pieces: -pieces[-1].stat().st_mtime):
            left -= sum(piece.stat().st_size for piece in pieces)
            if left < 0:
                break
            files += pieces
        for entry in read_journals(files, Findings(), self._recorder.journal.run_id):
            if entry.t < began:
                earlier.add(entry)

    def _take(self, event: events.Event, t: float) -> None:
        if event.event not in _READ:
            return
        journal = self._recorder.journal
        # As it comes from a file: lists and plain values.
        facts = json.loads(json.dumps(event.facts(), default=str))
        with self._lock:
            self._present.add(Entry(event.event, event.v, t, facts, journal.run_id, journal.node))
