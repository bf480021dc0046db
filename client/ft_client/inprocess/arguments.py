"""The arguments of `Wrapper` with their defaults, checked when it is created. Pure: nothing is opened or awaited here.

`wrapper.py` makes one `Arguments` for each `Wrapper`; what runs a call (`restart/`) reads it. The durations are a class
of their own, `Timeouts`, which `restart_config.py` makes as well, and which the link to the monitor and the standalone
agent read. Names and defaults are those of NVIDIA's wrapper, so that scripts written for it run unchanged; the three
`..._limit` arguments and `interrupt_grace` are ours.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ft_client.inprocess.abort import Abort
from ft_client.inprocess.callback import Callback
from ft_client.inprocess.completion import Completion
from ft_client.inprocess.compose import Compose
from ft_client.inprocess.finalize import Finalize
from ft_client.inprocess.health_check import HealthCheck
from ft_client.inprocess.initialize import Initialize
from ft_client.inprocess.rank_assignment import (
    ActivateAllRanks,
    RankAssignment,
    RankAssignmentCtx,
    ShiftRanks,
    at_least,
)
from ft_client.inprocess.rank_filter import RankFilter, filtered
from ft_client.inprocess.state import FrozenState, State
from ft_client.inprocess.terminate import Terminate

OnState = Callable[[FrozenState], FrozenState]

_KINDS: Mapping[str, type] = {
    "initialize": Initialize,
    "abort": Abort,
    "finalize": Finalize,
    "health_check": HealthCheck,
    "completion": Completion,
    "terminate": Terminate,
    "rank_assignment": RankAssignment,
    "rank_filter": RankFilter,
}
_RELATIONS = (
    ("soft_timeout", "hard_timeout"),
    ("hard_timeout", "barrier_timeout"),
    ("monitor_process_interval", "barrier_timeout"),
    ("monitor_process_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "soft_timeout"),
    ("heartbeat_interval", "heartbeat_timeout"),
    ("heartbeat_timeout", "barrier_timeout"),
    ("monitor_thread_interval", "soft_timeout"),
    ("progress_watchdog_interval", "soft_timeout"),
)
"""The first of each pair must be below the second: else the second would act before the first had a chance."""
_SECOND = datetime.timedelta(seconds=1)


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Every duration of the wrapper. Intervals are upper bounds.

    Attributes:
        soft_timeout: the function is interrupted when it makes no progress for so long.
        hard_timeout: the process is killed when it makes no progress for so long; also the limit of a callback.
        barrier_timeout: how long ranks wait for each other at the start and at the end of a round.
        completion_timeout: how long ranks on which the function returned wait for the other active ranks.
        last_call_wait: how long a round waits for further faults after the first, before it is interrupted.
        monitor_process_interval, monitor_thread_interval: accepted, and checked, for code written for NVIDIA's wrapper:
            our monitor sleeps until a deadline, and our watcher waits in the store.
        heartbeat_interval: without a launcher, the time between two increases of a node's counter.
        heartbeat_timeout: without a launcher, a node counts as lost when its counter stands still for so long.
        termination_grace_time: from SIGTERM to SIGKILL.
        progress_watchdog_interval: the longest time between two stamps of the main thread.

    Raises:
        TypeError: a value is not a timedelta; the text names the argument.
        ValueError: a value is below zero, or a relation is violated; the text names both arguments and values.
    """

    monitor_thread_interval: datetime.timedelta = _SECOND
    monitor_process_interval: datetime.timedelta = _SECOND
    heartbeat_interval: datetime.timedelta = _SECOND
    progress_watchdog_interval: datetime.timedelta = _SECOND
    soft_timeout: datetime.timedelta = 60 * _SECOND
    hard_timeout: datetime.timedelta = 90 * _SECOND
    heartbeat_timeout: datetime.timedelta = 30 * _SECOND
    barrier_timeout: datetime.timedelta = 120 * _SECOND
    completion_timeout: datetime.timedelta = 120 * _SECOND
    last_call_wait: datetime.timedelta = _SECOND
    termination_grace_time: datetime.timedelta = 5 * _SECOND
    interrupt_grace: datetime.timedelta | None = None
    """How long the cleanup of an interrupted function may take before it is interrupted again. None: the launcher's
    setting, else half the time between soft_timeout and hard_timeout."""

    def __post_init__(self) -> None:
        for duration in fields(Timeouts):
            value = getattr(self, duration.name)
            if value is None and duration.default is None:
                continue
            if not isinstance(value, datetime.timedelta):
                raise TypeError(f"{duration.name}={value!r} is not a timedelta")
            if value < datetime.timedelta(0):
                raise ValueError(f"{_named(self, duration.name)} is below zero")
        for lower, upper in _RELATIONS:
            if getattr(self, lower) >= getattr(self, upper):
                raise ValueError(f"{_named(self, lower)} must be below {_named(self, upper)}")

    def interrupt_grace_s(self, of_launcher: float | None) -> float:
        """Returns `interrupt_grace` in seconds.

        Args:
            of_launcher: the value of `--ft-interrupt-grace`; None: not set, or no launcher.
        """
        if self.interrupt_grace is not None:
            return self.interrupt_grace.total_seconds()
        if of_launcher is not None:
            return of_launcher
        return (self.hard_timeout - self.soft_timeout).total_seconds() / 2

    @property
    def assignment_limit_s(self) -> float:
        """Seconds that a rank assignment may take: it waits for other ranks where it gathers, twice as a rule."""
        return (self.hard_timeout + 2 * self.barrier_timeout).total_seconds()

    @property
    def restart_limit_s(self) -> float:
        """Seconds from a fault to the next start, at most: last call, a hard hang, the barriers of end and start."""
        return (self.last_call_wait + self.hard_timeout + 2 * self.barrier_timeout).total_seconds()


