"""The limits in force for one rank, a deadline that follows from one, and the texts when it has passed. Pure.

`watch.py` makes the deadlines, and `hang_detector.py` asks for the texts with one of them and the time. The limits are
the configured ones until the training sets its own; the only message that is read here is `LimitsSet`. Durations are
seconds, moments monotonic nanoseconds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire.launcher_messages import HANG
from rank_monitor.contract.wire.messages import LimitsSet

SECTION = "section:"
SOFT, HARD = "soft_timeout", "hard_timeout"
LOG = "log"
"""The limit of what a rank prints."""
NS_PER_S = 1_000_000_000

MAX_UNREAD_NS = 250_000_000
"""A message may stay unread for so long. A verdict is not delayed by it: the monitor reads everything before it judges.
What a rank sends to the launcher is."""
# A rank is read at least this many times within its smallest limit.
_PARTS = 4
MAX_LIMIT_S = 1e9
"""About 32 years: longer than any training. Nanoseconds of a larger number may not fit into 64 bits."""


@dataclass(frozen=True)
class WatchLimits:
    """Limits in seconds (None: no limit). `learned` names those that were learned, as in `LimitsSet`."""

    initial: float | None
    subsequent: float | None
    sections: Mapping[str, float | None]
    out_of_section: float | None
    learned: frozenset[str] = frozenset()

    @classmethod
    def configured(cls, settings: MonitorSettings) -> WatchLimits:
        """The limits a cycle begins with."""
        return cls(
            settings.initial_rank_heartbeat_timeout,
            settings.rank_heartbeat_timeout,
            dict(settings.rank_section_timeouts),
            settings.rank_out_of_section_timeout,
        )

    @classmethod
    def of_message(cls, message: LimitsSet) -> WatchLimits:
        """The limits the training set.

        Raises:
            ProtocolError: one of them is not a number above zero.
        """
        return cls(
            _checked("initial", message.initial),
            _checked("subsequent", message.subsequent),
            {name: _checked(name, value) for name, value in message.sections.items()},
            _checked("out_of_section", message.out_of_section),
            frozenset(message.learned),
        )

    @property
    def any_section(self) -> bool:
        """Whether any section has a limit."""
        return any(value is not None for value in self.sections.values())

    @property
    def largest(self) -> float | None:
        """The largest limit of all; None when there is none."""
        return max(self._all(), default=None)

    @functools.cached_property
    def max_delay_ns(self) -> int:
        """How long a message may stay unread without harm to any limit, in nanoseconds."""
        return min([MAX_UNREAD_NS, *(nanoseconds(value) // _PARTS for value in self._all())])

    def _all(self) -> list[float]:
        candidates = (self.initial, self.subsequent, self.out_of_section, *self.sections.values())
        return [value for value in candidates if value is not None]


def _checked(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ProtocolError(f"limits: {name!r} is not a number")
    try:
        if math.isfinite(value) and value > 0:
            return float(value)
    except OverflowError:
        pass
    raise ProtocolError(f"limits: {name!r} must be a finite number above zero")


def nanoseconds(seconds: float) -> int:
    """A duration in seconds as whole nanoseconds, for arithmetic with moments. At most `MAX_LIMIT_S`."""
    return round(min(seconds, MAX_LIMIT_S) * NS_PER_S)


@dataclass(frozen=True)
class Deadline:
    """A moment (monotonic ns) by which something must have happened.

    `limit` is the name of the limit as `Verdict` has it; `section` the name of the open section it judges, which may
    be judged by another one's limit (warm-up); `sign` what an in-process wrapper is to show, or what the
    launcher has found.
    """

    limit: str
    limit_s: float
    since_ns: int
    at_ns: int
    learned: bool = False
    section: str = ""
    sign: str = ""


# Limit: (the line, what was missed, the setting). The lines about heartbeats and sections are worded as NVIDIA's
# monitor words them: people search their logs for these.
_TEXTS = {
    "initial": (
        "Did not get initial heartbeat. Waited {waited:.2f} seconds.",
        "no sign of life for {waited:.2f} s after init_workload_monitoring()",
        "initial_rank_heartbeat_timeout",
    ),
    "subsequent": (
        "Did not get subsequent heartbeat. Waited {waited:.2f} seconds.",
        "no sign of life for {waited:.2f} s",
        "rank_heartbeat_timeout",
    ),
    SECTION: (
        "Section '{section}' has been open for {waited:.2f} seconds. Timeout is {limit:.2f} seconds.",
        "section {section!r} open for {waited:.2f} s",
        "rank_section_timeouts",
    ),
    "out_of_section": (
        "Was out of section for {waited:.2f} seconds. Timeout is {limit:.2f} seconds.",
        "no section open for {waited:.2f} s",
        "rank_out_of_section_timeout",
    ),
    "connect": (
        "Did not get init_workload_monitoring(). Waited {waited:.2f} seconds.",
        "no init_workload_monitoring() for {waited:.2f} s after the start",
        "connect_timeout",
    ),
    "reconnect": (
        "Connection was lost. Waited {waited:.2f} seconds.",
        "its connection was lost and did not come back for {waited:.2f} s",
        "connect_timeout, or the largest limit in force",
    ),
    "teardown": (
        "Did not exit after shutdown_workload_monitoring(). Waited {waited:.2f} seconds.",
        "still there {waited:.2f} s after shutdown_workload_monitoring()",
        "teardown_timeout",
    ),
    LOG: (
        "No new step in the log. Waited {waited:.2f} seconds.",
        "printed no new step for {waited:.2f} s",
        "watch_log_timeout",
    ),
    HANG: (
        "No progress: {sign}. Waited {waited:.2f} seconds.",
        "{sign} for {waited:.2f} s",
        "hang_timeout",
    ),
    SOFT: (
        "Soft timeout: no {sign}. Waited {waited:.2f} seconds.",
        "no {sign} for {waited:.2f} s",
        SOFT,
    ),
    HARD: (
        "Hard timeout: no {sign}. Waited {waited:.2f} seconds.",
        "no {sign} for {waited:.2f} s",
        HARD,
    ),
    "stall": (
        "Main thread made no progress. Waited {waited:.2f} seconds.",
        "its main thread ran no Python for {waited:.2f} s: it waits, or is inside one long call",
        "stall_warning",
    ),
}


def waited_s(deadline: Deadline, now_ns: int) -> float:
    """Seconds since what the deadline counts from."""
    return (now_ns - deadline.since_ns) / NS_PER_S


def line(deadline: Deadline, now_ns: int) -> str:
    """The one-line form for the log, worded so that searches for NVIDIA's lines find it."""
    template, _, _ = _texts(deadline)
    waited = waited_s(deadline, now_ns)
    return template.format(waited=waited, limit=deadline.limit_s, section=deadline.section, sign=deadline.sign)


def reason(deadline: Deadline, now_ns: int) -> str:
    """What was missed, for how long, by which limit and setting, and by how much."""
    _, missed, setting = _texts(deadline)
    what = missed.format(waited=waited_s(deadline, now_ns), section=deadline.section, sign=deadline.sign)
    if deadline.learned:
        origin = "learned"
    else:
        origin = setting
    if deadline.limit.startswith(SECTION) and deadline.limit != SECTION + deadline.section:
        origin += f", of {deadline.limit.removeprefix(SECTION)!r}"
    late_s = (now_ns - deadline.at_ns) / NS_PER_S
    return f"{what}; the limit is {deadline.limit_s:g} s ({origin}), exceeded by {late_s:.3f} s"


def setting(deadline: Deadline) -> str:
    """The setting that the limit comes from."""
    return _texts(deadline)[2]


def _texts(deadline: Deadline) -> tuple[str, str, str]:
    if deadline.limit.startswith(SECTION):
        return _TEXTS[SECTION]
    return _TEXTS[deadline.limit]
