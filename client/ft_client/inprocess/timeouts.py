"""The durations of the wrapper, with their defaults (NVIDIA's) and the relations between them. Pure.

`arguments.py` and `restart_config.py` make one; the call, its link to the monitor and the companion read it. Nothing is
waited for here.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, fields

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
"""The first of each pair must be below the second."""


_SECOND = datetime.timedelta(seconds=1)


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Every duration of the wrapper; intervals are upper bounds.

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
        for field in fields(Timeouts):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if not isinstance(value, datetime.timedelta):
                raise TypeError(f"{field.name}={value!r} is not a timedelta")
            if value < datetime.timedelta(0):
                raise ValueError(f"{_named(self, field.name)} is below zero")
        for lower, upper in _RELATIONS:
            if getattr(self, lower) >= getattr(self, upper):
                raise ValueError(f"{_named(self, lower)} must be below {_named(self, upper)}")

    def interrupt_grace_s(self, of_launcher: float | None) -> float:
        """`interrupt_grace` in seconds. `of_launcher`: the value of `--ft-interrupt-grace`; None: not set."""
        if self.interrupt_grace is not None:
            return self.interrupt_grace.total_seconds()
        if of_launcher is not None:
            return of_launcher
        return (self.hard_timeout - self.soft_timeout).total_seconds() / 2

    @property
    def restart_limit_s(self) -> float:
        """Seconds from a fault to the next start, at most: last call, a hard hang, the barriers of end and start."""
        return (self.last_call_wait + self.hard_timeout + 2 * self.barrier_timeout).total_seconds()


def _named(timeouts: Timeouts, name: str) -> str:
    return f"{name}={getattr(timeouts, name).total_seconds():g} s"
