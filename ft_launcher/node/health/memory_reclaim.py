"""Waits before a cycle until the ranks of earlier cycles have given back the memory of the GPUs.

A driver releases a process' memory some time after the process has ended, and later if it was killed. Ranks that start
before that fail for lack of memory. What is in use is compared with what was in use before the first cycle: memory of
other programs is not waited for.

`agent/own_health.py` calls `begin`, makes the health checks meanwhile, and then calls `wait` in a thread. Each reading
is a process of its own, so that neither CUDA nor the driver's library is loaded into the agent. Fails open: a failed
reading, or memory that is not released in time, delays no cycle further.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ft_launcher.node.health.check_process import CheckRound
from ft_launcher.node.health.node_health import Places, has_driver, order_for
from rank_monitor.contract.settings.config import StopSettings

_CHECK = "gpu_memory"
_UNREAD = "the GPU memory in use cannot be read, so that no cycle waits for it"
_READING_S = 2.0
"""Seconds that a reading has at least, also when the time to wait for memory has nearly passed."""
_FIRST_PAUSE_S = 0.1
"""Seconds to the second reading. The pause grows with the time waited, up to the configured interval: a quick release
delays the cycle little."""

Used: TypeAlias = Mapping[str, float]
"""MiB in use, by the name of the GPU."""


@dataclass(frozen=True)
class Step:
    """What follows from a reading.

    Attributes:
        pause_s: seconds until the next reading; None: there is none, and the cycle starts.
        reason: what is still in use when the cycle starts; empty: nothing.
    """

    pause_s: float | None
    reason: str = ""


def next_step(before: Used, now: Used, settings: StopSettings, waited_s: float) -> Step:
    """Returns what follows from a reading. Pure.

    Args:
        before: what was in use before the first cycle. A GPU that is not in it is not waited for.
        now: what is in use now.
        settings: the tolerance, the limit and the interval.
        waited_s: seconds since the first reading before this cycle was begun.
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
    """The memory of this node's GPUs over a job. Before each cycle: `begin`, then `wait`, then `close`.

    Args:
        settings: the tolerance, the limit and the interval.
        tag: the job's tag, for the environment of the processes; empty: there is no job.
        places: where the driver shows itself.
    """

    def __init__(self, settings: StopSettings, tag: str = "", places: Places | None = None) -> None:
        self._settings = settings
        self._places = places or Places()
        self._before: Used | None = None
        self._round = CheckRound(tag)
        self._began = 0.0
        self._reads = threading.Lock()
        self._closed = threading.Event()

    def begin(self) -> None:
        """Starts a reading and returns.

        Does nothing without a driver, or if the reading before the first cycle failed: there is nothing to compare
        with.
        """
        self._closed.clear()
        self._began = time.monotonic()
        if self._settings.gpu_memory_reclaim_timeout > 0 and self._before != {} and has_driver(self._places):
            self._start()

    def wait(self) -> str:
        """Waits until the memory is free again. Returns why the next cycle starts although it is not; empty: it is.

        Blocks for `gpu_memory_reclaim_timeout` and 4 s at most; before the first cycle only for one reading.
        """
        with self._reads:
            while readings := self._round.wait():
                used: Used = self._round.memory.pop(_CHECK, {}).get("used_mib", {})
                if self._before is None:
                    self._before = used
                if not used:
                    return f"{_UNREAD}: {readings[0].reason or readings[0].state}"
                step = next_step(self._before, used, self._settings, time.monotonic() - self._began)
                if step.pause_s is None or self._closed.wait(step.pause_s):
                    return step.reason
                self._start()
            return ""

    def pids(self) -> set[int]:
        """Returns the pids of the process that reads, and of one that SIGKILL did not end. Any thread."""
        return self._round.pids()

    def close(self) -> None:
        """Ends a running reading, and a `wait` in another thread. Another cycle may follow."""
        self._closed.set()
        self._round.close()
        if self._reads.acquire(blocking=False):
            self._round.stop()
            self._reads.release()

    def _start(self) -> None:
        """Starts a reading. Its limit is the time that is left for all readings, but long enough for a reading."""
        left_s = self._began + self._settings.gpu_memory_reclaim_timeout - time.monotonic()
        order = order_for(_CHECK, {}, {}, "unknown", needs="pynvml")
        self._round.start([order], max(_READING_S, left_s))
