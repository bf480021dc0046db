"""The limits in force for one rank, a deadline that follows from one, and the texts when it has passed. Pure.

`watch.py` makes the deadlines, and `hang_detector.py` asks for the texts with a deadline and the time. The limits in
force are the configured ones until the training sends its own, which it has learned or loaded; the only message that is
read here is `LimitsSet`.

A *limit* is a duration in seconds (float, None: no limit); a *deadline* is a moment in monotonic nanoseconds (int).
Moments are whole numbers: as a float, nanoseconds since the boot of the machine would be exact for 104 days only.
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
"""The beginning of the name of a section's limit: `section:step`."""
SOFT, HARD = "soft_timeout", "hard_timeout"
"""The limits of an in-process wrapper: of progress of its function, and of a callback or a restart that does not
begin."""
LOG = "log"
"""The limit of what a rank prints (`watch_log_timeout`)."""
NS_PER_S = 1_000_000_000

MAX_UNREAD_NS = 250_000_000
"""The longest time for which a message may stay unread. A verdict is not delayed by it: the monitor reads everything
before it judges. What a rank sends to the launcher may be late by so much."""
_PARTS = 4
"""How many times a rank is read within its smallest limit at the least."""
MAX_LIMIT_S = 1e9
"""About 32 years: longer than any training. Nanoseconds of a larger number may not fit into 64 bits."""


@dataclass(frozen=True)
class WatchLimits:
    """The limits in force of one rank, in seconds (None: no limit).

    Attributes:
        initial: from the beginning of the watch to the first sign of life.
        subsequent: between two signs of life.
        sections: by name of the section, while it is open.
        out_of_section: while no section is open.
        learned: the names of the limits that were learned, as in `LimitsSet`.
    """

    initial: float | None
    subsequent: float | None
    sections: Mapping[str, float | None]
    out_of_section: float | None
    learned: frozenset[str] = frozenset()

    @classmethod
    def configured(cls, settings: MonitorSettings) -> WatchLimits:
        """Returns the limits with which a cycle begins."""
        return cls(
            settings.initial_rank_heartbeat_timeout,
            settings.rank_heartbeat_timeout,
            dict(settings.rank_section_timeouts),
            settings.rank_out_of_section_timeout,
        )

    @classmethod
    def of_message(cls, message: LimitsSet) -> WatchLimits:
        """Returns the limits that the training has sent.

        Raises:
            ProtocolError: a limit is not a finite number above zero.
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
        """The largest limit of all; None when there is none. A rank that is cut off is judged by it."""
        return max(self._all(), default=None)

    @functools.cached_property
    def max_delay_ns(self) -> int:
        """For how many nanoseconds a message may stay unread without harm to any limit."""
        return min([MAX_UNREAD_NS, *(nanoseconds(value) // _PARTS for value in self._all())])

    def _all(self) -> list[float]:
        candidates = (self.initial, self.subsequent, self.out_of_section, *self.sections.values())
        return [value for value in candidates if value is not None]


def _checked(name: str, value: object) -> float | None:
    """Returns a limit that a rank has sent. Raises ProtocolError: it is neither None nor a finite number above zero."""
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
    """Returns a duration in seconds as whole nanoseconds, for arithmetic with moments. Cut at `MAX_LIMIT_S`."""
    return round(min(seconds, MAX_LIMIT_S) * NS_PER_S)


@dataclass(frozen=True)
class Deadline:
    """A moment by which something must have happened, and the limit from which it follows.

    Attributes:
        limit: the name of the limit, as `Verdict` has it.
        limit_s: its length in seconds.
        since_ns: what the limit counts from: the last sign of life, the opening of the section, and so on.
        at_ns: the deadline itself: `since_ns` and `limit_s` together, and all pauses in between.
        learned: whether the limit was learned.
        section: the name of the open section that is judged. The first steps are judged by the limit of `warmup`, so
            this may differ from the name in `limit`.
        sign: what an in-process wrapper is to show, or what the launcher has found, in words.
    """

    limit: str
    limit_s: float
    since_ns: int
    at_ns: int
    learned: bool = False
    section: str = ""
    sign: str = ""


# Limit -> the line for the log, what was missed, and the setting that the limit comes from. The lines about heartbeats
# and sections are worded as NVIDIA's monitor words them: people search their logs for these.
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
    """Returns the seconds that have passed since the moment that the deadline counts from, pauses included."""
    return (now_ns - deadline.since_ns) / NS_PER_S


def line(deadline: Deadline, now_ns: int) -> str:
    """Returns the one-line form for the log, worded so that searches for NVIDIA's lines find it."""
    template, _, _ = _texts(deadline)
    waited = waited_s(deadline, now_ns)
    return template.format(waited=waited, limit=deadline.limit_s, section=deadline.section, sign=deadline.sign)


def reason(deadline: Deadline, now_ns: int) -> str:
    """Returns what was missed, for how long, by which limit and setting, and by how much: for journal and console.

    Example: `section 'step' open for 31.02 s; the limit is 30 s (rank_section_timeouts), exceeded by 1.020 s`.
    """
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
    """Returns the name of the setting that the limit comes from."""
    return _texts(deadline)[2]


def _texts(deadline: Deadline) -> tuple[str, str, str]:
    """Returns the row of `_TEXTS` for a deadline: all sections share one."""
    if deadline.limit.startswith(SECTION):
        return _TEXTS[SECTION]
    return _TEXTS[deadline.limit]
