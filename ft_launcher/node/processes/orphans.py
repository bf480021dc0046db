"""Reaps processes that ranks left without a parent.

The kernel makes such an orphan a child of the launcher, which is a child subreaper, or PID 1 of a container. Nobody
waits for the orphan, so each would stay a zombie until the cycle's end and hold a pid.

Called by `agent/ranks.py` while ranks run and while the launcher waits, on the agent's thread. Takes the exit codes of
single pids only, and never waits for "any child": somebody else waits for the launcher's own children, and for those of
a program that calls `launch()`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from ft_launcher.node.processes.process_tree import Stat, all_stats

SAMPLE_S = 2.0
"""Seconds between two samples. A rank that leaves a thousand zombies in this time is far from any limit of pids."""


class Orphans:
    """The orphans that this process has adopted.

    Args:
        adopts: whether every child that this process has not started itself is an orphan. False inside a user's
            program, which has children of its own: only processes in a rank's session are orphans there.
        on_reaped: called with the pid of each orphan whose exit code was taken.
    """

    def __init__(self, adopts: bool, on_reaped: Callable[[int], None] = lambda pid: None) -> None:
        self._adopts = adopts
        self._on_reaped = on_reaped
        self._seen_at: dict[tuple[int, float], float] = {}
        """Zombies by pid and start, and when each was first seen (monotonic seconds)."""

    def reap(self, own: Collection[int], sessions: Collection[int], now: float) -> None:
        """Takes the exit codes of orphans that have ended. Does not block.

        Costs one system call while no child of this process is a zombie, and a scan of /proc otherwise.

        Args:
            own: pids of ranks, zygote, monitors and checks. The code that started them reaps them.
            sessions: the sessions of the ranks. Each rank leads its session, so these numbers are pids of ranks.
            now: monotonic seconds.
        """
        if not _has_zombies():
            self._seen_at = {}
            return
        this = os.getpid()
        zombies = {
            pid: stat
            for pid, stat in all_stats().items()
            if stat.parent == this and stat.state == "Z" and pid not in own
        }
        for pid in self.orphans_among(zombies, sessions, now):
            with suppress(OSError):  # one whose threads live on has no code yet
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None:
                    self._on_reaped(pid)

    def orphans_among(self, zombies: Mapping[int, Stat], sessions: Collection[int], now: float) -> set[int]:
        """Returns which of these zombies are certainly orphans. `sessions` and `now` as for `reap`.

        - A process in a rank's session can only have been started below that rank. It is an orphan at once.
        - Any other child may have been started by a library in this process. A library takes the exit code at once, so
          a child that is still a zombie after `SAMPLE_S` is an orphan.
        """
        self._seen_at = {(pid, stat.start): self._seen_at.get((pid, stat.start), now) for pid, stat in zombies.items()}
        found = {pid for pid, stat in zombies.items() if stat.session in sessions and stat.session != pid}
        if self._adopts:
            found |= {pid for (pid, _), seen_at in self._seen_at.items() if now >= seen_at + SAMPLE_S}
        return found


def _has_zombies() -> bool:
    """Whether a child of this process has ended and its code was not taken. Takes none (WNOWAIT)."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False
