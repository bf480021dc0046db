"""Waits before a cycle until the ranks of earlier cycles have given back the memory of the GPUs.

A driver releases memory some time after the process that had it has ended, and later if that was killed. `next_step`
decides what follows a reading. Each reading is a process of its own, so that neither CUDA nor the driver's library is
loaded into the agent. A failed reading, or memory that is not released in time, delays no cycle further.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ft_launcher.health.check_process import CheckProcess
from ft_launcher.health.plan import Places, has_driver, order_for
from ft_launcher.health.reading import too_late, understand
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.settings.config import StopSettings

_CHECK = "gpu_memory"
_UNREAD = "the GPU memory in use cannot be read, so that no cycle waits for it"
# A reading gets this long even when the time to wait for memory has nearly passed.
_READING_S = 2.0
# A process that SIGKILL has not ended by then waits in the kernel, as on a driver that hangs.
_AFTER_SIGKILL_S = 2.0
# The pause grows with the time waited, up to the configured interval: a quick release delays the cycle little.
_FIRST_PAUSE_S = 0.1

Used: TypeAlias = Mapping[str, float]
"""MiB in use, by the name of the GPU."""


@dataclass(frozen=True)
class Step:
    """What follows from a reading: another one after so many seconds; None: the cycle starts, `reason` says with what
    still in use."""

    pause_s: float | None
    reason: str = ""


def next_step(before: Used, now: Used, settings: StopSettings, waited_s: float) -> Step:
    """What follows from a reading. Pure.

    Args:
        before: what was in use before the first cycle; a GPU that is not in it is not waited for.
        waited_s: since the first reading was asked for.
    """
    tolerance = settings.gpu_memory_tolerance_mb
    more = {gpu: mib - before[gpu] for gpu, mib in now.items() if gpu in before and mib > before[gpu] + tolerance}
    if not more:
        return Step(None)
    left_s = settings.gpu_memory_reclaim_timeout - waited_s
    if left_s > 0:
        return Step(min(left_s, max(_FIRST_PAUSE_S, min(waited_s, settings.gpu_memory_poll_interval))))
    in_use = ", ".join(f"{gpu} {mib:.0f} MiB" for gpu, mib in more.items())
    return Step(None, f"{waited_s:.0f} s after the ranks ended, more is in use than before the first cycle: {in_use}")


class MemoryReclaim:
    """The memory of this node's GPUs over a job. Before each cycle: `begin`, then `wait`.

    Args:
        tag: the job's tag, for the environment of the processes; empty: none.
    """

    def __init__(self, settings: StopSettings, tag: str = "", places: Places | None = None) -> None:
        self._settings = settings
        self._tag = tag
        self._places = places or Places()
        self._before: Used | None = None
        self._process: CheckProcess | None = None
        self._stuck: CheckProcess | None = None
        self._trouble = ""
        self._began = 0.0
        self._reads = threading.Lock()
        self._closed = threading.Event()

    def begin(self) -> None:
        """Starts a reading and returns. Does nothing without a driver, or after a failed first reading."""
        self._closed.clear()
        self._began = time.monotonic()
        if self._settings.gpu_memory_reclaim_timeout > 0 and self._before != {} and has_driver(self._places):
            self._start()
            if self._trouble:
                self._before = self._before or {}

    def wait(self) -> str:
        """Why the next cycle starts although memory is in use, or cannot be read; empty: all is well.

        Returns within `gpu_memory_reclaim_timeout` and 4 s; the first call, before the first cycle, after one reading.
        """
        with self._reads:
            if self._process is None:
                trouble, self._trouble = self._trouble, ""
                return trouble
            return self._wait(self._process)

    def pids(self) -> set[int]:
        """Returns the pid of the process that reads, and of one that SIGKILL did not end."""
        return {process.pid for process in (self._process, self._stuck) if process is not None}

    def close(self) -> None:
        """Ends a running reading, and a `wait` in another thread."""
        self._closed.set()
        process = self._process
        if process is not None:
            process.kill()
        if self._reads.acquire(blocking=False):
            if self._process is not None:
                self._leave(self._process)
            self._reads.release()

    def _wait(self, process: CheckProcess | None) -> str:
        while process is not None:
            used, why = self._take(process)
            if self._before is None:
                self._before = used
                if used:
                    return ""
                return f"{_UNREAD}: {why}"
            if not used:
                return f"{_UNREAD}: {why}"
            step = next_step(self._before, used, self._settings, time.monotonic() - self._began)
            if step.pause_s is None or self._closed.wait(step.pause_s):
                return step.reason
            process = self._start()
        return self._trouble

    def _start(self) -> CheckProcess | None:
        self._trouble = ""
        if self._stuck is not None and not self._stuck.gone(0.0):
            self._trouble = f"{_UNREAD}: process {self._stuck.pid} hangs in the kernel"
            return None
        order = order_for(_CHECK, {}, {}, "unknown", needs="pynvml")
        if order is None:
            self._trouble = f"{_UNREAD}: that needs the package nvidia-ml-py, which is not installed"
            return None
        try:
            self._process = CheckProcess(order, self._tag)
        except OSError as error:
            self._trouble = f"{_UNREAD}: no process can be started ({error})"
        return self._process

    def _take(self, process: CheckProcess) -> tuple[Used, str]:
        """Waits for the process. Returns MiB in use; an empty mapping, and why, when it reports nothing."""
        now = time.monotonic()
        deadline = max(now + _READING_S, self._began + self._settings.gpu_memory_reclaim_timeout)
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            readable(process.descriptors(), left_s)
            code = process.handle()
            if code is not None:
                self._process = None
                reading, answer = understand(process.order, bytes(process.output), code, time.monotonic() - now)
                return answer.get("used_mib", {}), reading.reason or reading.state
        process.kill()
        if self._leave(process):
            left_pid = None
        else:
            left_pid = process.pid
        return {}, too_late(process.order, bytes(process.output), deadline - now, left_pid).reason

    def _leave(self, process: CheckProcess) -> bool:
        """Reaps a killed process. Returns whether it has ended; one that hangs in the kernel is kept as stuck."""
        ended = process.gone(_AFTER_SIGKILL_S)
        self._process = None
        if ended:
            self._stuck = None
        else:
            self._stuck = process
        return ended
