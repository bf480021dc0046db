"""The rank as a process of the operating system: signals through its pidfd, its stacks, its state in /proc.

`server.py` uses it. It decides nothing, and blocks only as long as a docstring says.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from rank_monitor import stacks
from rank_monitor.contract.processes import proc
from rank_monitor.contract.processes.wait import readable
from rank_monitor.look_ups import has_socket_to_resolver, may_wait_in_poll

_ANSWERS_S = 0.5
"""A dump takes about 1 ms; a rank that computes on a busy machine is not scheduled sooner than this. At a limit the
rank was asked 0.1 s before, so one that gives no stacks is ended 0.4 s late: its limit is many times that, and a
verdict without stacks is worth little."""
# About as long as a dump takes.
_POLL_S = 0.001
# Of a process that sleeps 1 ms at a time one in fifty readings finds no function. Some kernels never name one.
_READINGS = 4
_QUIET_POLLS = 5
"""Where the end of a dump cannot be told from its text, a file that has not grown for this many polls is complete."""
# A bound, since the rank can write to this file as well. faulthandler dumps at most 100 threads of 100 frames each.
_MAX_DUMP = 1 << 20
# What a process waits for stands in the innermost frames; the outer ones are those of the system call.
_MAX_KERNEL_FRAMES = 12


class RankProcess:
    """One process, which may have ended.

    Raises:
        ProcessLookupError: there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self._file = ""
        self._offset = 0
        self._asked_at: float | None = None
        self._no_stacks = "not asked for"
        self._before: tuple[str, str] | None = None
        """Its state and what it waited in right before the last signal: while it writes its stacks both are others."""
        self._around: dict[str, Any] = {}
        """What the last dump says beside the frames of the main thread."""

    def close(self) -> None:
        """Closes the pidfd."""
        os.close(self.pidfd)

    def ended(self) -> bool:
        """Whether the process has ended. Does not block."""
        return bool(readable([self.pidfd], 0.0))

    def signal(self, number: int) -> bool:
        """Sends a signal; returns whether there was a process to take it."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except OSError:
            return False
        return True

    def is_stopped(self) -> bool:
        """Whether the process is stopped, by a signal or a debugger."""
        return proc.status(self.pid).get("State", "")[:1] in ("T", "t")

    def asks_resolver(self) -> bool:
        """Returns whether the main thread of the rank waits for the answer of a resolver. Does not block.

        A limit that has passed waits for this answer, so what costs most is read last: where the main thread waits
        takes 10 us, the sockets of a rank with torch and the kernel's tables take 200 us.
        """
        if not may_wait_in_poll(proc.waits_in(self.pid)):
            return False
        return has_socket_to_resolver(proc.sockets_of(self.pid), proc.udp_tables(self.pid))

    def has_stacks_since(self, moment: float) -> bool:
        """Whether its stacks were asked for since a moment (monotonic seconds)."""
        return self._asked_at is not None and self._asked_at >= moment

    def ask_stacks(self, number: int, file: str) -> None:
        """Sends signal `number`, on which the process appends its stacks to `file`.

        Nothing is sent when the signal could kill the process (no handler), or when it could not answer; `facts` then
        gives the reason.
        """
        self._asked_at = self._before = None
        self._around = {}
        status, wchan = self._at_rest()
        state = status.get("State", "")
        if state[:1] in ("T", "t"):
            self._no_stacks = "none: the process is stopped"
        elif state[:1] == "D":
            self._no_stacks = "none: the process waits in the kernel"
        # The default action of a real-time signal ends the process.
        elif not proc.catches(status, number):
            self._no_stacks = f"none: the process has no handler for signal {number}"
        else:
            self._file, self._offset = file, _size(file)
            self._before = (state, wchan)
            if self.signal(number):
                self._asked_at = time.monotonic()
                self._no_stacks = "none: the process did not answer"

    def _at_rest(self) -> tuple[dict[str, str], str]:
        """Returns the process's status, and the function of the kernel that it waits in.

        A process that goes to sleep or wakes up between the two readings seems to sleep nowhere: it is read again, and
        at last its stack in the kernel is, which root alone may read.
        """
        for _ in range(_READINGS):
            status, wchan = proc.status(self.pid), proc.waits_in(self.pid)
            if wchan or not status.get("State", "").startswith("S"):
                return status, wchan
        # Since Linux 6.12 one that sleeps may stay queued until its turn, and then wchan names nothing.
        return status, next(iter(proc.kernel_stack(self.pid)), "").partition("+")[0]

    def frames(self) -> list[str]:
        """The main thread's frames as last asked for; waits until the dump is complete, 0.5 s from the request at most.

        Returns nothing where the dump does not show the main thread by then.
        """
        if self._asked_at is None:
            return []
        found = stacks.read(self._dump(self._asked_at + _ANSWERS_S))
        if found.frames:
            self._no_stacks = ""
            self._around = {"file": found.file, "other_threads": found.others}
        elif _size(self._file) > self._offset:
            self._no_stacks = "none: the process had not written that of its main thread yet"
        return found.frames

    def _dump(self, deadline: float) -> str:
        """Returns the text of the dump that was asked for, once it is complete or the deadline (monotonic) is over."""
        size, quiet = self._offset, 0
        while time.monotonic() < deadline:
            before, size = size, _size(self._file)
            quiet = quiet + 1
            if size != before or size == self._offset:
                quiet = 0
            if quiet:
                text = _read_from(self._file, self._offset)
                if stacks.is_whole(text) or (quiet >= _QUIET_POLLS and stacks.may_be_whole(text)):
                    return text
            time.sleep(_POLL_S)
        return _read_from(self._file, self._offset)

    def facts(self) -> dict[str, Any]:
        """What /proc says: `state`, `stopped`, `threads`, `wchan`, `kernel_stack` (where readable), `stacks`;
        `traced` of one that a debugger or strace is attached to.

        Of a rank that was just asked for its stacks `state` and `wchan` are those before the signal, and there are
        `file` and `other_threads`: `file` and `others` of `stacks.StackDump`.
        """
        status, wchan = self._at_rest()
        state = status.get("State", "gone")
        was_asked = self.has_stacks_since(time.monotonic() - 2 * _ANSWERS_S)
        # One that has ended since is told of as it was, too. That it is stopped counts more.
        if self._before is not None and was_asked and state[:1] not in ("T", "t"):
            state, wchan = self._before
        facts: dict[str, Any] = {
            "state": state,
            "stopped": state[:1] in ("T", "t"),
            "stacks": self._no_stacks or self._file,
        }
        if status.get("Threads", "").isdigit():
            facts["threads"] = int(status["Threads"])
        if wchan:
            facts["wchan"] = wchan
        if status.get("TracerPid", "0") != "0":
            facts["traced"] = True
        if was_asked:
            facts |= self._around
        facts["kernel_stack"] = proc.kernel_stack(self.pid)[:_MAX_KERNEL_FRAMES]
        return facts


def _read_from(path: str, offset: int) -> str:
    """Text of a file from `offset` on, bounded; empty when it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, _MAX_DUMP).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
