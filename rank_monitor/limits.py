"""The limits in force for one rank: the configured ones, until the training sets its own. Pure.

`watch.py` uses them. Durations are seconds; the only message that is read here is `LimitsSet`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire.messages import LimitsSet

LONGEST_UNREAD_NS = 250_000_000
"""A message may stay unread for so long. A verdict is not delayed by it: the monitor reads everything before it judges.
What a rank sends to the launcher is."""
# A rank is read at least this many times within its smallest limit.
_PARTS = 4
LONGEST_S = 1e9
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

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> WatchLimits:
        """The limits of a `LimitsSet` whose fields are `values`.

        Raises:
            ProtocolError: they do not fit.
        """
        try:
            return cls.of_message(LimitsSet(**values))
        except (TypeError, AttributeError) as error:
            raise ProtocolError(f"limits: {error}") from None

    @property
    def any_section(self) -> bool:
        """Whether any section has a limit."""
        return any(value is not None for value in self.sections.values())

    @property
    def largest(self) -> float | None:
        """The largest limit of all; None when there is none."""
        return max(self._all(), default=None)

    @functools.cached_property
    def longest_delay_ns(self) -> int:
        """How long a message may stay unread without harm to any limit, in nanoseconds."""
        return min([LONGEST_UNREAD_NS, *(nanoseconds(value) // _PARTS for value in self._all())])

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
    """A duration in seconds as whole nanoseconds, for arithmetic with moments. At most `LONGEST_S`."""
    return round(min(seconds, LONGEST_S) * 1e9)
