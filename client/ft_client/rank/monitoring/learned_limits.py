"""Limits in force for this rank, and what was observed to learn them from. Pure.

A learned limit is the longest interval observed on any rank, times the safety factor, and at least the floor. Limits
have the names of `LimitsSet`: `initial`, `subsequent`, `out_of_section`, `section:NAME`.

**Sequence.** `Observed` notes the intervals of this rank at every sign of life. When the training asks for it,
`limits_in_force.py` reduces them over all ranks, makes limits of them by `learned_from`, and puts these in force
(`LearnedLimits.adopting`). The training saves them with its checkpoint (`state`) and loads them at the next start
(`learned_in`). A limit that ended a cycle is multiplied in the next one (`LimitFactors`).

Knows no clock and no process group. All this is in the client and not in the monitor: the client observes, can reduce
over ranks, and keeps the state, while a replaced monitor would have forgotten it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire.messages import LimitsSet

INITIAL, SUBSEQUENT, OUT_OF_SECTION, SECTION = "initial", "subsequent", "out_of_section", "section:"
STEP = "step"
_NS = 1e9
"""Nanoseconds of a second."""
_MAX_LIMIT_S = 1e8
"""Three years: a longer limit is a mistake."""


@dataclass(frozen=True)
class HeartbeatTimeouts:
    """Limits of heartbeats in seconds; None: no limit. A public class, with NVIDIA's names."""

    initial: float | None
    subsequent: float | None
    were_calculated: bool = False

    @property
    def are_valid(self) -> bool:
        """Whether both are set."""
        return self.initial is not None and self.subsequent is not None


@dataclass(frozen=True)
class SectionTimeouts:
    """Limits of sections in seconds; None: no limit. A public class, with NVIDIA's names."""

    section: Mapping[str, float | None]
    out_of_section: float | None
    calculated_sections: tuple[str, ...] = ()
    is_out_of_section_calculated: bool = False

    @property
    def were_calculated(self) -> bool:
        """Whether all of them were learned."""
        return self.is_out_of_section_calculated and set(self.calculated_sections) == set(self.section)

    @property
    def are_valid(self) -> bool:
        """Whether all are set."""
        return None not in (self.out_of_section, *self.section.values())


@dataclass(frozen=True)
class LearnedLimits:
    """Limits by name, in seconds (None: no limit), and which of them were learned."""

    seconds: Mapping[str, float | None] = field(default_factory=dict)
    learned: frozenset[str] = frozenset()

    @classmethod
    def configured(cls, settings: MonitorSettings) -> LearnedLimits:
        """Returns the limits with which a rank begins: those that the launcher was given."""
        seconds = {
            INITIAL: settings.initial_rank_heartbeat_timeout,
            SUBSEQUENT: settings.rank_heartbeat_timeout,
            OUT_OF_SECTION: settings.rank_out_of_section_timeout,
        }
        return cls(seconds | {SECTION + name: limit for name, limit in settings.rank_section_timeouts.items()})

    def adopting(self, learned: Mapping[str, float]) -> LearnedLimits:
        """Returns these limits, with learned ones in the place of those of the same names."""
        return replace(self, seconds={**self.seconds, **learned}, learned=self.learned | set(learned))

    def averaged(self, learned: Mapping[str, float]) -> dict[str, float]:
        """Returns new learned limits, each the mean of the new one and the one that was learned before, if there is
        one: as NVIDIA's package does."""
        before = {name: limit for name, limit in self.seconds.items() if name in self.learned and limit is not None}
        return {name: (before.get(name, value) + value) / 2 for name, value in learned.items()}

    @property
    def heartbeats(self) -> HeartbeatTimeouts:
        """The limits of heartbeats."""
        calculated = {INITIAL, SUBSEQUENT} <= self.learned
        return HeartbeatTimeouts(self.seconds.get(INITIAL), self.seconds.get(SUBSEQUENT), calculated)

    @property
    def sections(self) -> SectionTimeouts:
        """The limits of sections."""
        return SectionTimeouts(
            _sections(self.seconds),
            self.seconds.get(OUT_OF_SECTION),
            tuple(sorted(_sections(dict.fromkeys(self.learned)))),
            OUT_OF_SECTION in self.learned,
        )

    def state(self) -> dict[str, Any]:
        """Returns what `state_dict` returns: plain JSON values in NVIDIA's form. A part is there when something of it
        was learned."""
        timeouts: dict[str, Any] = {}
        if self.heartbeats.were_calculated:
            beats = self.heartbeats
            timeouts["heartbeat"] = {"initial": beats.initial, "subsequent": beats.subsequent, "were_calculated": True}
        if self.learned - {INITIAL, SUBSEQUENT}:
            sections = self.sections
            timeouts["section"] = {
                "section": dict(sections.section),
                "out_of_section": sections.out_of_section,
                "calculated_sections": list(sections.calculated_sections),
                "is_out_of_section_calculated": sections.is_out_of_section_calculated,
            }
        return {"current_timeouts": timeouts}

    def message(self) -> LimitsSet:
        """Returns the message with these limits for the monitor."""
        return LimitsSet(
            initial=self.seconds.get(INITIAL),
            subsequent=self.seconds.get(SUBSEQUENT),
            sections=_sections(self.seconds),
            out_of_section=self.seconds.get(OUT_OF_SECTION),
            learned=sorted(self.learned),
            state=self.state(),
        )


