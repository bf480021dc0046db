"""Counts the restarts of a call; `rank_monitor.contract.iterations.escalation` decides when there is no further one.

It notes what this rank observes of each iteration. The counts are in the store of the call.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace

from ft_client.inprocess.arguments import Arguments
from ft_client.inprocess.restart.monitor_link import MonitorLink
from ft_client.monitoring.watchdog import megatron_iteration
from ft_client.rank_monitor_client import RankMonitorClient
from rank_monitor.contract import env
from rank_monitor.contract.iterations.barrier import Store
from rank_monitor.contract.iterations.escalation import EscalationLimits, Life, Restarts
from rank_monitor.contract.iterations.iteration import Iteration
from rank_monitor.contract.settings.config import RestartSettings
from rank_monitor.contract.wire.json_record import read_record, write_record
from rank_monitor.contract.wire.messages import NO_ITERATION

_KEY = "restarts"


class Escalating:
    """The counts of one call on this rank.

    Args:
        arguments: of the wrapper.
        store: of the call.
        link: the link to the monitor, which knows whether the function has called `ping()`.
    """

    def __init__(self, arguments: Arguments, store: Store, link: MonitorLink) -> None:
        self._limits = limits_of(arguments)
        self._soft_s = arguments.soft_timeout.total_seconds()
        self._store, self._link = store, link
        self._began: float | None = None
        self._life: Life | None = None

    def began(self) -> None:
        """Notes that the function is about to run."""
        self._began = time.monotonic()

    def interrupted(self) -> None:
        """Notes that the iteration is interrupted. From any thread."""
        if self._began is not None:
            ran_s = time.monotonic() - self._began
            self._life = Life(ran_s, self._link.has_pinged, reported_iteration(), self._soft_s)

    def why_end(self, number: int) -> str:
        """Counts the iteration before `number`, once. Returns why there is no further one; empty if there is one.

        To be called by the last rank that arrives at the start of iteration `number`.
        """
        if number == 0:
            return ""
        before = Restarts.read(self._store.compare_set(_KEY, "", ""))
        records = Iteration(self._store, number - 1).records()
        after = before.after(number - 1, records, self._life, self._limits)
        self._store.set(_KEY, write_record(after))
        return after.why_end(self._limits)

    def forget(self) -> None:
        """Discards what was noted: its iteration is counted by now."""
        self._began = self._life = None


def limits_of(arguments: Arguments) -> EscalationLimits:
    """The limits given to the wrapper; else those of the launcher, or the defaults of its options."""
    known, text = RestartSettings().in_process_limits, os.environ.get(env.IN_PROCESS_LIMITS)
    if text:
        known = read_record(EscalationLimits, text)
    given = {
        "same_error": arguments.same_error_limit,
        "no_progress": arguments.no_progress_limit,
        "soft_timeouts": arguments.soft_timeout_limit,
    }
    return replace(known, **{name: limit for name, limit in given.items() if limit is not None})


def reported_iteration() -> int:
    """The training's iteration as it was reported in this process; NO_ITERATION if it was not."""
    if RankMonitorClient.active is not None and RankMonitorClient.active.iteration != NO_ITERATION:
        return RankMonitorClient.active.iteration
    megatron = megatron_iteration()
    if megatron is not None:
        return megatron
    return NO_ITERATION
