"""The rank as a process of the operating system: signals through its pidfd, its stacks, its state in /proc.

`server.py` uses it, in the monitor's only thread. Nothing is decided here. A method blocks only as long as its
docstring says.

**Stacks** are asked for by a signal (`ask_stacks`). faulthandler, which the client has registered in the rank, then
appends a dump to the rank's stack file, also while the rank holds the GIL. `frames` reads from where the file ended
before the signal: earlier dumps stay in the file for the user.
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
_POLL_S = 0.001
"""From one look at the stack file to the next: about as long as a dump takes."""
_READINGS = 4
"""How often the state of a process is read if it seems to sleep nowhere. Of a process that sleeps 1 ms at a time one in
fifty readings finds no function of the kernel. Some kernels never name one."""
_QUIET_POLLS = 5
"""Where the end of a dump cannot be told from its text, a file that has not grown for this many polls is complete."""
_SETTLED_S = 0.02
"""A stack file that nothing was written to for so many seconds is not being written: longer than `_QUIET_POLLS` polls,
and two ticks of the slowest kernel clock (100 Hz), by which files are dated."""
_MAX_DUMP = 1 << 20
"""Bytes of a dump that are read; a bound, since the rank can write to this file as well. faulthandler dumps at most 100
threads of 100 frames each."""
_MAX_KERNEL_FRAMES = 12
"""Frames of the kernel's stack that are passed on. What a process waits for stands in the innermost ones; the outer
ones are those of the system call."""


class RankProcess:
    """One process, which may have ended. Close it when it is not watched any more.

    The pidfd makes sure that no signal hits a process that got the pid later.

    Raises:
        ProcessLookupError: there is no such process, or its parent has reaped it.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self._file = ""
        self._offset = 0
        """The length of the stack file right before the last signal."""
        self._asked_at: float | None = None
        """When the last signal was sent (monotonic seconds); None: none was."""
        self._no_stacks = "not asked for"
        """Why there are no stacks; empty: there are."""
        self._before: tuple[str, str] | None = None
        """The state of the process and the kernel function that it waited in, right before the last signal. While the
        process writes its stacks both are others."""
        self._around: dict[str, Any] = {}
        """What the last dump says beside the frames of the main thread."""

    def close(self) -> None:
        """Closes the pidfd."""
        os.close(self.pidfd)

    def ended(self) -> bool:
        """Whether the process has ended. Does not block."""
        return bool(readable([self.pidfd], 0.0))

    def signal(self, number: int) -> bool:
        """Sends signal `number`. Returns whether there was a process that could get it."""
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
        """Whether the stacks were asked for since a moment (monotonic seconds), so that they need not be again."""
        return self._asked_at is not None and self._asked_at >= moment

    def ask_stacks(self, number: int, file: str) -> None:
        """Sends signal `number`, on which the process appends its stacks to `file`. Does not wait for them.

        Nothing is sent where the signal would kill the process, which has no handler for it yet, or where the process
        could not answer: it is stopped, or waits in the kernel. `facts` then gives the reason as `stacks`.
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
        """Returns the fields of the process's status, and the function of the kernel that it waits in; empty: it runs,
        or the kernel does not tell.

        A process that goes to sleep or wakes up between the two readings seems to sleep nowhere. Its state is then read
        again, at most `_READINGS` times; at last the stack of the process in the kernel is read, which root alone may.
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
        found = self._dump(self._asked_at + _ANSWERS_S)
        if found.frames:
            self._no_stacks = ""
            self._around = {"file": found.file, "other_threads": found.others}
        elif _size(self._file) > self._offset:
            self._no_stacks = "none: the process had not written that of its main thread yet"
        return found.frames

    def _dump(self, deadline: float) -> stacks.StackDump:
        """Returns the dump that was asked for, once it is complete or the deadline (monotonic) is over.

        As a rule it was asked for 0.1 s before, and is complete at once. The signal that ends the rank waits for this:
        so nothing is waited for that is there, and a complete dump is read once.
        """
        size, quiet = self._offset, 0
        if _has_settled(self._file):
            size = _size(self._file)
        while time.monotonic() < deadline:
            before, size = size, _size(self._file)
            quiet = quiet + 1
            if size != before or size == self._offset:
                quiet = 0
            if quiet:
                found = stacks.read(_read_from(self._file, self._offset))
                if found.is_whole or (quiet >= _QUIET_POLLS and found.frames):
                    return found
            time.sleep(_POLL_S)
        return stacks.read(_read_from(self._file, self._offset))

    def facts(self) -> dict[str, Any]:
        """Returns what /proc says of the process, for a verdict or a snapshot. Does not block.

        - `state`, `wchan`, `threads`: as in /proc/PID/status and wchan; `stopped`: by a signal or a debugger
        - `kernel_stack`: innermost first, where this process may read it
        - `traced`: a debugger or strace is attached
        - `stacks`: the file with the stacks, or why there are none

        Of a process that was just asked for its stacks, `state` and `wchan` are those before the signal. Then there are
        also `file` and `other_threads`: `file` and `others` of `stacks.StackDump`.
        """
        status, wchan = self._at_rest()
        state = status.get("State", "gone")
        was_asked = self.has_stacks_since(time.monotonic() - 2 * _ANSWERS_S)
        # A process that has ended since is described as it was, too. One that is stopped now is described as it is.
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
    """Returns the text of a file from `offset` on, at most `_MAX_DUMP` bytes; empty when it cannot be read. Opening
    does not block, even if the rank has put a FIFO there."""
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


def _has_settled(path: str) -> bool:
    """Returns whether nothing was written to a file for `_SETTLED_S` seconds, by the clock that files are dated with.

    A clock that was set meanwhile may say so too early: then the file is taken for complete as soon as its text is
    (`stacks.StackDump.is_whole`).
    """
    try:
        return time.time() - os.stat(path).st_mtime >= _SETTLED_S
    except OSError:
        return False


def _size(path: str) -> int:
    """Returns the length of a file in bytes; 0 if there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
