"""Adds up how long sections took, beside the limits that watch them, and judges how well the limits fit. Pure.

`collection.py` fills a `SectionLimits`; `advice.py` and `terminal_text.py` read the result. Durations come from the
events `ledger`, which have those of one rank of each node, cycle by cycle; they become one histogram for each section.
Limits come from the settings (`job_start`), then from `limits`, which a training sets or learns. What a limit did is in
`verdict` and `interruption`.

One entry is no section: `PRINTED_STEP`, the time from one step that a rank printed to the next. Its durations come from
`printed_steps`, its limit is `log`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ft_launcher.record.ledger.account import PRINTED_STEP, durations_of
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire.rank_times import STEP, Durations

FEWEST_TIMES = 100
"""With fewer occurrences nothing is said of a limit. Where 100 were seen and none was longer, 3 % may still be longer
(the rule of three)."""
_FEWEST_FOR_P999 = 1000
"""Occurrences below which there is no 99.9th percentile."""
_SAFETY, _FLOOR_S = MonitorSettings().safety_factor, MonitorSettings().learned_limit_floor
"""A proposed limit is made as a learned limit is: the longest observed time, times the safety factor, and not below the
floor."""
_IS_LONG = 2.0
"""A limit of so many times the proposed one is called long."""
_IS_TIGHT = 1.5
"""A limit below so many times the longest observed time is called tight."""
_MAX_NAMES = 256
"""Sections that are kept, and limits: a training may make names as it likes."""
_SECTION, _LOG = "section:", "log"
"""How limits are named in events: the first begins the name of a section's limit."""
_NS_PER_S = 1e9


class LimitFit(str, Enum):
    """How a limit fits what was observed. The values are words of the report."""

    __str__ = str.__str__

    TOO_FEW = "seen too few times to say"
    UNWATCHED = "no limit"
    TIGHT = "tight"
    LONG = "long"
    GOOD = "fits"


@dataclass(frozen=True)
class WatchedSection:
    """A section, or `PRINTED_STEP`: how long it took, and its limit.

    Attributes:
        times: how often it occurred, on one rank of each node.
        p999_s: what 99.9 % of the occurrences took at most, up to 41 % too high; None: fewer than 1,000, or not known.
        max_s: the longest occurrence (seconds).
        limit_s: None: no limit watches it.
        learned: whether the limit was learned.
        fired: in how many cycles the limit ended or interrupted a rank.
    """

    name: str
    times: int
    p999_s: float | None
    max_s: float
    limit_s: float | None
    learned: bool
    fired: int

    @property
    def proposed_s(self) -> float:
        """A limit that would not have fired, with the margin of learned limits (seconds)."""
        return max(_FLOOR_S, _SAFETY * self.max_s)

    @property
    def fit(self) -> LimitFit:
        """How the limit fits. Too few occurrences say nothing, whatever the limit is."""
        if self.times < FEWEST_TIMES:
            return LimitFit.TOO_FEW
        if self.limit_s is None:
            return LimitFit.UNWATCHED
        if self.limit_s < _IS_TIGHT * self.max_s:
            return LimitFit.TIGHT
        if self.limit_s > _IS_LONG * self.proposed_s:
            return LimitFit.LONG
        return LimitFit.GOOD


@dataclass(frozen=True)
class _Limit:
    """A limit, and since when it holds. `limit_s` is None where a limit was taken away."""

    t: float
    limit_s: float | None
    learned: bool


_NO_LIMIT = _Limit(0.0, None, False)


