"""The processes of a cycle: finds the ranks and everything they started, waits for it, and ends it.

A process belongs to the cycle when it carries the job's tag in its environment, descends from a rank, or was orphaned
to the launcher (a child subreaper: the parents of each process that a rank started lead to it). Signals go through
pidfds only, so that a recycled pid cannot be hit. Why a cycle ends is not known here, nor how long processes that a
rank started to outlive it, for instance an upload, may go on (`--ft-linger`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from ft_launcher.record.ending import Ending
from rank_monitor.contract.processes.sweep import carries, environ_of
from rank_monitor.contract.processes.wait import readable

# From linux/prctl.h.
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
# A process that waits in the kernel (state D) does not end by SIGKILL; after this it is reported and left.
_AFTER_SIGKILL_S = 10.0
# A process may fork just before it is killed, and only another scan of /proc finds its child.
_RESCAN_S = 0.05
# A read of these bytes contains the fields up to the start; only they are used.
_STAT_BYTES = 1024
_LONGEST_WAIT_S = 3600.0
"""poll takes milliseconds as a C int, which an infinite deadline does not fit into."""
_LOCAL_RANK = "LOCAL_RANK"
# Characters; a command line can have megabytes, and this is part of one log line.
_COMMAND_LENGTH = 200


def become_subreaper() -> None:
    """Makes orphans of the ranks children of this process instead of PID 1's."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def subreaper() -> Iterator[None]:
    """Context in which orphans below this process become its children. Restores the former state at its end."""
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int(0)
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    become_subreaper()
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


class Stat(NamedTuple):
    """Of proc(5). `start`: in ticks since boot."""

    parent: int
    state: str
    session: int
    start: float


def _read_stat(pid: int | str) -> Stat | None:
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # From the last parenthesis on: a process chooses its name, which may contain any character.
        fields = os.read(descriptor, _STAT_BYTES).rpartition(b") ")[2].split()
        return Stat(int(fields[1]), fields[0].decode(), int(fields[3]), float(fields[19]))
    except (OSError, IndexError):  # it ended between the two
        return None
    finally:
        os.close(descriptor)


def all_stats() -> dict[int, Stat]:
    """Returns what /proc says of every process that this one can see, by pid."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 (thousands of entries: a Path each costs more than the reading)
        if name.isdigit():
            stat = _read_stat(name)
            if stat is not None:
                found[int(name)] = stat
    return found


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped (SIGSTOP, a debugger); False when it is gone."""
    stat = _read_stat(pid)
    return stat is not None and stat.state in "Tt"


def is_zombie(pid: int) -> bool:
    """Whether the process, or its main thread, has ended and its exit code was not taken; False when it is gone."""
    stat = _read_stat(pid)
    return stat is not None and stat.state == "Z"


def start_ticks(pid: int) -> float:
    """When a process started, in ticks since boot; infinity when it is gone."""
    stat = _read_stat(pid)
    if stat is None:
        return float("inf")
    return stat.start


def command_of(pid: int) -> str:
    """Returns the command line of a process as one line, cut to 200 characters; its name when it has none."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes() or Path(f"/proc/{pid}/comm").read_bytes()
    except OSError:
        return "gone"
    text = " ".join(raw.replace(b"\0", b" ").decode(errors="replace").split())
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    if len(text) <= _COMMAND_LENGTH:
        return text
    return text[: _COMMAND_LENGTH - 3] + "..."


def _has_threads(pid: int) -> bool:
    """Whether a process has threads besides its main thread."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1  # noqa: PTH208 (as above)
    except OSError:
        return False


@dataclass(frozen=True)
class Background:
    """Distinguishes background processes of ranks that succeeded from all others.

    `sessions` are those of the ranks. `succeeded_since` has an entry for each local rank that failed and was started
    again: when the process that succeeded began, in ticks since boot; infinity if none did. What a failed process
    started is not a background process.
    """

    sessions: Collection[int]
    succeeded_since: Mapping[str, float] = field(default_factory=dict)

    def has(self, pid: int, session: int) -> bool:
        """Whether a process of the cycle is a background process."""
        if session in self.sessions or session == os.getsid(0):
            return False
        if not self.succeeded_since:
            return True
        since = self.succeeded_since.get(environ_of(pid).get(_LOCAL_RANK, ""), 0.0)
        return start_ticks(pid) >= since


class Hurry(Protocol):
    """What can shorten a stop while it waits: signals to the launcher."""

    def fileno(self) -> int:
        """Returns a descriptor that is readable when `time_left` may have changed."""

    def time_left(self) -> float:
        """Takes what has arrived; returns how long the processes may still take from now on (seconds, or infinity)."""


