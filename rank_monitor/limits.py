"""The limits in force for one rank: as configured, until the training sets its own. Pure.

Knows no time and no message but the one that sets limits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rank_monitor.contract.config import MonitorSettings
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.messages import LimitsSet
from rank_monitor.rest import LONGEST_NS

_PARTS = 4
_LONGEST_S = 1e9
"""Thirty years are for ever; much more is no number of nanoseconds."""


@dataclass(frozen=True)
class Limits:
    """Limits in seconds (None: no limit). `learned` names those that were learned, as in `LimitsSet`."""

    initial: float | None
    subsequent: float | None
    sections: Mapping[str, float | None]
    out_of_section: float | None
    learned: frozenset[str] = frozenset()

    @classmethod
    def configured(cls, settings: MonitorSettings) -> Limits:
        """The limits a cycle begins with."""
        return cls(
            settings.initial_rank_heartbeat_timeout,
            settings.rank_heartbeat_timeout,
            dict(settings.rank_section_timeouts),
            settings.rank_out_of_section_timeout,
        )

    @classmethod
    def of_message(cls, message: LimitsSet) -> Limits:
        """The limits the training set.

        Raises:
            ProtocolError: one of them is no number above zero.
        """
        return cls(
            _checked("initial", message.initial),
            _checked("subsequent", message.subsequent),
            {name: _checked(name, value) for name, value in message.sections.items()},
            _checked("out_of_section", message.out_of_section),
            frozenset(message.learned),
        )

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Limits:
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
    def patience_ns(self) -> int:
        """How long it makes no difference to any limit if a message is read later than it came, in nanoseconds."""
        return min([LONGEST_NS, *(nanoseconds(value) // _PARTS for value in self._all())])

    def _all(self) -> list[float]:
        candidates = (self.initial, self.subsequent, self.out_of_section, *self.sections.values())
        return [value for value in candidates if value is not None]


def _checked(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ProtocolError(f"limits: {name!r} is no number")
    try:
        if math.isfinite(value) and value > 0:
            return float(value)
    except OverflowError:
        pass
    raise ProtocolError(f"limits: {name!r} must be a finite number above zero")


def nanoseconds(seconds: float) -> int:
    """A duration for arithmetic with moments."""
    return round(min(seconds, _LONGEST_S) * 1e9)