class SectionLimits:
    """Adds up events about sections and limits: one histogram, one limit and a count of firings for each section."""

    def __init__(self) -> None:
        self._durations: dict[str, Durations] = {}
        self._latest: dict[Hashable, tuple[float, Mapping[str, Any]]] = {}
        self._limits: dict[str, _Limit] = {}
        self._fired: set[tuple[str, Hashable]] = set()

    def ledger(self, launch: Hashable, since: float, facts: Mapping[str, Any]) -> None:
        """Notes an event `ledger` of a launch, about a part of time that begins at `since`.

        The ledger of a cycle that runs is written every ten minutes, each time with all durations so far. So an event
        is only kept here, and counted when the next part begins or the launch ends.
        """
        known = self._latest.get(launch)
        if known is not None and known[0] < since:
            self._fold(known[1])
        # Its durations are read when it is known to be the last ledger of its part.
        self._latest[launch] = (since, {"durations": facts.get("durations")})

    def ended(self, launch: Hashable) -> None:
        """Notes that no more events of a launch follow."""
        known = self._latest.pop(launch, None)
        if known is not None:
            self._fold(known[1])

    def limits(self, t: float, facts: Mapping[str, Any]) -> None:
        """Notes the limits in an event `limits` or `job_start` that was written at `t`. The latest of all nodes
        counts."""
        sections, learned = facts.get("sections"), facts.get("learned")
        if not isinstance(learned, list):
            learned = []
        if isinstance(sections, Mapping):
            for name, limit_s in sections.items():
                self._limit(t, name, limit_s, _SECTION + name in learned)
        if _LOG in facts:
            self._limit(t, PRINTED_STEP, facts[_LOG], False)

    def printed(self, facts: Mapping[str, Any]) -> None:
        """Adds the durations in an event `printed_steps`."""
        self._fold(facts)

    def fired(self, cycle: Hashable, limit: str) -> None:
        """Notes that a limit ended or interrupted a rank in a cycle. A limit that is not of a section is left out."""
        if limit == _LOG:
            name = PRINTED_STEP
        elif limit.startswith(_SECTION):
            name = limit.removeprefix(_SECTION)
        else:
            return
        if len(self._fired) < _MAX_NAMES * _MAX_NAMES:
            self._fired.add((name, cycle))

    def watched(self) -> list[WatchedSection]:
        """Returns the sections that occurred: first those with limits, then `step`, then the most frequent.

        Called once, when all events have been added.
        """
        for launch in list(self._latest):
            self.ended(launch)
        sections = [self._section(name, durations) for name, durations in self._durations.items()]
        return sorted(sections, key=lambda known: (known.limit_s is None, known.name != STEP, -known.times, known.name))

    def _section(self, name: str, durations: Durations) -> WatchedSection:
        """Returns what is known of one section."""
        p999_ns = None
        if durations.count >= _FEWEST_FOR_P999:
            p999_ns = durations.quantile_ns(0.999)
        limit = self._limits.get(name, _NO_LIMIT)
        return WatchedSection(
            name=name,
            times=durations.count,
            p999_s=None if p999_ns is None else p999_ns / _NS_PER_S,
            max_s=durations.longest_ns / _NS_PER_S,
            limit_s=limit.limit_s,
            learned=limit.learned,
            fired=sum(known == name for known, _ in self._fired),
        )

    def _limit(self, t: float, name: str, limit_s: object, is_learned: bool) -> None:
        """Notes the limit of a section; any other value than a number of seconds means that the section has no
        limit."""
        known = self._limits.get(name)
        if known is None and len(self._limits) >= _MAX_NAMES:
            return
        if known is not None and t < known.t:
            return
        # The comparison also refuses NaN and infinity.
        if isinstance(limit_s, (int, float)) and not isinstance(limit_s, bool) and 0 < limit_s < 1e9:
            self._limits[name] = _Limit(t, float(limit_s), is_learned)
        else:
            self._limits[name] = _Limit(t, None, False)

    def _fold(self, facts: Mapping[str, Any]) -> None:
        """Adds durations to the histograms, as an event has them."""
        for name, more in durations_of(facts).items():
            known = self._durations.get(name)
            if known is not None:
                known.extend(more)
            elif len(self._durations) < _MAX_NAMES:
                self._durations[name] = more
