"""Runs the checks of this node, all at the same time, and never waits for one longer than the limit.

Acts only: `plan` decides what to start, `reading` what an end means and what all readings mean for the node.
"""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from ft_launcher.health.check_process import CheckProcess
from ft_launcher.health.plan import Places, Plan
from ft_launcher.health.reading import Order, Reading, too_late, understand
from ft_launcher.health.repeated import repeated
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.settings.config import HealthSettings

# A process that SIGKILL has not ended by then waits in the kernel, which alone makes the node unhealthy.
_AFTER_SIGKILL_S = 2.0


@dataclass(frozen=True)
class RepeatedHealth:
    """The checks that are repeated while ranks run, and seconds from the end of a round to the next one."""

    health: NodeHealth
    interval_s: float


class NodeHealth:
    """The checks of a node over a job: what they saw before each cycle is compared with what they saw earlier.

    Args:
        folders: where the launcher writes, which should have room.
        tag: the job's tag, for the environment of the processes; empty: none.
    """

    def __init__(
        self, settings: HealthSettings, folders: Sequence[str] = (), tag: str = "", places: Places | None = None
    ) -> None:
        self._settings = settings
        self._folders = folders
        self._tag = tag
        self._places = places or Places()
        self._memory: dict[str, dict[str, Any]] = {}
        self._readings: list[Reading] = []
        self._running: dict[str, CheckProcess] = {}
        self._stuck: dict[str, CheckProcess] = {}
        self._deadline = 0.0
        self._is_late = False

    def repeated(self) -> RepeatedHealth | None:
        """Returns the checks that are repeated while ranks run, with a memory of their own; None: none is."""
        wanted = repeated(self._settings)
        if wanted is None:
            return None
        folders: Sequence[str] = ()
        if wanted.with_folders:
            folders = self._folders
        return RepeatedHealth(NodeHealth(wanted.settings, folders, self._tag, self._places), wanted.interval_s)

    def check(self) -> list[Reading]:
        """One reading per check, within `health_timeout` and 2 s; at once where nothing is to be started."""
        self.begin()
        self._await_end()
        return self.take()

    # A round without waiting for it.

    def begin(self) -> None:
        """Starts a round of checks; the one before is over."""
        plan = Plan(self._settings, self._folders, self._places, self._memory)
        self._readings = plan.readings
        self._is_late = False
        self._deadline = time.monotonic() + self._settings.health_timeout
        for order in plan.orders:
            self._readings += self._start(order)

    def descriptors(self) -> set[int]:
        """Returns descriptors that are readable when `attend` has something to do."""
        return set[int]().union(*(process.descriptors() for process in self._running.values()))

    def next_check(self) -> float | None:
        """When to call `attend` even if nothing is readable (monotonic seconds); None: no check runs."""
        if self._running:
            return self._deadline
        return None

    def attend(self, ready: Set[int]) -> bool:
        """Takes ends of checks, and kills those that are late. Returns whether the round is over. Does not block."""
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

    def take(self) -> list[Reading]:
        """Returns the readings of the round that is over."""
        readings, self._readings = self._readings, []
        return readings

    def stop(self) -> None:
        """Ends a round: kills its checks, and waits at most 2 s for them. Its readings are lost."""
        self.close()
        self._is_late = True
        self._deadline = time.monotonic() + _AFTER_SIGKILL_S
        self._await_end()
        self.take()

    def pids(self) -> set[int]:
        """Returns the pids of running checks, and of those that SIGKILL did not end."""
        return {process.pid for process in (*self._running.values(), *self._stuck.values())}

    def close(self) -> None:
        """Kills the running checks, without waiting for their end."""
        for process in list(self._running.values()):
            process.kill()

    def _await_end(self) -> None:
        while self._running:
            self.attend(readable(self.descriptors(), max(0.0, self._deadline - time.monotonic())))

    def _start(self, order: Order) -> list[Reading]:
        """Starts the check; a reading instead, where it cannot be started."""
        before = self._stuck.get(order.check)
        if before is not None:
            if not before.gone(0.0):
                return [too_late(order, bytes(before.output), time.monotonic() - before.started, before.pid)]
            del self._stuck[order.check]
        try:
            self._running[order.check] = CheckProcess(order, self._tag)
        except (OSError, ValueError) as error:
            return [Reading(order.check, "unknown", f"no process can be started: {error}", 0.0)]
        return []

    def _ended(self, process: CheckProcess, code: int) -> Reading:
        took_s = time.monotonic() - process.started
        if self._is_late:
            return too_late(process.order, bytes(process.output), took_s, None)
        reading, memory = understand(process.order, bytes(process.output), code, took_s)
        if memory:
            self._memory[process.order.check] = memory
        return reading

    def _give_up(self) -> None:
        """Kills the checks that are late. Those that SIGKILL has not ended some time later are kept as stuck."""
        if not self._is_late:
            self._is_late = True
            self._deadline = time.monotonic() + _AFTER_SIGKILL_S
            self.close()
            return
        for check, process in self._running.items():
            self._stuck[check] = process
            took_s = time.monotonic() - process.started
            self._readings.append(too_late(process.order, bytes(process.output), took_s, process.pid))
        self._running.clear()
