"""The rank as a process of the operating system: signals through its pidfd, its stacks, its state in /proc.

`server.py` uses it, in the monitor's only thread. Nothing is decided here. A method blocks only as long as its
docstring says.

**Stacks** are asked for by a message (`ask_stacks`), on which the rank's watchdog appends a dump to the rank's stack
file. A rank that does not answer gets a signal, on which faulthandler does the same in C, also while the rank holds the
GIL; but only where `stack_signal.py` says that it may, since the rank can die of it. `look` is called for that until
the rank has answered. `frames` reads from where the file ended before the question: earlier dumps stay in the file for
the user.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from rank_monitor import stack_signal, stacks
from rank_monitor.contract.processes import proc
from rank_monitor.contract.processes.wait import readable
from rank_monitor.look_ups import has_socket_to_resolver, may_wait_in_poll
from rank_monitor.stack_signal import Unanswered

ANSWERS_S = 0.5
"""A dump takes about 1 ms; a rank that computes on a busy machine is not scheduled sooner than this. At a limit the
rank was asked 0.1 s before, so one that gives no stacks is ended 0.4 s late: its limit is many times that, and a
verdict without stacks is worth little."""
_SILENT_S = 0.25
"""After so long without an answer to the message a rank that computes counts as silent: its watchdog does not get the
GIL. A rank in which threads execute Python answers in 15 ms for each of these. A wrapped rank is asked 0.3 s before its
limit, so that the launcher knows by then."""
_ANSWERS_SIGNAL_S = 0.25
"""The least time that the signal is given, where it goes out late. With it, the answer comes 0.75 s after the question
at most: within the second that the launcher waits."""
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
        """The length of the stack file right before the last question."""
        self._number = 0
        """The signal for the stacks."""
        self._asked_at: float | None = None
        """When the stacks were last asked for (monotonic seconds); None: they were not."""
        self._answer_by = 0.0
        """Until when the answer is waited for (monotonic seconds)."""
        self._was_sent = False
        """Whether the last question went out as a message."""
        self._threads: dict[int, tuple[str, int]] = {}
        """The threads of the process at the last look since the question."""
        self.look_at: float | None = None
        """When `look` is to be called next (monotonic seconds); None: there is nothing to look for."""
        self.awaits_stacks = False
        """The process was asked for its stacks, has not begun to write them, and got no signal."""
        self._was_signalled = False
        """The process got the signal for the last question."""
        self._no_stacks = "not asked for"
        """Why there are no stacks; empty: there are."""
        self._before: tuple[str, str] | None = None
        """The state of the process and the kernel function that it waited in, right before the last question. While the
        process writes its stacks both may be others."""
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

    def ask_stacks(self, number: int, file: str, send: Callable[[], bool]) -> None:
        """Asks the process to append its stacks to `file`. Does not wait for them. `look` is to be called at `look_at`.

        The process is not asked where it could not answer, since it is stopped or waits in the kernel. Nor is it asked
        where it has no handler for the signal, which would kill it: the process is not a rank of ours, or not yet one.
        `facts` then gives the reason as `stacks`.

        Args:
            number: the signal for the stacks.
            file: the stack file.
            send: sends the message that asks for the stacks; returns whether it was sent.
        """
        self._asked_at = self._before = self.look_at = None
        self.awaits_stacks = self._was_signalled = False
        self._threads, self._around = {}, {}
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
            self._number, self._file, self._offset = number, file, _size(file)
            self._before = (state, wchan)
            self._was_sent = send()
            self._no_stacks = "none: the process did not answer"
            self._asked_at = self._answer_by = time.monotonic()
            if self._was_sent:
                self._answer_by += ANSWERS_S
            else:  # nothing will be answered, unless the rank gets the signal
                self._no_stacks = "none: the process is not connected"
            self.awaits_stacks = True
            self.look_at = self._asked_at + stack_signal.FIRST_LOOK_S

    def look(self, is_ending: bool = False) -> None:
        """Sends the signal for the stacks where the process has not answered and may get it. Does nothing before
        `look_at`. Does not block.

        Args:
            is_ending: the process is ended right after this, whatever it does. The time to look is now then.
        """
        now = time.monotonic()
        is_due = is_ending or (self.look_at is not None and now >= self.look_at)
        if self._asked_at is None or not self.awaits_stacks or not is_due:
            return
        self.look_at = None
        if _size(self._file) > self._offset:
            self.awaits_stacks = False
            return
        is_at_rest = False
        if not is_ending:
            before, self._threads = self._threads, proc.threads(self.pid)
            is_at_rest = stack_signal.is_at_rest(before, self._threads)
        question = Unanswered(now - self._asked_at, self._was_sent, is_at_rest, is_ending)
        if stack_signal.may_signal(question):
            self.awaits_stacks = False
            if self.signal(self._number):
                self._was_signalled = True
                self._no_stacks = "none: the process did not answer"
                self._answer_by = max(self._answer_by, now + _ANSWERS_SIGNAL_S)
        elif now < self._answer_by:
            self.look_at = now + stack_signal.BETWEEN_LOOKS_S

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

    def frames(self, is_ending: bool = False) -> list[str]:
        """The main thread's frames as last asked for; waits until the dump is complete, 0.5 s from the question at
        most, and 0.25 s from a signal that goes out now. Does not wait where the question could not be sent and no
        signal goes out.

        Returns nothing where the dump does not show the main thread by then. `is_ending`: see `look`.
        """
        if self._asked_at is None:
            return []
        found = self._dump(is_ending)
        if found.frames:
            self._no_stacks = ""
            self._around = {"file": found.file, "other_threads": found.others}
        elif _size(self._file) > self._offset:
            self._no_stacks = "none: the process had not written that of its main thread yet"
        return found.frames

    def _dump(self, is_ending: bool) -> stacks.StackDump:
        """Returns the dump that was asked for, once it is complete or the time for it is over. `is_ending`: see `look`.

        As a rule it was asked for 0.1 s before, and is complete at once. The signal that ends the rank waits for this:
        so nothing is waited for that is there, and a complete dump is read once.
        """
        size, quiet = self._offset, 0
        if _has_settled(self._file):
            size = _size(self._file)
        while self._may_answer_yet(is_ending):
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

    def _may_answer_yet(self, is_ending: bool) -> bool:
        """Returns whether the answer is still to be waited for; sends the signal before, if it is time for that.

        A process that has died, maybe of the signal, is not waited for: the launcher must get the verdict before it
        takes the death for the fault.
        """
        self.look(is_ending)
        return time.monotonic() < self._answer_by and not self.ended()

    def facts(self) -> dict[str, Any]:
        """Returns what /proc says of the process, for a verdict or a snapshot. Does not block.

        - `state`, `wchan`, `threads`: as in /proc/PID/status and wchan; `stopped`: by a signal or a debugger
        - `kernel_stack`: innermost first, where this process may read it
        - `traced`: a debugger or strace is attached
        - `stacks`: the file with the stacks, or why there are none
        - `silent`: the main thread computes, and the question for the stacks stands without an answer for a while: a
          thread holds the GIL in C code
        - `signalled`: the process got the signal for the stacks after the last question, of which it may die

        Of a process that was just asked for its stacks, `state` and `wchan` are those before that. Then there are
        also `file` and `other_threads`: `file` and `others` of `stacks.StackDump`.
        """
        status, wchan = self._at_rest()
        state = status.get("State", "gone")
        was_asked = self.has_stacks_since(time.monotonic() - 2 * ANSWERS_S)
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
            if self._is_silent(status):
                facts["silent"] = True
            if self._was_signalled:
                facts["signalled"] = True
        facts["kernel_stack"] = proc.kernel_stack(self.pid)[:_MAX_KERNEL_FRAMES]
        return facts

    def _is_silent(self, status: dict[str, str]) -> bool:
        """Returns whether the main thread computed right before the question and computes now (`status`), and a
        question that was sent stands without an answer for `_SILENT_S`."""
        if self._asked_at is None or self._before is None or not (self._was_sent and self.awaits_stacks):
            return False
        states = (self._before[0], status.get("State", ""))
        computes = all(state.startswith("R") for state in states)
        is_over = time.monotonic() >= self._asked_at + _SILENT_S
        return computes and is_over and _size(self._file) <= self._offset


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
