"""The processes of checks: starts them, reads their output, and never waits for one longer than its limit.

A check is a process of its own, since it may hang in a driver or a file system, and since no driver's library is to be
loaded into the launcher. `node_health.py` and `memory_reclaim.py` decide what is checked; nothing here depends on it.

A round of checks (`CheckRound`) goes through these steps:
1. `start`: all checks begin at the same time.
2. `poll` or `wait`, until all have ended: each gives a `Reading`.
3. At the limit the checks that are late are killed. A check whose answer the training can do without is left running.
4. A check that SIGKILL does not end within `_AFTER_SIGKILL_S` hangs in the kernel. It is left behind, too. While such a
   process is there, no second one is started for the same check: its reading says at once that it hangs.

A process is started by exec (a vfork, so that the caller's threads and memory do not matter), in a session of its own.

Two ways to use a round. Before a cycle the agent blocks in `wait`, in a thread of `EndingSignal.call`, since the cycle
needs the result. While ranks run, the cycle loop waits for the descriptors and calls `poll`, which never blocks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Set
from typing import Any

from ft_launcher.decide.health.reading import Order, Reading, reading_of_exit, reading_of_timeout
from ft_launcher.node.processes import descriptor_limit
from rank_monitor.contract import env
from rank_monitor.contract.processes.wait import readable

_KEPT_BYTES = 1 << 16
"""Bytes of a check's output that are kept: 64 KiB, the default capacity of a pipe (pipe(7)). Only the last lines are
used."""
_AFTER_SIGKILL_S = 2.0
"""Seconds after SIGKILL. A process that has not ended by then waits in the kernel, for example on a driver that
hangs."""


class CheckProcess:
    """A running check.

    Args:
        order: what to run, and what a missing answer means.
        tag: the job's tag, by which the process is found and ended if the launcher is killed; empty: there is no job.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, order: Order, tag: str) -> None:
        self.order = order
        self.is_killed = False
        self.started = time.monotonic()
        self.output = bytearray()
        environ = dict(os.environ)
        if tag:
            environ[env.JOB_TAG] = tag
        with descriptor_limit.of_user() as give_back:
            self._process = subprocess.Popen(
                order.argv,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                start_new_session=True,
            )
            give_back(self._process.pid)
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self._pipe = self._process.stdout
        os.set_blocking(self._pipe.fileno(), False)
        self._pidfd = os.pidfd_open(self.pid)

    def descriptors(self) -> set[int]:
        """Returns descriptors that are readable when `handle` has something to do."""
        if self._pipe.closed:
            return {self._pidfd}
        return {self._pidfd, self._pipe.fileno()}

    def handle(self) -> int | None:
        """Reads output; returns the exit code (negative for a signal) once the process has ended, else None.

        Does not block.
        """
        ended = bool(readable([self._pidfd], 0.0))
        if not self._pipe.closed:
            piece = self._pipe.read(_KEPT_BYTES)  # As much as a pipe holds, so nothing is left after the end.
            self.output = (self.output + (piece or b""))[-_KEPT_BYTES:]
            if piece == b"":
                self._pipe.close()
        if ended:
            return self._reap()
        return None

    def kill(self) -> None:
        """Sends SIGKILL to its process group."""
        self.is_killed = True
        if self._process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)  # The process is not reaped yet, so its number is not used again.

    def late(self) -> Reading:
        """Returns the reading for a process that has given no answer in time and is still there."""
        stuck_pid = None
        if self.is_killed:
            stuck_pid = self.pid
        return reading_of_timeout(self.order, bytes(self.output), time.monotonic() - self.started, stuck_pid)

    def gone(self) -> bool:
        """Returns whether the process has ended, and takes its exit code then. Does not block."""
        if self._process.returncode is None and readable([self._pidfd], 0.0):
            self._reap()
        return self._process.returncode is not None

    def _reap(self) -> int:
        """Takes the exit code of the process, which has ended, and kills what it left in its process group."""
        self.kill()
        code = self._process.wait()
        os.close(self._pidfd)
        self._pipe.close()
        return code


