"""Whether a rank waits for a resolver, and how long its limits wait for the answer. Pure.

What /proc says of the rank (`rank_process.py`) is read when a limit has passed, and at no other time
(`hang_detector.py: needs_look_up`). A rank that looks up a name (gloo does so for each group, torch before 2.9 for each
store) does nothing wrong. To restart the rank would cost more than the answer, and the new process would look up the
same name again. So the limit waits: it is postponed by 0.1 s again and again while the rank asks the resolver, for
`MAX_WAIT_S` at most. Once the rank is seen outside of a look-up, it gets its whole limit once more, since nobody knows
when the answer came.

    no look-up ----asks a resolver----> LOOKS UP -----no longer-----> ANSWERED ---the limit passes again--> it acts
                                        |      ^                      |
                                        |      +---asks a resolver----+
                                        +---MAX_WAIT_S over: the limit acts

A sign of life that is later than the first look-up seen leads back to the beginning. Moments are monotonic nanoseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from rank_monitor.contract.wire.launcher_messages import HANG
from rank_monitor.limits import NS_PER_S, Deadline, nanoseconds

MAX_WAIT_S = 60.0
"""The longest time for which limits wait for look-ups. glibc asks for one name for 10 s with one server, and for 28 s
with three servers, the most it uses (resolv.conf(5): two attempts of 5 s). torch before 2.9 makes several look-ups in a
row. A rank that looks up names again and again is judged after this."""
_PERIOD_NS = NS_PER_S // 10
"""By how much a limit is postponed at a time, so from one reading of /proc to the next. Not longer than the stacks are
asked for before a limit (`hang_detector.py`): otherwise each reading would ask for them again."""
_PORT = "0035"
"""Port 53 (DNS), as the kernel's tables of sockets have it."""
_REMOTE, _INODE = 2, 9
"""Columns of these tables: the remote address with port, and the inode of the socket (proc(5))."""


def may_wait_in_poll(waits_in: str) -> bool:
    """Returns whether a main thread may wait in poll(), as glibc does for the answer of a resolver.

    Args:
        waits_in: the function of the kernel that the main thread waits in; empty: the kernel does not tell.
    """
    return not waits_in or "poll" in waits_in


def has_socket_to_resolver(inodes: Collection[str], tables: Iterable[str]) -> bool:
    """Returns whether a process has a socket that is connected to a resolver.

    glibc connects a UDP socket to port 53 for each name that it looks up. What is looked up by a daemon (nscd,
    `resolve` in nsswitch.conf) is not seen.

    Args:
        inodes: of the sockets that the process has.
        tables: the texts of the kernel's tables of UDP sockets.
    """
    rows = [line.split() for table in tables for line in table.splitlines()]
    return any(len(row) > _INODE and row[_INODE] in inodes and row[_REMOTE].endswith(f":{_PORT}") for row in rows)


def waits_for_look_ups(deadline: Deadline) -> bool:
    """Returns whether a limit waits for look-ups: each does but that of `hang_timeout`.

    There the launcher has judged all ranks together. And while groups are made, which is when names are looked up, that
    limit is an hour at least: until the first collective of a new process is finished.
    """
    return deadline.limit != HANG


def words_for(rank: int, setting: str, waited_s: float) -> str:
    """Returns the line that says that a limit of a rank waits for a look-up.

    Args:
        setting: the setting that the limit comes from.
        waited_s: for how many seconds there was no sign of life.
    """
    return (
        f"rank {rank} waits for a resolver: its main thread looks up a name, without progress for {waited_s:.2f} s. "
        f"{setting} waits for the answer, {MAX_WAIT_S:g} s at most. What ends such look-ups: docs/nodes.md."
    )


class LookUps:
    """The look-ups of one rank that limits have waited for."""

    def __init__(self) -> None:
        self._first_seen_ns = -1
        """When a limit first waited for a look-up since the last sign of life; -1, before any moment: none has."""
        self._until_ns = 0
        """Until when limits are postponed."""
        self._is_answered = False
        """Whether the rank was seen outside of a look-up, and has its whole limit once more."""
        self.is_reported = True
        """Whether the log has a line about the present look-up. Set by the detector."""

    def postponed(self, deadline: Deadline) -> Deadline:
        """Returns a deadline as it is while the limits of the rank wait for a look-up; otherwise unchanged."""
        if not (waits_for_look_ups(deadline) and self._has_postponed(deadline)):
            return deadline
        return replace(deadline, at_ns=max(deadline.at_ns, self._until_ns))

    def postpone(self, deadline: Deadline, asks: bool, now_ns: int) -> bool:
        """Postpones a limit that has passed, if the rank looks up a name. Returns whether the limit does not act yet.

        Args:
            deadline: that of the limit.
            asks: whether the rank waits for a resolver now.
            now_ns: monotonic nanoseconds.
        """
        if not self._has_postponed(deadline):
            if not asks:
                return False
            self._first_seen_ns, self.is_reported = now_ns, False
        if asks and now_ns < self._first_seen_ns + nanoseconds(MAX_WAIT_S):
            self._until_ns, self._is_answered = now_ns + _PERIOD_NS, False
        elif not asks and not self._is_answered:
            self._until_ns, self._is_answered = now_ns + nanoseconds(deadline.limit_s), True
        else:
            return False
        return True

    def _has_postponed(self, deadline: Deadline) -> bool:
        """Whether the rank was seen in a look-up since the moment that the deadline counts from."""
        return deadline.since_ns <= self._first_seen_ns
