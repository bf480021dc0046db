"""The processes of a cycle: finds the ranks and everything they started, waits for these processes, and ends them.

A process belongs to the cycle when one of these holds (`ProcessTree._belongs`):
- it descends from a rank,
- it was orphaned to the launcher. The launcher is a child subreaper, so whatever a rank started stays below it,
- it carries the job's tag in its environment. Every rank has the tag, and children inherit it.

Signals go through pidfds only: between the scan of /proc and the signal a process may end, and another one may get its
pid.

The callers (`agent/ranks.py`, `agent/results.py`, `agent/in_process/`) know why a cycle ends, and how long processes
that a rank started to outlive itself, such as an upload, may go on (`--ft-linger`). Nothing of this is known here. All
functions run on the caller's thread; only `ProcessTree.wait` and `ProcessTree.stop` block.
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
_AFTER_SIGKILL_S = 10.0
"""Seconds from SIGKILL until a process is reported as left over. One that waits in the kernel (state D, for instance on
a file server) does not end by SIGKILL before the kernel returns."""
_RESCAN_S = 0.05
"""Seconds between two scans of /proc while processes are killed: one may fork just before it dies, and only another
scan finds the child."""
_STAT_BYTES = 1024
"""Bytes that are read of /proc/PID/stat: enough for the fields up to the start time, the last one that is used here."""
_LONGEST_WAIT_S = 3600.0
"""poll takes milliseconds as a C int, which an infinite deadline does not fit into."""
_LOCAL_RANK = "LOCAL_RANK"
# Characters; a command line can have megabytes, and this is part of one log line.
_COMMAND_LENGTH = 200


def become_subreaper() -> None:
    """Makes orphans of the ranks children of this process, for as long as it lives, and not of PID 1 (prctl(2)).

    Called by `composition.py` before the first rank starts. A process that was orphaned earlier belongs to PID 1 for
    good, and only its tag tells that it is of this job.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def subreaper() -> Iterator[None]:
    """Context in which orphans below this process become its children; restores the previous state at its end.

    For `launch()` inside a user's program, which adopts orphans at no other time.
    """
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int(0)
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    become_subreaper()
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


class Stat(NamedTuple):
    """Four fields of /proc/PID/stat, see proc(5).

    Attributes:
        parent: pid of the parent.
        state: one letter, such as "Z" for a zombie and "T" or "t" for a stopped process.
        session: id of the session, which is the pid of the process that made it.
        start: when the process started (ticks since boot).
    """

    parent: int
    state: str
    session: int
    start: float


def _read_stat(pid: int | str) -> Stat | None:
    """Returns the fields of one process; None: it has ended and was reaped."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # From the last parenthesis on: a process chooses its name, which may contain any character.
        fields = os.read(descriptor, _STAT_BYTES).rpartition(b") ")[2].split()
        return Stat(int(fields[1]), fields[0].decode(), int(fields[3]), float(fields[19]))
    except (OSError, IndexError):  # The process ended between the opening and the reading.
        return None
    finally:
        os.close(descriptor)


def all_stats() -> dict[int, Stat]:
    """Returns what /proc says of every process that this one can see, by pid. Reads one small file for each."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 (thousands of entries: a Path each costs more than the reading)
        if name.isdigit():
            stat = _read_stat(name)
            if stat is not None:
                found[int(name)] = stat
    return found


def is_zombie(pid: int) -> bool:
    """Returns whether the process, or its main thread alone, has ended and nobody has taken its exit code yet.

    False when the process is gone. While other threads live on, /proc shows a zombie that has no exit code yet.
    """
    stat = _read_stat(pid)
    return stat is not None and stat.state == "Z"


def start_ticks(pid: int) -> float:
    """Returns when a process started (ticks since boot); infinity when it is gone."""
    stat = _read_stat(pid)
    if stat is None:
        return float("inf")
    return stat.start