def _default_assignment() -> Callable[[RankAssignmentCtx], RankAssignmentCtx]:
    return Compose(ActivateAllRanks(), ShiftRanks())


@dataclass(frozen=True, kw_only=True)
class Arguments(Timeouts):
    """The arguments of `Wrapper`.

    Store and abort have their defaults in `wrapper.py`: the store's module imports torch, and this file does without.

    The three `..._limit` arguments end the restarts; 0: never. None: what the launcher was given, else the defaults of
    its options (`restart/escalating.py: limits_of`).

    A callback is an instance of its class, a `Compose` of such instances, or any other function; never a class.

    Raises:
        TypeError: an argument has the wrong type; the text names it.
        ValueError: as `Timeouts`; a path of the monitor process is relative, or a limit below 0.
    """

    store_factory: Callable[..., Any]
    abort: OnState | None
    store_kwargs: Mapping[str, Any] = field(default_factory=dict)
    initialize: OnState | None = None
    finalize: OnState | None = None
    health_check: OnState | None = None
    completion: OnState | None = None
    terminate: OnState | None = None
    rank_assignment: Callable[[RankAssignmentCtx], RankAssignmentCtx] = field(default_factory=_default_assignment)
    rank_filter: Callable[[State], State] | None = None
    monitor_process_logfile: str | None = None
    monitor_process_pidfile: str | None = None
    same_error_limit: int | None = None
    no_progress_limit: int | None = None
    soft_timeout_limit: int | None = None
    enabled: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.store_factory):
            raise TypeError(f"store_factory={self.store_factory!r} cannot be called")
        if not isinstance(self.store_kwargs, Mapping):
            raise TypeError(f"store_kwargs={self.store_kwargs!r} is not a mapping")
        if not isinstance(self.enabled, bool):
            raise TypeError(f"enabled={self.enabled!r} is not a bool")
        for name, kind in _KINDS.items():
            _check_callback(name, kind, getattr(self, name))
        for name in ("same_error_limit", "no_progress_limit", "soft_timeout_limit"):
            at_least(0, name, getattr(self, name))
        for name in ("monitor_process_logfile", "monitor_process_pidfile"):
            _check_path(name, getattr(self, name))

    @property
    def assignment(self) -> Callable[[RankAssignmentCtx], RankAssignmentCtx]:
        """The rank assignment, followed by the rank filter where the user gave one."""
        if self.rank_filter is None:
            return self.rank_assignment
        return filtered(self.rank_assignment, self.rank_filter)


def path_of(path: str, initial_rank: int) -> Path:
    """Returns a path of the monitor process for one rank: `{rank}` is replaced by the rank's number at entry."""
    return Path(path.replace("{rank}", str(initial_rank)))


def _check_callback(name: str, kind: type, value: object) -> None:
    """Checks a callback. One of another kind is refused: a health check given as `finalize` is a mistake."""
    if value is None and name != "rank_assignment":
        return
    is_other_kind = isinstance(value, (Callback, RankAssignment, RankFilter)) and not isinstance(value, kind)
    if not callable(value) or isinstance(value, type) or is_other_kind:
        raise TypeError(f"{name}={value!r} is not an instance of {kind.__name__}")


def _check_path(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} is not a text")
    if not Path(value).is_absolute():
        raise ValueError(f"{name}={value!r} is not an absolute path")


def _named(timeouts: Timeouts, name: str) -> str:
    """Returns a duration with its name, for an error."""
    return f"{name}={getattr(timeouts, name).total_seconds():g} s"
