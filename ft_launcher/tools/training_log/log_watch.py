"""Reads the files that ranks print to, in a thread of its own, and wakes the agent when there is something to know.

`log_feed.py` makes one `LogWatch` per cycle. What a line means is decided in `rank_log.py` and `presets.py`; here are
the files, the thread and the descriptor.

Threads: `ft_log_watch` sleeps until inotify reports a write or a limit is due, reads all files, and judges each rank
right after all that the rank printed has been read. A launcher that stood still for a minute therefore judges no rank
by lines that it has not read yet. The thread that copies output to the console is another one (`log_pump.py`), since it
may wait for a slow terminal, and this one must wait for nobody. The agent's thread calls the public methods; `drain`
and `fileno` may be called while the thread runs, the other results only after `stop`. A lock covers the list of
findings and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import IO

from ft_launcher.record.journal.contained import contained, log_contained
from ft_launcher.record.logs.log_pump import WrittenFiles
from ft_launcher.record.logs.spool import Spool
from ft_launcher.tools.training_log.rank_log import NS_PER_S, Lines, News, RankLog, StepsMissing
from rank_monitor.contract.wire.foreign import open_regular
from rank_monitor.contract.wire.rank_times import Durations

logger = logging.getLogger(__name__)

_PERIOD_S = 0.25
"""Shortest time between two readings (seconds). A progress bar changes ten times a second, and no limit needs to see
each change."""
_CHUNK = 1 << 16
"""Bytes of one read, and of the end of a file that is still read when there is no time for all of it."""
_MAX_BEHIND = 1 << 20
"""Bytes. Where a rank prints faster than they are read, all but the end of its file is skipped. 100 lines of 600
characters a second are 60 KiB, so only a runaway program reaches this, and what it left unread must not hold up the
next cycle."""
_LAST_S = 1.0
"""Seconds at the end of a cycle to read what is left of all ranks. After that only the last `_CHUNK` bytes of each file
are read."""
_MAX_WAIT_S = 3600.0
"""Longest wait (seconds). poll(2) takes no more than 24 days, and a limit may be longer."""
_READER = "watch_log"
"""The name under which this reader joins a spool. A spool frees what all its readers have given back."""


class _Stream:
    """One output file of a rank, and how far it has been read.

    Args:
        path: the file.
        spool: the spool behind the file, if it has one: what was read is given back, so that the file does not grow
            without end. None for files that the user keeps (`--redirects`).
    """

    def __init__(self, path: str, spool: Spool | None) -> None:
        self.path = path
        self.lines = Lines()
        self._spool = spool
        self._begin = 0
        if spool is not None:
            self._begin = spool.add_reader(_READER)
        self._file: IO[bytes] | None = None

    def read(self, log: RankLog, now_ns: int, is_late: Callable[[], bool]) -> None:
        """Reads what was printed since the last call and notes its lines in `log`.

        Args:
            now_ns: the time to note the lines with (monotonic nanoseconds).
            is_late: whether the time of the cycle's end is used up; then all but the last `_CHUNK` bytes are skipped.

        Raises:
            OSError: the file cannot be opened or read.
        """
        if self._file is None:
            self._file = open_regular(self.path, follow_link=True, buffering=0)
            self._file.seek(self._begin)
            self.lines = Lines(within_a_line=self._begin > 0)
        size = os.fstat(self._file.fileno()).st_size
        if size < self._file.tell():
            self._begin_anew(log, now_ns)
        if size - self._file.tell() > _MAX_BEHIND:
            self._skip_to(size - _CHUNK, log, now_ns)
        # Reads up to the size of now, not to the end: a rank that prints without pause must not keep this thread from
        # the other ranks.
        while self._file.tell() < size:
            if size - self._file.tell() > _CHUNK and is_late():
                self._skip_to(size - _CHUNK, log, now_ns)
            content = self._file.read(_CHUNK)
            if not content:
                break
            log.note_lines(self.lines.split(content), self.lines.open_line, now_ns)
        if self._spool is not None:
            self._spool.note_read(_READER, self._file.tell())

    def leave(self) -> None:
        """Leaves the spool, which from now on keeps nothing for this reader. A second call does nothing."""
        if self._spool is not None:
            self._spool.remove_reader(_READER)

    def close(self) -> None:
        """Leaves the spool and closes the file."""
        self.leave()
        if self._file is not None:
            self._file.close()

    def _skip_to(self, place: int, log: RankLog, now_ns: int) -> None:
        """Continues at byte `place`. What lies before is not read, and the line around `place` is left out as
        incomplete."""
        assert self._file is not None
        self._file.seek(place)
        self.lines = Lines(within_a_line=True)
        log.skipped(now_ns)

    def _begin_anew(self, log: RankLog, now_ns: int) -> None:
        """Continues at the file's begin. A rank has emptied the file by opening it again, perhaps before all of it was
        read."""
        assert self._file is not None
        self._file.seek(0)
        self.lines = Lines()
        log.skipped(now_ns)
        if self._spool is not None:
            self._spool.restart_reader(_READER)


class LogWatch:
    """The printed output of the ranks of one cycle, from `start` until `stop`.

    Args:
        watch_log: the value of `--ft-watch-log`: a preset or an expression.
        limit_s: the longest time from one printed step to the next (seconds); None: no limit.
        files: local rank -> the files that it prints to.
        spools: path -> spool, for those of the files that a spool holds.
    """

    def __init__(
        self, watch_log: str, limit_s: float | None, files: Mapping[int, Collection[str]], spools: Mapping[str, Spool]
    ) -> None:
        self._logs = {local_rank: RankLog(watch_log, limit_s) for local_rank in files}
        self._streams = {
            local_rank: [_Stream(path, spools.get(path)) for path in paths] for local_rank, paths in files.items()
        }
        self._read_by = math.inf
        self._misses_steps = True
        self._lock = threading.Lock()
        self._found: list[tuple[int, News]] = []
        self._news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._written = WrittenFiles({stream.path for streams in self._streams.values() for stream in streams})
        self._thread = threading.Thread(target=self._run, daemon=True, name="ft_log_watch")

    def start(self) -> None:
        """Starts the thread `ft_log_watch`. The files must exist."""
        self._thread.start()

    def fileno(self) -> int:
        """Returns a descriptor that is readable while `drain` has something to return."""
        return self._news

    def drain(self) -> list[tuple[int, News]]:
        """Returns the findings since the last call, each with its local rank, in the order in which they were made."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._news)
        with self._lock:
            found, self._found = self._found, []
        return found

    @property
    def has_steps(self) -> bool:
        """Whether any rank has printed a step."""
        return any(log.has_steps for log in self._logs.values())

    def steps_missing(self) -> tuple[int, StepsMissing] | None:
        """Returns what a rank printed in place of steps, with its local rank. None: some rank printed steps, or none a
        line.

        Where several ranks qualify, one whose lines a preset can read comes first, then the lowest local rank. Called
        after `stop`, or in the thread itself.
        """
        if self.has_steps:
            return None
        all_ranks = [(local_rank, log.steps_missing()) for local_rank, log in self._logs.items()]
        found = [(local_rank, missing) for local_rank, missing in all_ranks if missing is not None]
        return min(found, key=lambda item: (not item[1].preset, item[0]), default=None)

    def intervals(self) -> tuple[int, Durations] | None:
        """Returns the local rank that printed most steps, and the times from one step to the next. None: no rank
        printed two.

        Called after `stop`.
        """
        found = [(local_rank, log.intervals) for local_rank, log in self._logs.items() if log.intervals.count]
        return max(found, key=lambda item: (item[1].count, -item[0]), default=None)

    def stop(self) -> list[tuple[int, News]]:
        """Ends the thread and returns the last findings. Reads what is left without judging it. Blocks about a second
        at most."""
        self._read_by = time.monotonic() + _LAST_S
        self._written.end()
        self._thread.join()
        self._read_all(judges=False)
        last = self.drain()
        self._written.close()
        os.close(self._news)
        for streams in self._streams.values():
            for stream in streams:
                stream.close()
        return last

    def _run(self) -> None:
        """The thread. An error ends the reading, never the training, and gives the spools free."""
        with contained("what the ranks print is no longer read"):
            try:
                self._follow()
            except Exception:
                for streams in self._streams.values():
                    for stream in streams:
                        stream.leave()
                raise

    def _follow(self) -> None:
        """Reads all files whenever one of them was written to, or a limit is due, until `stop`."""
        self._read_all()
        while self._written.wait(self._limit_s(), _PERIOD_S):
            self._read_all()

    def _limit_s(self) -> float:
        """Returns how long to wait for more output (seconds): until the first rank is due to be judged."""
        due = [moment for moment in (log.due_ns() for log in self._logs.values()) if moment is not None]
        if not due:
            return math.inf
        return min((min(due) - time.monotonic_ns()) / NS_PER_S, _MAX_WAIT_S)

    def _is_late(self) -> bool:
        """Returns whether the time for the end of the cycle is used up. False before `stop`."""
        return time.monotonic() > self._read_by

    def _read_all(self, judges: bool = True) -> None:
        """Reads the files of all ranks once, and reports what follows from their lines.

        Args:
            judges: whether to apply the limit. False at the end of a cycle, where no further step is to be expected.
        """
        for local_rank, log in list(self._logs.items()):
            now_ns = time.monotonic_ns()
            try:
                for stream in self._streams[local_rank]:
                    stream.read(log, now_ns, self._is_late)
                if judges:
                    log.judge(now_ns)
            except Exception as error:  # what a rank prints must not end the launcher, nor this for other ranks
                log_contained(f"what local rank {local_rank} prints is no longer read", error)
                del self._logs[local_rank]
                for stream in self._streams[local_rank]:
                    stream.leave()
            news = log.news()
            if news:
                self._report([(local_rank, item) for item in news])
        if self._misses_steps and any(log.has_missed_steps for log in self._logs.values()):
            self._misses_steps = False
            missing = self.steps_missing()
            if missing is not None:
                self._report([missing])

    def _report(self, news: Iterable[tuple[int, News]]) -> None:
        """Adds findings to the list, and wakes the agent."""
        # The lock is not held while lines are read: the agent must not wait for that.
        with self._lock:
            self._found += news
        os.eventfd_write(self._news, 1)
