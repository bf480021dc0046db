"""What is kept of a run on disk: its journal, and copies of files that its ranks wrote.

Called by the recorder. Nothing is made before there is something to keep, and what cannot be kept is said once.
"""

from __future__ import annotations

import logging
import socket
from pathlib import Path

from ft_launcher.record.journal import Journal
from ft_launcher.record.logs import MOST_KEPT, RunFolder
from rank_monitor.contract.errors import ConfigError
from rank_monitor.contract.settings.config import RecordSettings
from rank_monitor.contract.wire.foreign import read_file

logger = logging.getLogger(__name__)

_STACKS = "stacks.txt"


class KeptFiles:
    """The files of a run.

    Args:
        run: the run's folder; made at the first thing worth keeping.
        settings: where the journal goes instead, how large it may become, and who reads it: with a log folder, a
            folder for the journal or a port to ask at, it is kept from the start.
    """

    def __init__(self, run: RunFolder, settings: RecordSettings) -> None:
        self.journal = Journal(settings.journal_max_mb)
        self.node = socket.gethostname()
        self._run = run
        self._failed = False
        self._folder: Path | None = None
        if settings.journal_dir:
            self._folder = Path(settings.journal_dir)
        asked_at = settings.metrics_port is not None or settings.status_port is not None
        if settings.journal_dir or asked_at:
            self.begin()
        self.follow_run()

    def follow_run(self) -> None:
        """Opens the journal where others have made the run's folder, for what the ranks print."""
        if self._run.exists:
            self.begin()

    def begin(self) -> None:
        """Makes the run's folder and opens the journal; there is something to keep now."""
        if self._failed or self.journal.path is not None:
            return
        try:
            if self._folder is not None:
                folder = self._folder
            else:
                folder = self._run.make()
        except ConfigError as error:
            self._failed = True
            logger.warning("nothing can be kept of this run: %s", error)
            return
        self.journal.open(folder / f"journal.{self.node}.jsonl", self._run.access)

    def copy(self, cycle: int, local_rank: int, file: Path, name: str) -> str:
        """Copies a file of a rank to its log folder; returns the path, empty when it cannot be read or written."""
        self.begin()
        try:
            # The last stacks are the ones that explain the end.
            content = read_file(file, MOST_KEPT, tail=True)
        except OSError:
            return ""
        if not content or self._failed:
            return ""
        return self._write(cycle, local_rank, name, content)

    def copy_stacks(self, cycle: int, local_rank: int, stack_file: Path) -> str:
        """Copies a rank's stacks to its log folder; returns the path, empty when there are none."""
        return self.copy(cycle, local_rank, stack_file, _STACKS)

    def write_stacks(self, cycle: int, local_rank: int, text: str) -> str:
        """Writes the traceback of a rank that has ended to where its stacks would be; returns the path."""
        return self._write(cycle, local_rank, _STACKS, text.encode(errors="backslashreplace"))

    def _write(self, cycle: int, local_rank: int, name: str, content: bytes) -> str:
        try:
            path = self._run.of_rank(cycle, local_rank) / name
            with open(path, "wb", opener=self._run.access.opener) as file:
                file.write(content)
        except (OSError, ConfigError):
            return ""
        return str(path)