class CheckRound:
    """Checks that run at the same time, round after round.

    Threads: one thread uses an object at a time: a thread in which the agent waits for `wait`, or the agent's thread
    itself for `poll`. `close`, `pids` and nothing else may be called from another thread meanwhile.

    Args:
        tag: the job's tag, for the environment of the processes; empty: there is no job.

    Attributes:
        memory: check -> what it returned last, which it is given in the next round.
    """

    def __init__(self, tag: str) -> None:
        self.memory: dict[str, dict[str, Any]] = {}
        self._tag = tag
        self._readings: list[Reading] = []
        self._running: dict[str, CheckProcess] = {}
        self._left: dict[str, CheckProcess] = {}
        """Check -> its process that is not waited for any more. While it is there, no other is started."""
        self._deadline = 0.0
        self._is_late = False

    def start(self, orders: Iterable[Order | Reading], limit_s: float) -> None:
        """Starts a round of checks. The previous round must be over.

        Args:
            orders: the checks; a `Reading` in place of an order is known already.
            limit_s: seconds until checks that are not done are late.
        """
        self._readings = []
        self._is_late = False
        self._deadline = time.monotonic() + limit_s
        for order in orders:
            if isinstance(order, Reading):
                self._readings.append(order)
            else:
                self._start(order)

    def descriptors(self) -> set[int]:
        """Returns descriptors that are readable when `poll` has something to do."""
        return set[int]().union(*(process.descriptors() for process in self._running.values()))

    def next_check(self) -> float | None:
        """When to call `poll` even if nothing is readable (monotonic seconds); None: no check runs."""
        if self._running:
            return self._deadline
        return None

    def poll(self, ready: Set[int]) -> bool:
        """Handles checks that have ended, and kills those that are late. Returns whether the round is over.

        Does not block. `ready`: descriptors that are readable now.
        """
        for check, process in list(self._running.items()):
            if not process.descriptors() & ready:
                continue
            code = process.handle()
            if code is not None:
                del self._running[check]
                self._readings.append(self._ended(process, code))
        if self._running and time.monotonic() >= self._deadline:
            self._give_up()
        return not self._running

    def wait(self) -> list[Reading]:
        """Blocks until the round is over, for its limit and 2 s at most; returns its readings."""
        while self._running:
            self.poll(readable(self.descriptors(), max(0.0, self._deadline - time.monotonic())))
        return self.pop()

    def pop(self) -> list[Reading]:
        """Returns the readings of the round that is over, once; then empty."""
        readings, self._readings = self._readings, []
        return readings

    def stop(self) -> None:
        """Ends a round: kills its checks, and waits 2 s at most for their end. Its readings are dropped."""
        self._kill_running()
        self._is_late = True
        self._deadline = time.monotonic() + _AFTER_SIGKILL_S
        self.wait()

    def pids(self) -> set[int]:
        """Returns the pids of running checks, and of those that are not waited for any more. Any thread."""
        return {process.pid for process in (*self._running.values(), *self._left.values())}

    def close(self) -> None:
        """Kills all checks, without waiting for their end: no further round follows. Any thread may call it."""
        self._kill_running()
        for process in list(self._left.values()):
            process.kill()

    def _kill_running(self) -> None:
        """Sends SIGKILL to the running checks. Any thread: iterates over a copy."""
        for process in list(self._running.values()):
            process.kill()

    def _start(self, order: Order) -> None:
        """Starts a check. Adds a reading instead, where it cannot be started or its last process still hangs."""
        before = self._left.get(order.check)
        if before is not None:
            if not before.gone():
                self._readings.append(before.late())
                return
            del self._left[order.check]
        try:
            self._running[order.check] = CheckProcess(order, self._tag)
        except (OSError, ValueError) as error:
            self._readings.append(Reading(order.check, "unknown", f"no process can be started ({error})"))

    def _ended(self, process: CheckProcess, code: int) -> Reading:
        """Returns the reading of a check whose process has ended, and stores what the check wants to remember."""
        took_s = time.monotonic() - process.started
        if self._is_late:
            return reading_of_timeout(process.order, bytes(process.output), took_s, None)
        reading, memory = reading_of_exit(process.order, bytes(process.output), code, took_s)
        if memory:
            self.memory[process.order.check] = memory
        return reading

    def _give_up(self) -> None:
        """Handles a passed limit. At the first one, kills the late checks, and leaves those whose answer the training
        can do without: these go on, and their end shows that they hang no more. At the second one, after SIGKILL,
        leaves the checks that have not ended."""
        if self._is_late:
            self._leave(list(self._running))
            return
        self._is_late = True
        self._deadline = time.monotonic() + _AFTER_SIGKILL_S
        self._leave([check for check, process in self._running.items() if process.order.late == "warning"])
        self._kill_running()

    def _leave(self, checks: Iterable[str]) -> None:
        """Leaves running checks behind: adds their readings, and waits for them no more."""
        for check in checks:
            process = self._running.pop(check)
            self._left[check] = process
            self._readings.append(process.late())
