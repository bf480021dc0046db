"""The processes of a cycle: the ranks and everything they started, wherever it went, and how all of it ends.

A process belongs to the cycle when it carries the job's tag in its environment, descends from a rank, or was orphaned
to us (the launcher is a child subreaper, so whatever a rank started has a line of parents that leads here). It is
signalled through its pidfd only, so a recycled pid cannot be hit. Knows nothing of why a cycle ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from ft_launcher.wait import readable
from rank_monitor.contract import env
from rank_monitor.contract.sweep import environ_of

_PR_SET_CHILD_SUBREAPER = 36
_AFTER_SIGKILL_S = 10.0
_RESCAN_S = 0.05


def become_subreaper() -> None:
    """Orphans of the ranks become children of this process instead of PID 1's."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass(frozen=True)
class _Stat:
    parent: int
    state: str


def _read_stat(pid: int) -> _Stat | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return _Stat(int(fields[1]), fields[0].decode())


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped (SIGSTOP, a debugger); False when it is gone."""
    stat = _read_stat(pid)
    return stat is not None and stat.state in "Tt"


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for a signal (SigCgt in /proc); False when that cannot be read."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except (OSError, ValueError, IndexError):
        pass
    return False


@dataclass
class Ending:
    """How a stop went: pids that needed SIGKILL, and pids that even that did not end."""

    killed: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)


class ProcessTree:
    """The processes of one cycle.

    Args:
        tag: the job's tag.
        ranks: pids of the ranks whose exit code was not taken yet.
        keep: pids that are ours but no ranks' (template and monitors), with all they started.
        adopt_orphans: whether every other child of this process belongs to the cycle (not so inside a user's program).
    """

    def __init__(self, tag: str, ranks: set[int], keep: set[int], adopt_orphans: bool) -> None:
        self._tag = tag
        self._ranks = ranks
        self._keep = keep
        self._adopt_orphans = adopt_orphans
        self._pidfds: dict[int, int] = {}

    def members(self) -> set[int]:
        """Pids of the living (not zombie) processes of the cycle, found anew; reaps orphans that ended."""
        stats = {}
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and (stat := _read_stat(int(entry.name))):
                stats[int(entry.name)] = stat
        found = {pid for pid in stats if pid != os.getpid() and self._belongs(pid, stats)}
        for pid in found - self._ranks:
            if stats[pid].state == "Z" and stats[pid].parent == os.getpid():
                with contextlib.suppress(OSError):
                    os.waitpid(pid, os.WNOHANG)
        return {pid for pid in found if stats[pid].state not in "ZX"}

    def _belongs(self, pid: int, stats: dict[int, _Stat]) -> bool:
        ancestor = pid
        while ancestor in stats:
            if ancestor in self._keep:
                return False
            if ancestor in self._ranks:
                return True
            if stats[ancestor].parent == os.getpid():
                if self._adopt_orphans:
                    return True
                break
            ancestor = stats[ancestor].parent
        return bool(environ_of(pid).get(env.JOB_TAG) == self._tag)

    def _refresh(self) -> None:
        members = self.members()
        for pid in members - self._pidfds.keys():
            with contextlib.suppress(OSError):
                self._pidfds[pid] = os.pidfd_open(pid)
        for pid in self._pidfds.keys() - members:
            os.close(self._pidfds.pop(pid))

    def _signal(self, number: int) -> None:
        for pidfd in self._pidfds.values():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(pidfd, number)
                if number != signal.SIGKILL:
                    signal.pidfd_send_signal(pidfd, signal.SIGCONT)

    def stop(self, first: int, limit_s: float) -> Ending:
        """Ends every process of the cycle: `first` at once, SIGKILL when `limit_s` seconds have passed, exactly.

        Returns:
            Who had to be killed, and who could not be.
        """
        ending = Ending()
        self._refresh()
        self._signal(first)
        deadline = time.monotonic() + limit_s
        killing = False
        while self._pidfds:
            now = time.monotonic()
            if now >= deadline:
                if killing:
                    ending.left = set(self._pidfds)
                    break
                killing, deadline = True, now + _AFTER_SIGKILL_S
                ending.killed |= set(self._pidfds)
            if killing:
                self._signal(signal.SIGKILL)
            left = deadline - now
            readable(self._pidfds.values(), min(left, _RESCAN_S) if killing else left)
            self._refresh()
        self._close()
        return ending

    def _close(self) -> None:
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()