def _sections(limits: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name.removeprefix(SECTION): limit for name, limit in limits.items() if name.startswith(SECTION)}


def learned_in(state: Mapping[str, Any]) -> dict[str, float]:
    """Returns the learned limits of a `state_dict`, by name. Limits that were only configured are left out.

    Reads the states of NVIDIA's releases too.

    Raises:
        ValueError: `state` is no such state.
    """
    timeouts = _mapping(state, "current_timeouts")
    if "were_calculated" in timeouts:  # releases 0.1 and 0.2 of NVIDIA's package: limits of heartbeats, and no others
        timeouts = {"heartbeat": timeouts}
    heartbeat, section = _mapping(timeouts, "heartbeat"), _mapping(timeouts, "section")
    found: dict[str, Any] = {}
    if heartbeat.get("were_calculated"):
        found = {INITIAL: heartbeat.get("initial"), SUBSEQUENT: heartbeat.get("subsequent")}
    limits, calculated = _mapping(section, "section"), section.get("calculated_sections", [])
    if not isinstance(calculated, (list, tuple, set, frozenset)) or not all(
        isinstance(name, str) for name in calculated
    ):
        raise ValueError("calculated_sections is not a list of names")
    found |= {SECTION + name: limits.get(name) for name in calculated}
    if section.get("is_out_of_section_calculated"):
        found[OUT_OF_SECTION] = section.get("out_of_section")
    return {name: positive(name, limit) for name, limit in found.items()}


