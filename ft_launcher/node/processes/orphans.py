"""Reaps processes that ranks left without a parent: they become children of the launcher, which would keep a zombie of
each until the cycle's end, and so would a container in which the launcher is PID 1.

Called by `agent/ranks.py` while ranks run and while the launcher waits, on the agent's thread. Takes the exit codes of
single processes only, never that of any child: the launcher's own children, and those of a program that calls
`launch()`, have somebody who waits for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from ft_launcher.node.processes.process_tree import Stat, all_stats

SAMPLE_S = 2.0
"""Seconds between two looks: a rank that leaves a thousand processes in this time is far from any limit of pids."""


class Orphans:
    """The orphans that this process has adopted.

    Args:
        adopts: every child of this process that it has not started itself is one; False inside a user's program, where
            only those in a rank's session are.
        on_reaped: called with the pid of each orphan whose exit code was taken.
    """

    def __init__(self, adopts: bool, on_reaped: Callable[[int], None] = lambda pid: None) -> None:
        self._adopts = adopts
        self._on_reaped = on_reaped
        self._seen_at: dict[tuple[int, float], float] = {}
        """Zombies by pid and start, and when each was first seen (monotonic seconds)."""

    def reap(self, own: Collection[int], sessions: Collection[int], now: float) -> None:
        """Takes the exit codes of orphans that have ended. Does not block.

        Args:
            own: pids of ranks, zygote, monitors and checks: the code that started them reaps them.
            sessions: of the ranks, which are led by them.
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
        """Returns which of these zombies are orphans as far as that is certain now. Arguments as of `reap`.

        A process in a rank's session can only have been started below that rank. Of other children the launcher's own
        are known, except those that a library starts: it takes their codes at once, so one that is a zombie for longer
        is an orphan.
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
