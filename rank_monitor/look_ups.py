"""Whether a rank waits for a resolver, and how long its limits wait for the answer. Pure.

The detector asks when a limit has passed, and at no other time; `rank_process.py` reads what /proc says then. In a
look-up of a name (gloo makes one for each group, torch before 2.9 one for each store) a rank does nothing wrong: to
restart it costs more than the answer, and the new process looks up the same name again.

    no look-up ----asks a resolver----> LOOKS UP -----no longer-----> ANSWERED ---the limit passes again--> it acts
                                        |      ^                      |
                                        |      +---asks a resolver----+
                                        +---MAX_WAIT_S over: the limit acts

A sign of life that is later than the first look-up seen begins this again. Moments are monotonic nanoseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from rank_monitor.contract.wire.launcher_messages import HANG
from rank_monitor.limits import NS_PER_S, Deadline, nanoseconds

MAX_WAIT_S = 60.0
"""glibc asks for one name for 10 s with one server and 28 s with three, its most (resolv.conf(5): two attempts of 5 s).
torch before 2.9 makes several look-ups in a row. A rank that looks up names again and again is spared no longer."""
_PERIOD_NS = NS_PER_S // 10
"""From one look to the next. Not longer than the stacks are asked for before a limit: else each look would ask anew."""
_PORT = "0035"
"""53 in the tables of sockets."""
_REMOTE, _INODE = 2, 9
"""Columns of these tables (proc(5))."""


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
    """Returns whether a limit waits for look-ups.

    That of `hang_timeout` does not: the launcher has judged all ranks together, and until the first collective of a
    new process is finished, when groups are made, this limit is an hour at least.
    """
    return deadline.limit != HANG


def words_for(rank: int, setting: str, waited_s: float) -> str:
    """Returns the line that says that a limit of a rank waits for a look-up.

    Args:
        setting: the one that the limit comes from.
        waited_s: for how long there was no sign of life (seconds).
    """
    return (
        f"rank {rank} waits for a resolver: its main thread looks up a name, without progress for {waited_s:.2f} s. "
        f"{setting} waits for the answer, {MAX_WAIT_S:g} s at most. What ends such look-ups: docs/nodes.md."
    )


class LookUps:
    """The look-ups of one rank that limits have waited for."""

    def __init__(self) -> None:
        self._first_seen_ns = -1
        """When a limit first waited for one since the last sign of life; before any moment: none has."""
        self._until_ns = 0
        self._is_answered = False
        self.is_reported = True
        """Whether the user has been told of the look-up."""

    def postponed(self, deadline: Deadline) -> Deadline:
        """Returns a deadline as it is while the limits of the rank wait for a look-up."""
        if not (waits_for_look_ups(deadline) and self._has_postponed(deadline)):
            return deadline
        return replace(deadline, at_ns=max(deadline.at_ns, self._until_ns))

    def postpone(self, deadline: Deadline, asks: bool, now_ns: int) -> bool:
        """Returns whether a limit that has passed does not act yet.

        Once a rank that was seen in a look-up is in none, its limit begins anew: nobody knows when the answer came.

        Args:
            asks: whether the rank waits for a resolver now.
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
        """Whether the rank was seen in a look-up since what the deadline counts from."""
        return deadline.since_ns <= self._first_seen_ns
