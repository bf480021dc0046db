"""Counts the restarts of a call, for `rank_monitor.contract.escalation` to say when there is no further one.

Notes what this rank sees of each iteration; what is counted stands in the store of the call.
"""

from __future__ import annotations

import os
import time

from ft_client.inprocess.arguments import Arguments
from ft_client.inprocess.guard import Guard
from ft_client.progress import megatron_iteration
from ft_client.rank_monitor_client import RankMonitorClient
from rank_monitor.contract import env
from rank_monitor.contract.config import RestartSettings
from rank_monitor.contract.escalation import Life, Limits, Restarts
from rank_monitor.contract.iteration import Iteration
from rank_monitor.contract.messages import NO_ITERATION
from rank_monitor.contract.roll import Store

_KEY = "restarts"


class Escalating:
    """Of one call on this rank.

    Args:
        arguments: of the wrapper.
        store: of the call.
        guard: knows of pings.
    """

    def __init__(self, arguments: Arguments, store: Store, guard: Guard) -> None:
        self._limits = limits_of(arguments)
        self._soft_s = arguments.soft_timeout.total_seconds()
        self._store, self._guard = store, guard
        self._began: float | None = None
        self._life: Life | None = None

    def began(self) -> None:
        """The function is about to run."""
        self._began = time.monotonic()

    def interrupted(self) -> None:
        """The iteration is over. From any thread."""
        if self._began is not None:
            ran_s = time.monotonic() - self._began
            self._life = Life(ran_s, self._guard.has_pinged, reported_iteration(), self._soft_s)

    def why_end(self, number: int) -> str:
        """Counts the iteration before `number`, once; why there is to be none any more, empty: there is.

        To be called by the last rank that comes to the start of iteration `number`.
        """
        if number == 0:
            return ""
        before = Restarts.read(self._store.compare_set(_KEY, "", ""))
        records = Iteration(self._store, number - 1).records()
        after = before.after(number - 1, records, self._life, self._limits)
        self._store.set(_KEY, after.to_json())
        return after.why_end(self._limits)

    def forget(self) -> None:
        """What was seen here is of an iteration that is counted, or that others count."""
        self._began = self._life = None


def limits_of(arguments: Arguments) -> Limits:
    """Those given to the wrapper; else those of the launcher, or the defaults of its options."""
    text, usual = os.environ.get(env.IN_PROCESS_LIMITS), RestartSettings().in_process_limits
    known = Limits.read(text) if text else usual

    def chosen(given: int | None, otherwise: int) -> int:
        return otherwise if given is None else given

    return Limits(
        chosen(arguments.same_error_limit, known.same_error),
        chosen(arguments.no_progress_limit, known.no_progress),
        chosen(arguments.soft_timeout_limit, known.soft_timeouts),
        known.least_progress,
    )


def reported_iteration() -> int:
    """How far the training came, by its own report in this process."""
    if RankMonitorClient.active is not None and RankMonitorClient.active.iteration != NO_ITERATION:
        return RankMonitorClient.active.iteration
    megatron = megatron_iteration()
    return NO_ITERATION if megatron is None else megatron
