"""Reads the files that ranks print to, in a thread of its own, and wakes the agent when there is news.

The thread that copies them to the console may wait for it; this one waits for nobody. A rank is judged right after
all that it printed has been read, so a launcher that stood still judges no rank by what it has not read.
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
"""Shortest time between two readings (seconds): a progress bar changes ten times a second, and nobody needs that."""
_CHUNK = 1 << 16
_MAX_BEHIND = 1 << 20
"""Bytes. Of a rank that prints faster than this is read, all but the end is left out: 100 lines of 600 characters a
second are 60 KiB, and what is left at the end of a cycle must not hold up the next one."""
_LAST_S = 1.0
"""Seconds at the end of a cycle for what is left of all ranks; after that only the last `_CHUNK` of a file is read."""
_MAX_WAIT_S = 3600.0
"""Seconds; poll(2) takes no more than 24 days, and a limit may be longer."""
_READER = "watch_log"


class _Stream:
    """One file of a rank, and where it was left. `spool`: to be given back as it is read."""

    def __init__(self, path: str, spool: Spool | None) -> None:
        self.path = path
        self.lines = Lines()
        self._spool = spool
        self._begin = 0
        if spool is not None:
            self._begin = spool.join(_READER)
        self._file: IO[bytes] | None = None

    def read(self, log: RankLog, now_ns: int, is_late: Callable[[], bool]) -> None:
        if self._file is None:
            self._file = open_regular(self.path, follow_link=True, buffering=0)
            self._file.seek(self._begin)
            self.lines = Lines(within_a_line=self._begin > 0)
        size = os.fstat(self._file.fileno()).st_size
        if size < self._file.tell():
            self._begin_anew(log, now_ns)
        if size - self._file.tell() > _MAX_BEHIND:
            self._skip_to(size - _CHUNK, log, now_ns)
        # Not beyond the size of now: a rank that prints without end must not keep this from the others.
        while self._file.tell() < size:
            if size - self._file.tell() > _CHUNK and is_late():
                self._skip_to(size - _CHUNK, log, now_ns)
            content = self._file.read(_CHUNK)
            if not content:
                break
            log.note_lines(self.lines.split(content), self.lines.open_line, now_ns)
        if self._spool is not None:
            self._spool.give_back(_READER, self._file.tell())

    def leave(self) -> None:
        """From now on nothing is kept for this."""
        if self._spool is not None:
            self._spool.leave(_READER)

    def close(self) -> None:
        self.leave()
        if self._file is not None:
            self._file.close()

    def _skip_to(self, place: int, log: RankLog, now_ns: int) -> None:
        assert self._file is not None
        self._file.seek(place)
        self.lines = Lines(within_a_line=True)
        log.skipped(now_ns)

    def _begin_anew(self, log: RankLog, now_ns: int) -> None:
        """A rank has emptied its file by opening it, maybe before all of it was read."""
        assert self._file is not None
        self._file.seek(0)
        self.lines = Lines()
        log.skipped(now_ns)
        if self._spool is not None:
            self._spool.begin_anew(_READER)


class LogWatch:
    """The output of the ranks of one cycle, from `start` until `stop`.

    Args:
        watch_log: as in the setting of that name.
        limit_s: from one printed step to the next; None: no limit.
        files: local rank -> the files it prints to.
        spools: by path, those of them that are to be given back.
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
        """Starts the thread. The files must exist."""
        self._thread.start()

    def fileno(self) -> int:
        """Readable when `take` has something."""
        return self._news

    def drain(self) -> list[tuple[int, News]]:
        """Returns what was found since the last call, by local rank."""
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
        """Returns what a rank printed in place of steps, with its local rank; None: a rank has printed steps, or none
        has printed a line. A rank whose lines a preset reads goes before others.

        To be called after `stop`, or in the thread of this.
        """
        if self.has_steps:
            return None
        all_ranks = [(local_rank, log.steps_missing()) for local_rank, log in self._logs.items()]
        found = [(local_rank, missing) for local_rank, missing in all_ranks if missing is not None]
        return min(found, key=lambda item: (not item[1].preset, item[0]), default=None)

    def intervals(self) -> tuple[int, Durations] | None:
        """Returns the local rank that printed most steps, and how long it was from one to the next; None: no rank did.

        To be called after `stop`.
        """
        found = [(local_rank, log.intervals) for local_rank, log in self._logs.items() if log.intervals.count]
        return max(found, key=lambda item: (item[1].count, -item[0]), default=None)

    def stop(self) -> list[tuple[int, News]]:
        """Reads what is left, or the end of it, without judging it, and ends the thread; returns the last news."""
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
        with contained("what the ranks print is no longer read"):
            try:
                self._follow()
            except Exception:
                for streams in self._streams.values():
                    for stream in streams:
                        stream.leave()
                raise

    def _follow(self) -> None:
        self._read_all()
        while self._written.wait(self._limit_s(), _PERIOD_S):
            self._read_all()

    def _limit_s(self) -> float:
        """How long to wait for more (seconds): until a rank is to be judged."""
        due = [moment for moment in (log.due_ns() for log in self._logs.values()) if moment is not None]
        if not due:
            return math.inf
        return min((min(due) - time.monotonic_ns()) / NS_PER_S, _MAX_WAIT_S)

    def _is_late(self) -> bool:
        return time.monotonic() > self._read_by

    def _read_all(self, judges: bool = True) -> None:
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
        # Not held while lines are read: the agent must not wait for that.
        with self._lock:
            self._found += news
        os.eventfd_write(self._news, 1)