def _mapping(state: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns the mapping under a key; an empty one if the key is missing. Raises ValueError: it is something else."""
    if isinstance(state, Mapping):
        value = state.get(key, {})
        if isinstance(value, Mapping):
            return value
    raise ValueError(f"{key} is not a mapping")


def positive(name: str, value: object) -> float:
    """Returns `value` as a number above zero and at most three years.

    Raises:
        ValueError: `value` is no such number; the text has `name`.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= _MAX_LIMIT_S:
        return float(value)
    raise ValueError(f"{name} is {value!r}, not a finite number above zero, at most {_MAX_LIMIT_S:g}")


class Observed:
    """The longest intervals that this rank has observed, in nanoseconds.

    Its methods are called at every heartbeat, so they take no lock. Where two threads call at once an interval may be
    lost, which does no harm.
    """

    def __init__(self) -> None:
        self.last_sign_ns = 0
        self.got_first_sign = False
        self.initial_ns = self.subsequent_ns = self.out_of_section_ns = 0
        self.sections_ns: dict[str, int] = {}
        self.out_since_ns = 0
        self._warmup_step_ns = 0
        self._warmup_left = 0

    def begin(self, now_ns: int) -> None:
        """Begins to observe: the training asks to be watched, or goes on after an interruption."""
        self.last_sign_ns = self.out_since_ns = now_ns
        self.got_first_sign = False

    def warm_up(self, steps: int) -> None:
        """Marks the next `steps` steps as warm-up: a `step` limit is learned from them only if no other step is
        observed."""
        self._warmup_left = steps

    def sign(self, now_ns: int) -> None:
        """Notes a sign of life, and the interval since the last one."""
        gap_ns = now_ns - self.last_sign_ns
        if self.got_first_sign:
            if gap_ns > self.subsequent_ns:  # noqa: PLR1730 (a call of max takes four times as long)
                self.subsequent_ns = gap_ns
        else:
            self.got_first_sign = True
            self.initial_ns = max(self.initial_ns, gap_ns)
        self.last_sign_ns = now_ns

    def entered(self, now_ns: int) -> None:
        """Notes that a section was opened when none was open."""
        gap_ns = now_ns - self.out_since_ns
        if gap_ns > self.out_of_section_ns:  # noqa: PLR1730
            self.out_of_section_ns = gap_ns

    def left(self, now_ns: int) -> None:
        """Notes that the last open section was closed."""
        self.out_since_ns = now_ns

    def closed(self, name: str, took_ns: int) -> None:
        """Notes that a section was closed."""
        if self._warmup_left and name == STEP:
            self._warmup_left -= 1
            self._warmup_step_ns = max(self._warmup_step_ns, took_ns)
        elif took_ns > self.sections_ns.get(name, 0):
            self.sections_ns[name] = took_ns

    def longest(self) -> dict[str, float]:
        """Returns the longest intervals in seconds, by the name of the limit that is learned from each."""
        sections = self.sections_ns.copy()
        if self._warmup_step_ns:
            sections.setdefault(STEP, self._warmup_step_ns)
        found = {INITIAL: self.initial_ns, SUBSEQUENT: self.subsequent_ns, OUT_OF_SECTION: self.out_of_section_ns}
        found |= {SECTION + name: took_ns for name, took_ns in sections.items()}
        return {name: took_ns / _NS for name, took_ns in found.items() if took_ns}


def learned_from(longest: Mapping[str, float], settings: MonitorSettings) -> dict[str, float]:
    """Returns the limits that are learned from the longest intervals of all ranks, in seconds."""
    return floored({name: took_s * settings.safety_factor for name, took_s in longest.items()}, settings)


def floored(learned: Mapping[str, float], settings: MonitorSettings) -> dict[str, float]:
    """Returns learned limits, none below the floor: a limit of a fraction of a second would end at any pause."""
    return {name: max(limit, settings.learned_limit_floor) for name, limit in learned.items()}


class LimitFactors:
    """Factors for learned limits that killed a rank in the cycle before, as the launcher has passed them.

    Each factor applies to a limit that is loaded, or otherwise once to one that is learned anew, so that the same pause
    does not kill twice. Called with the limits; see `__call__`.
    """

    def __init__(self, factors: Mapping[str, float]) -> None:
        self._factors = dict(factors)
        self._applied: set[str] = set()

    def __call__(self, learned: Mapping[str, float], loaded: bool) -> tuple[dict[str, float], list[str]]:
        """Returns the limits with their factors applied, and a line for the log about each that was changed.

        Args:
            learned: limits by name, in seconds.
            loaded: they come from a state, not from intervals.
        """
        result, lines = dict(learned), []
        for name in (name for name in learned if name in self._factors and (loaded or name not in self._applied)):
            result[name] = learned[name] * self._factors[name]
            self._applied.add(name)
            lines.append(
                f"limit {name} is {result[name]:g} s instead of {learned[name]:g} s: "
                f"it ended a cycle, so it is multiplied by {self._factors[name]:g}"
            )
        return result, lines
