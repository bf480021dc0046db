"""Keeps the history of a call's restarts; `contract/rounds/escalation.py` decides when there is no further one.

`call.py` makes one `Escalating` for each call. Every rank notes what it observes of each round (`began`,
`interrupted`). The last rank that arrives at the start of a round adds its observation to the history in the store, and
decides for all (`reason_to_give_up`). Which rank that is changes from round to round, so no rank keeps the history
itself.

`limits_of` says where each limit comes from: the wrapper's argument, else the launcher's option, else a default.
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
from rank_monitor.contract.rounds.escalation import (
    CountedRestarts,
    EscalationLimits,
    LimitsSet,
    RunLife,
    reason_to_give_up,
)
from rank_monitor.contract.rounds.round import Round
from rank_monitor.contract.settings import config
from rank_monitor.contract.settings.config import RestartSettings
from rank_monitor.contract.settings.declaration import parse
from rank_monitor.contract.wire.json_record import read_record, write_record
from rank_monitor.contract.wire.messages import NO_ITERATION

_KEY = "restarts"
"""The key of the history among those of the call."""
_PEER = "nvidia_resiliency_ext"


class Escalating:
    """The history of one call's restarts, as this rank reads and continues it.

    Args:
        arguments: the wrapper's arguments.
        store: the keys of the call.
        link: the link to the monitor, which knows whether the function has called `ping()`.
    """

    def __init__(self, arguments: Arguments, store: Store, link: MonitorLink) -> None:
        self._limits = limits_of(arguments)
        self._soft_s = arguments.soft_timeout.total_seconds()
        self._store, self._link = store, link
        self._began: float | None = None
        self._life: RunLife | None = None

    def began(self) -> None:
        """Notes that the function is about to run on this rank. Called in the main thread."""
        self._began = time.monotonic()

    def interrupted(self) -> None:
        """Notes that the round is interrupted, and how far the training came. Called in the watcher's thread."""
        if self._began is not None:
            ran_s = time.monotonic() - self._began
            self._life = RunLife(ran_s, self._link.has_pinged, reported_iteration(), self._soft_s)

    def reason_to_give_up(self, number: int) -> str:
        """Counts the round before `number`, once. Returns why there is no further round; empty if there is one.

        Called by the last rank that arrives at the start of round `number`, while all other ranks wait for its answer.
        It reads the history without a wait: the key is missing before the first restart.
        """
        if number == 0:
            return ""
        before = CountedRestarts.read(self._store.compare_set(_KEY, "", ""))
        records = Round(self._store, number - 1).records()
        after = before.after(number - 1, records, self._life, self._limits.least_progress)
        self._store.set(_KEY, write_record(after))
        return reason_to_give_up(after.history, self._limits)

    def reset(self) -> None:
        """Discards what was noted of the round before: the last rank at the start has counted that round by now."""
        self._began = self._life = None


def limits_of(arguments: Arguments) -> EscalationLimits:
    """Returns the limits of a call. Each is what the wrapper was given; else what was set for the job; else a default.

    The defaults are those of the launcher's options, with exceptions:

    - Where a callback of the user counts rounds (`RetryController`), no limit has a default: the callback decides.
    - The same error may come any number of times where a callback of the user counts faults (`FaultCounter`); where
      there is no launcher, since no fresh processes could go on; and under the alias, since NVIDIA's wrapper, in whose
      place ours is then, has no such limit.

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
    """Returns the limits that the launcher was given, from the variable that it passes to its ranks.

    Without a launcher: those in the variables of the launcher's settings (`FT_<KEY>`), which the user may have set.
    """
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
    """Returns whether the program uses this package by the names of NVIDIA's package (`integrations/nvrx_alias`)."""
    return hasattr(sys.modules.get(_PEER), "__ft_alias__")


def _counts_rounds(arguments: Arguments) -> bool:
    """Returns whether a callback of the user limits the number of rounds."""
    parts = parts_of(arguments.initialize)
    return any(isinstance(part, RetryController) and part.max_iterations is not None for part in parts)


def _counts_faults(arguments: Arguments) -> bool:
    """Returns whether a callback of the user limits the faults of a rank."""
    parts = parts_of(arguments.health_check)
    return any(isinstance(part, FaultCounter) and part.max_rank_faults is not None for part in parts)


def reported_iteration() -> int:
    """Returns the training's iteration as this process reported it: by the client, else by Megatron-LM's own counter.

    NO_ITERATION where neither is there.
    """
    if RankMonitorClient.active is not None and RankMonitorClient.active.iteration != NO_ITERATION:
        return RankMonitorClient.active.iteration
    megatron = megatron_iteration()
    if megatron is not None:
        return megatron
    return NO_ITERATION