class ProcessTree:
    """The processes of one cycle.

    Args:
        tag: the job's tag.
        ranks: pids of the ranks whose exit code was not taken yet.
        keep: pids of the launcher's own processes (template and monitors), which are left out with their descendants.
        adopt_orphans: whether every other child of this process belongs to the cycle (not so inside a user's program).
        among: selects processes of the cycle by pid and session; by default all.
        on_reaped: called with the pid of each orphan whose exit code was taken.
    """

    def __init__(
        self,
        tag: str,
        ranks: set[int],
        keep: set[int],
        adopt_orphans: bool,
        among: Callable[[int, int], bool] = lambda pid, session: True,
        on_reaped: Callable[[int], None] = lambda pid: None,
    ) -> None:
        self._tag = tag
        self._among = among
        self._on_reaped = on_reaped
        self._ranks = ranks
        self._keep = keep
        self._adopt_orphans = adopt_orphans
        self._pidfds: dict[int, int] = {}

    def members(self) -> set[int]:
        """Scans /proc for processes of the cycle with a living thread. Returns their pids; reaps orphans that ended."""
        stats = all_stats()
        own = os.getpid()
        others = (pid for pid in stats if pid != own)
        found = {pid for pid in others if self._belongs(pid, stats, own) and self._among(pid, stats[pid].session)}
        for pid in found - self._ranks:
            if stats[pid].state == "Z" and stats[pid].parent == own:
                with contextlib.suppress(OSError):  # one whose threads live on has no code yet
                    if os.waitpid(pid, os.WNOHANG)[0]:
                        self._on_reaped(pid)
        return {pid for pid in found if stats[pid].state not in "ZX" or _has_threads(pid)}

    def _belongs(self, pid: int, stats: dict[int, Stat], own: int) -> bool:
        ancestor = pid
        while ancestor in stats:
            if ancestor in self._keep:
                return False
            if ancestor in self._ranks:
                return True
            if stats[ancestor].parent == own:
                if self._adopt_orphans:
                    return True
                break
            ancestor = stats[ancestor].parent
        # Last, since it reads the environment of the process, which costs more than its stat.
        return carries(pid, self._tag)

    def find(self) -> set[int]:
        """Opens pidfds of the living processes of the cycle. Returns the pids that are new."""
        members = self.members()
        self._let_go(self._pidfds.keys() - members)
        new = members - self._pidfds.keys()
        for pid in new:
            with contextlib.suppress(OSError):
                self._pidfds[pid] = os.pidfd_open(pid)
        return new

    def wait(self, deadline: float, until: int) -> set[int]:
        """Waits until all processes, and those that they start in the meantime, have ended.

        Args:
            deadline: when the wait ends (monotonic seconds); may be infinity.
            until: a descriptor that ends the wait when it is readable.

        Returns:
            Pids of the processes that still run.
        """
        while True:
            self.find()
            left_s = min(deadline - time.monotonic(), _LONGEST_WAIT_S)
            if not self._pidfds or left_s <= 0 or until in readable([*self._pidfds.values(), until], left_s):
                return set(self._pidfds)

    def _let_go(self, pids: Iterable[int]) -> None:
        for pid in pids:
            os.close(self._pidfds.pop(pid))

    def _signal(self, number: int, pids: Iterable[int]) -> None:
        # Parents first, as a rule: a shell whose command was ended must not go on to its next one.
        for pidfd in (self._pidfds[pid] for pid in sorted(pids) if pid in self._pidfds):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(pidfd, number)
                # A stopped process handles a signal only after SIGCONT; SIGKILL ends it as it is.
                if number != signal.SIGKILL:
                    signal.pidfd_send_signal(pidfd, signal.SIGCONT)

    def stop(
        self,
        first: int,
        limit_s: float,
        meanwhile: Callable[[], object] = lambda: None,
        hurry: Hurry | None = None,
    ) -> Ending:
        """Ends every process of the cycle: sends `first` at once, and SIGKILL exactly `limit_s` seconds later.

        Args:
            meanwhile: called when `first` has been sent to all.
            hurry: shortens the time until SIGKILL, and never lengthens it; None: nothing does.

        Returns:
            The pids that had to be killed, and those that could not be.
        """
        ending = Ending()
        if not self._pidfds:
            self.find()
        self._signal(first, self._pidfds)
        deadline = time.monotonic() + limit_s
        meanwhile()
        killing = False
        while self._pidfds:
            now = time.monotonic()
            if now >= deadline:
                if killing:
                    ending.left = set(self._pidfds)
                    break
                killing, deadline = True, now + _AFTER_SIGKILL_S
            if killing:
                ending.killed |= self._pidfds.keys()
                self._signal(signal.SIGKILL, self._pidfds)
            left = deadline - now
            awaited = list(self._pidfds.values())
            if killing:
                left = min(left, _RESCAN_S)
            elif hurry is not None:
                awaited.append(hurry.fileno())
            ended = readable(awaited, left)
            if hurry is not None and hurry.fileno() in ended:
                deadline = min(deadline, time.monotonic() + hurry.time_left())
            self._let_go([pid for pid, pidfd in self._pidfds.items() if pidfd in ended])
            if killing or not self._pidfds:  # what they started since
                self._signal(first, self.find())
        self._let_go(list(self._pidfds))
        return ending


class SessionTree(ProcessTree):
    """The processes that a single dead rank left in its session. Those in other sessions end with the cycle."""

    def __init__(self, rank: int, on_reaped: Callable[[int], None] = lambda pid: None) -> None:
        super().__init__("", set(), set(), adopt_orphans=False, on_reaped=on_reaped)
        self._session = rank

    def _belongs(self, pid: int, stats: dict[int, Stat], own: int) -> bool:
        return stats[pid].session == self._session
