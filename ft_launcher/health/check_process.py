"""Starts the process of one check, reads its output, and ends it. Does not depend on what is checked.

It is started by exec (a vfork, so that the caller's threads and memory do not matter) in a session of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

from ft_launcher.health.reading import Order
from ft_launcher.processes import descriptor_limit
from rank_monitor.contract import env
from rank_monitor.contract.processes.wait import readable

# 64 KiB, the default capacity of a pipe (pipe(7)). Only the last lines of the output are used.
_KEPT_BYTES = 1 << 16


class CheckProcess:
    """A running check.

    Args:
        tag: the job's tag, so that the process is found and ended when the launcher was killed; empty: none.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, order: Order, tag: str) -> None:
        self.order = order
        self.started = time.monotonic()
        self.output = bytearray()
        environ = dict(os.environ)
        if tag:
            environ[env.JOB_TAG] = tag
        self._process = subprocess.Popen(
            order.argv,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.pid = self._process.pid
        descriptor_limit.give_back(self.pid)
        self._pipe = self._process.stdout
        os.set_blocking(self._pipe.fileno(), False)
        self._pidfd = os.pidfd_open(self.pid)

    def descriptors(self) -> set[int]:
        """Returns descriptors that are readable when `handle` has something to do."""
        if self._pipe.closed:
            return {self._pidfd}
        return {self._pidfd, self._pipe.fileno()}

    def handle(self) -> int | None:
        """Reads output; returns the exit code (negative for a signal) once the process has ended. Does not block."""
        ended = bool(readable([self._pidfd], 0.0))
        if not self._pipe.closed:
            piece = self._pipe.read(_KEPT_BYTES)  # as much as a pipe holds, so nothing is left after the end
            self.output = (self.output + (piece or b""))[-_KEPT_BYTES:]
            if piece == b"":
                self._pipe.close()
        if ended:
            return self._reap()
        return None

    def kill(self) -> None:
        """Sends SIGKILL to its process group."""
        if self._process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)  # not reaped yet, so the number is its own

    def gone(self, wait_s: float) -> bool:
        """Whether the process has ended within `wait_s`; reaps it then."""
        if self._process.returncode is None and readable([self._pidfd], wait_s):
            self._reap()
        return self._process.returncode is not None

    def _reap(self) -> int:
        """Takes the exit code of the process, which has ended, and ends what it left in its group."""
        self.kill()
        code = self._process.wait()
        os.close(self._pidfd)
        self._pipe.close()
        return code
