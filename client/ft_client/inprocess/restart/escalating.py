"""Keeps the history of a call's restarts; `contract/rounds/escalation.py` decides when there is no further one.

It notes what this rank observes of each round. The history is in the store of the call.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

from ft_client.inprocess.arguments import Arguments
from ft_client.inprocess.compose import parts_of
from ft_client.inprocess.health_check import FaultCounter
from ft_client.inprocess.initialize import RetryController
from ft_client.inprocess.restart.monitor_link import MonitorLink
from ft_client.rank.monitoring.watchdog import megatron_iteration
from ft_client.rank_monitor_client import RankMonitorClient
from rank_monitor.contract import env
from rank_monitor.contract.rounds.barrier import Store
from rank_monitor.contract.rounds.escalation import CountedRestarts, EscalationLimits, LimitsSet, RunLife, why_end
from rank_monitor.contract.rounds.round import Round
from rank_monitor.contract.settings import config
from rank_monitor.contract.settings.config import RestartSettings
from rank_monitor.contract.settings.declaration import parse
from rank_monitor.contract.wire.json_record import read_record, write_record
from rank_monitor.contract.wire.messages import NO_ITERATION

_KEY = "restarts"
_PEER = "nvidia_resiliency_ext"


class Escalating:
    """The history of one call's restarts, as this rank reads and continues it.

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
        self._life: RunLife | None = None

    def began(self) -> None:
        """Notes that the function is about to run."""
        self._began = time.monotonic()

    def interrupted(self) -> None:
        """Notes that the round is interrupted. From any thread."""
        if self._began is not None:
            ran_s = time.monotonic() - self._began
            self._life = RunLife(ran_s, self._link.has_pinged, reported_iteration(), self._soft_s)

    def why_end(self, number: int) -> str:
        """Counts the round before `number`, once. Returns why there is no further one; empty if there is one.

        To be called by the last rank that arrives at the start of round `number`.
        """
        if number == 0:
            return ""
        before = CountedRestarts.read(self._store.compare_set(_KEY, "", ""))
        records = Round(self._store, number - 1).records()
        after = before.after(number - 1, records, self._life, self._limits.least_progress)
        self._store.set(_KEY, write_record(after))
        return why_end(after.history, self._limits)

    def forget(self) -> None:
        """Discards what was noted: its iteration is counted by now."""
        self._began = self._life = None


def limits_of(arguments: Arguments) -> EscalationLimits:
    """The limits given to the wrapper; else those set for the job; else the defaults.

    Defaults are the options', except where something of the user's ends the restarts, which decides then. Without a
    launcher there are no fresh ranks to go on with, and NVIDIA's wrapper, whose place ours takes under the alias, has
    no limit for an error that comes again: that default is never in both cases.

    Raises:
        ConfigError: a variable of a limit has no possible value.
    """
    limits = RestartSettings().in_process_limits
    if _counts_rounds(arguments):
        limits = replace(limits, same_error=0, no_progress=0, soft_timeouts=0)
    if _counts_faults(arguments) or not _has_launcher() or _is_under_alias():
        limits = replace(limits, same_error=0)
    given = {
        "same_error": arguments.same_error_limit,
        "no_progress": arguments.no_progress_limit,
        "soft_timeouts": arguments.soft_timeout_limit,
    }
    return LimitsSet(**given).over(_set_for_the_job().over(limits))


def _set_for_the_job() -> LimitsSet:
    """The limits that the launcher was given; without one those in the variables of its settings (`FT_<KEY>`)."""
    text = os.environ.get(env.IN_PROCESS_LIMITS)
    if text:
        return read_record(LimitsSet, text)
    variables = {name: env.of_setting(key) for name, key in config.OF_IN_PROCESS.items()}
    found = {
        name: parse(RestartSettings, config.OF_IN_PROCESS[name], os.environ[variable], variable)
        for name, variable in variables.items()
        if variable in os.environ
    }
    return LimitsSet(**found)


def _has_launcher() -> bool:
    return env.IN_PROCESS_LIMITS in os.environ


def _is_under_alias() -> bool:
    """Whether the program knows us by the names of NVIDIA's package."""
    return hasattr(sys.modules.get(_PEER), "__ft_alias__")


def _counts_rounds(arguments: Arguments) -> bool:
    """Whether the user limits the number of rounds."""
    parts = parts_of(arguments.initialize)
    return any(isinstance(part, RetryController) and part.max_iterations is not None for part in parts)


def _counts_faults(arguments: Arguments) -> bool:
    """Whether the user limits the faults of a rank."""
    parts = parts_of(arguments.health_check)
    return any(isinstance(part, FaultCounter) and part.max_rank_faults is not None for part in parts)


def reported_iteration() -> int:
    """The training's iteration as it was reported in this process; NO_ITERATION if it was not."""
    if RankMonitorClient.active is not None and RankMonitorClient.active.iteration != NO_ITERATION:
        return RankMonitorClient.active.iteration
    megatron = megatron_iteration()
    if megatron is not None:
        return megatron
    return NO_ITERATION
