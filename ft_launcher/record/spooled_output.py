"""The output of a cycle's ranks as far as it is spooled: read by the launcher on its way to the console.

Used by `ranks/rank_context.py`, only where that was asked for: else ranks print to the console themselves. A thread
bounds the spools from the start of the ranks until all have ended, also where no reader is left: those of streams that
are not shown are read by `--ft-watch-log` alone, which ends with the cycle, and a rank may print until it is stopped.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping, MutableMapping
from typing import TextIO

from ft_launcher.record.contained import contained
from ft_launcher.record.log_pump import SpoolStream, identity, watch_files
from ft_launcher.record.spool import Spool
from rank_monitor.contract.processes.wait import readable

logger = logging.getLogger(__name__)

_CONSOLE = ""
_PERIOD_S = 0.1
"""Seconds between two looks at the spools, while ranks print: a rank that prints 1 GB/s takes 100 MB meanwhile."""
_CHUNK = 1 << 16


class SpooledOutput:
    """The spools of one cycle; at first none."""

    def __init__(self) -> None:
        self.streams: list[SpoolStream] = []
        """What a pump has to copy to the console."""
        self._shown: dict[str, Spool] = {}
        self._unshown: dict[str, Spool] = {}
        self._local_ranks: set[int] = set()
        self._thread: threading.Thread | None = None
        self._stop_reader, self._stop_writer = -1, -1

    @classmethod
    def instead_of_console(cls, stdouts: MutableMapping[int, str], stderrs: MutableMapping[int, str]) -> SpooledOutput:
        """Makes spools for streams that would be inherited or discarded, and puts their paths into the mappings.

        Where both streams of a rank go to the same terminal, pipe or file, they share a spool, which keeps the order
        of what the rank prints.
        """
        made = cls()
        same = identity(sys.stdout) == identity(sys.stderr)
        try:
            for local_rank in stdouts:
                made._replace(local_rank, stdouts, sys.stdout)
                if same and stdouts[local_rank] in made._shown and stderrs[local_rank] == _CONSOLE:
                    stderrs[local_rank] = stdouts[local_rank]
                else:
                    made._replace(local_rank, stderrs, sys.stderr)
        except OSError as error:
            logger.warning("what some ranks print cannot be read (--ft-watch-log): %s", error.strerror)
        return made

    @property
    def spools(self) -> Mapping[str, Spool]:
        """All spools, by path."""
        return {**self._shown, **self._unshown}

    def of(self, local_rank: int) -> bool:
        """Whether a stream of this rank is spooled."""
        return local_rank in self._local_ranks

    def start(self) -> None:
        """Bounds the spools from now on, until `close`, even if nobody reads them."""
        if not self.spools:
            return
        self._stop_reader, self._stop_writer = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, daemon=True, name="ft_spools")
        self._thread.start()

    def close(self) -> None:
        """Closes all spools. A second call does nothing."""
        if self._thread is not None:
            # The end of the pipe wakes the thread.
            os.close(self._stop_writer)
            self._thread.join()
            os.close(self._stop_reader)
            self._thread = None
        for spool in (*self._shown.values(), *self._unshown.values()):
            spool.close()
        self._shown, self._unshown = {}, {}

    def _run(self) -> None:
        with contained("what ranks print is no longer bounded in memory"):
            self._bound(self.spools)

    def _bound(self, spools: Mapping[str, Spool]) -> None:
        inotify = watch_files(spools)
        while not readable([self._stop_reader], _PERIOD_S):
            for spool in spools.values():
                spool.trim()
            if not inotify:  # the system has none left: it looks again and again
                continue
            # A rank that prints nothing wakes nobody.
            ready = readable([self._stop_reader, *inotify], None)
            for descriptor in inotify:
                if descriptor in ready:
                    os.read(descriptor, _CHUNK)
        for descriptor in inotify:
            os.close(descriptor)

    def _replace(self, local_rank: int, paths: MutableMapping[int, str], console: TextIO | None) -> None:
        path = paths[local_rank]
        if path not in (_CONSOLE, os.devnull):
            return
        spool = Spool(f"ft_output{local_rank}")
        # Python has no stream where the descriptor was closed at its start.
        if path == _CONSOLE and console is not None:
            self._shown[spool.path] = spool
            self.streams.append(SpoolStream(spool, console))
        else:
            self._unshown[spool.path] = spool
        paths[local_rank] = spool.path
        self._local_ranks.add(local_rank)
