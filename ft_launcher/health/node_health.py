"""Runs the checks of this node, all at the same time, and never waits for one longer than the limit.

Acts only: `plan` decides what to start, `reading` what an end means and what all readings mean for the node.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ft_launcher.health.check_process import CheckProcess
from ft_launcher.health.plan import Places, Plan
from ft_launcher.health.reading import Order, Reading, too_late, understand
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.settings.config import HealthSettings

# A process that SIGKILL has not ended by then waits in the kernel, which alone makes the node unhealthy.
_AFTER_SIGKILL_S = 2.0


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
        self._running: dict[str, CheckProcess] = {}
        self._stuck: dict[str, CheckProcess] = {}

    def check(self) -> list[Reading]:
        """One reading per check, within `health_timeout` and 2 s; at once where nothing is to be started."""
        plan = Plan(self._settings, self._folders, self._places, self._memory)
        readings = plan.readings
        for order in plan.orders:
            readings += self._start(order)
        deadline = time.monotonic() + self._settings.health_timeout
        while self._running:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            ready = readable((fd for process in self._running.values() for fd in process.descriptors()), left_s)
            for check, process in list(self._running.items()):
                if not process.descriptors() & ready:
                    continue
                code = process.handle()
                if code is not None:
                    readings.append(self._ended(process, code))
                    del self._running[check]
        return readings + self._give_up()

    def pids(self) -> set[int]:
        """Returns the pids of running checks, and of those that SIGKILL did not end."""
        return {process.pid for process in (*self._running.values(), *self._stuck.values())}

    def close(self) -> None:
        """Kills the running checks, without waiting for their end."""
        for process in list(self._running.values()):
            process.kill()

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
        reading, memory = understand(process.order, bytes(process.output), code, took_s)
        if memory:
            self._memory[process.order.check] = memory
        return reading

    def _give_up(self) -> list[Reading]:
        """Kills the checks that are late. Those that SIGKILL does not end are kept as stuck."""
        readings = []
        for process in self._running.values():
            process.kill()
        deadline = time.monotonic() + _AFTER_SIGKILL_S
        for check, process in self._running.items():
            took_s = time.monotonic() - process.started
            left_pid = None
            if not process.gone(max(0.0, deadline - time.monotonic())):
                self._stuck[check] = process
                left_pid = process.pid
            readings.append(too_late(process.order, bytes(process.output), took_s, left_pid))
        self._running.clear()
        return readings