def command_of(pid: int) -> str:
    """Returns the command line of a process as one printable line, cut to 200 characters, for the log.

    A process without a command line, such as a zombie, is given by its name; one that is gone by "gone".
    """
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
    """Returns whether a process has threads besides its main thread."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1  # noqa: PTH208 (as above)
    except OSError:
        return False


@dataclass(frozen=True)
class Background:
    """Tells the background processes of ranks that succeeded apart from all other processes of the cycle.

    A background process is one that a rank detached on purpose: it has left the rank's session (`setsid`), as an upload
    of the last checkpoint does. `agent/results.py` lets background processes go on after a success.

    Attributes:
        sessions: the sessions of the ranks. A process in one of these was not detached.
        succeeded_since: local rank, as text -> when the process that succeeded began (ticks since boot); infinity where
            none succeeded. Has an entry for each local rank that failed and was started again: what the failed process
            had started is no background process.
    """

    sessions: Collection[int]
    succeeded_since: Mapping[str, float] = field(default_factory=dict)

    def has(self, pid: int, session: int) -> bool:
        """Returns whether process `pid` of the cycle, which is in `session`, is a background process."""
        if session in self.sessions or session == os.getsid(0):
            return False
        if not self.succeeded_since:
            return True
        # A detached process has the environment of the rank that started it.
        since = self.succeeded_since.get(environ_of(pid).get(_LOCAL_RANK, ""), 0.0)
        return start_ticks(pid) >= since


class Hurry(Protocol):
    """What can shorten a stop while it waits: further signals to the launcher (`agent/ending_signal.py`)."""

    def fileno(self) -> int:
        """Returns a descriptor that is readable when a signal has arrived, so that `time_left` may have changed."""

    def time_left(self) -> float:
        """Reads the signals that have arrived; returns how long the processes may still take from now on (seconds).

        Infinity: the signals set no limit.
        """


class ProcessTree:
    """The processes of one cycle, for one wait or one stop.

    Args:
        tag: the job's tag.
        ranks: pids of the ranks whose exit code was not taken yet.
        keep: pids of the launcher's own processes (zygote, template, monitors, checks). These and their descendants
            are left alone.
        adopt_orphans: whether every other child of this process belongs to the cycle. False inside a user's program,
            which has children of its own.
        among: called with pid and session of a process of the cycle; returns whether this tree includes the process.
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
        """Scans /proc; returns the pids of the cycle's processes that have a living thread.

        Takes the exit codes of orphans that have ended. Those of ranks are left to the agent, which needs them.
        """
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
        """Returns whether a process belongs to the cycle: by its ancestors, else by its tag.

        Args:
            stats: all processes of one scan.
            own: pid of this process.
        """
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
        # Last: this reads the environment of the process, which costs more than its stat.
        return carries(pid, self._tag)

    def search(self) -> set[int]:
        """Scans /proc, and opens pidfds of processes of the cycle that are new; returns their pids.

        Closes the pidfds of processes that have ended since the last call.
        """
        members = self.members()
        self._close_pidfds(self._pidfds.keys() - members)
        new = members - self._pidfds.keys()
        for pid in new:
            with contextlib.suppress(OSError):
                self._pidfds[pid] = os.pidfd_open(pid)
        return new

    def wait(self, deadline: float, until: int) -> set[int]:
        """Waits until all processes, and those that they start in the meantime, have ended. Sends no signal.

        Args:
            deadline: when the wait ends at the latest (monotonic seconds); may be infinity.
            until: a descriptor. The wait also ends when it is readable.

        Returns:
            Pids of the processes that still run; empty: all have ended.
        """
        while True:
            self.search()
            left_s = min(deadline - time.monotonic(), _LONGEST_WAIT_S)
            if not self._pidfds or left_s <= 0 or until in readable([*self._pidfds.values(), until], left_s):
                return set(self._pidfds)

    def _close_pidfds(self, pids: Iterable[int]) -> None:
        """Closes the pidfds of processes that have ended, or that are not waited for any more."""
        for pid in pids:
            os.close(self._pidfds.pop(pid))

    def _signal(self, number: int, pids: Iterable[int]) -> None:
        """Sends a signal to processes that `search` has found; ignores those that have ended."""
        # Lower pids first, which mostly means parents first: a shell whose command was ended must not start the next.
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

        Blocks until all have ended: for `limit_s` and `_AFTER_SIGKILL_S` at most. Processes that are started meanwhile
        get `first` as soon as a scan finds them, and SIGKILL with all others.

        Args:
            first: number of the first signal.
            limit_s: seconds until SIGKILL; 0: at once.
            meanwhile: called once, when `first` has been sent to all.
            hurry: shortens the time until SIGKILL, and never lengthens it; None: nothing does.

        Returns:
            The pids that had to be killed, and those that SIGKILL did not end in time.
        """
        ending = Ending()
        if not self._pidfds:
            self.search()
        self._signal(first, self._pidfds)
        deadline = time.monotonic() + limit_s
        meanwhile()
        # Two phases: waiting until `deadline` for `first` to have effect, then killing until the new `deadline`.
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
            self._close_pidfds([pid for pid, pidfd in self._pidfds.items() if pidfd in ended])
            # Children that were started after the last scan. Before SIGKILL one scan at the end of each round will do.
            if killing or not self._pidfds:
                self._signal(first, self.search())
        self._close_pidfds(list(self._pidfds))
        return ending


class SessionTree(ProcessTree):
    """The processes that a single dead rank left in its session.

    Used when a rank has died in a cycle that goes on (in-process restart), in the thread that notifies the other ranks
    of the loss: what the dead rank left may hold the GPU and ports that its successor needs. Processes that left the
    session were detached on purpose, and end with the cycle.

    Args:
        rank: pid of the rank, which is the number of its session.
        on_reaped: as for `ProcessTree`.
    """

    def __init__(self, rank: int, on_reaped: Callable[[int], None] = lambda pid: None) -> None:
        super().__init__("", set(), set(), adopt_orphans=False, on_reaped=on_reaped)
        self._session = rank

    def _belongs(self, pid: int, stats: dict[int, Stat], own: int) -> bool:
        """Returns whether a process is in the dead rank's session, whatever its parent is."""
        return stats[pid].session == self._session
