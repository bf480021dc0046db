"""The time ledger of one rank in one cycle as it goes from its monitor to the launcher: plain JSON, checked. Pure.

`rank_monitor/time_ledger.py` keeps the ledger and explains how the account is made. The launcher keeps the last copy
(`node/monitors/rank_report.py`), and sends it to the monitor that takes the place of a lost one.
`ft_launcher/record/ledger/` adds up the cycles, each with the ledger of one rank, which stands for all. A rank can
write whatever it likes into a field, so `rank_times` checks all of them.

Moments and durations are whole nanoseconds, so that the parts add up exactly. Moments are of CLOCK_MONOTONIC of the
rank's machine.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.wire.messages import NO_ITERATION

STEP = "step"
SAVE_SECTIONS = frozenset({"checkpointing", "checkpoint", "checkpoint_save", "save"})
"""Sections at whose end the training's state is saved."""
OTHERS = "(others)"
"""The name under which sections count that are too many, or whose names are too long."""
MAX_NAMES = 64
"""Sections with a name of their own; the programs that we know have fewer than ten."""
MAX_NAME_BYTES = 64
"""Of a name as JSON. With 64 names of this length, a ledger takes 40 KB at most, and one message holds 60 KB."""
MAX_POINTS = 256
"""Points that are kept; where there are more, every other one goes."""
UNKNOWN = -2
"""In the place of `RankTimes.resumed`: not known. There -1 is known: nothing was done before iteration 0. In
`iteration` and `saved`, -1 itself says that none is known."""
NO_STEP = -1
"""In the place of `RankTimes.waited_ns`: the rank is not watched, and no step is expected of it."""
GAP_WINDOW = 1000
"""Steps among which the longest gap is sought. An evaluation or a checkpoint outside of all sections is to be among
them, and few trainings make one more rarely."""
MAX_BUCKETS_IN_ALL = 1024
"""Buckets of all histograms together that are sent: 10 KB. The durations of one section fall into a few of its 64."""
_MAX_NUMBER = 2**63

BUCKETS = 64
BOUNDS_NS = tuple(round(1e9 * 2 ** (half / 2)) for half in range(-32, 31))
"""Upper bounds of all buckets but the last: from 15 us to 9 h, each higher than the one before by a factor of the
square root of 2. So a quantile that is read off the histogram is at most 41 % too high."""


class Outside(str, Enum):
    """What the time is in which no section is open."""

    STARTING = "starting"
    """Before the watch began, from the rank's first message on."""
    PREPARING = "preparing"
    """Watched; no step has begun since the start of the process, or since the last restart in process."""
    BETWEEN = "between"
    """Between steps, and after the last."""
    FINALIZING = "finalizing"
    """After an interruption, until the wrapper's finalize and health check are done."""
    RESTARTING = "restarting"
    """From then until the wrapped function is called again."""
    STALLED = "stalled"
    """From the last sign of progress before an interruption until it."""
    EXCLUDED = "excluded"
    """The machine stood still, or the monitor did while its rank reported nothing."""

    __str__ = str.__str__


@dataclass
class Durations:
    """How often something occurred and how long it took. Sent as a list of its numbers, in the order of the fields.

    Attributes:
        count: whole occurrences.
        exclusive_ns: the time in which no section was open that was opened later. It includes the time of an occurrence
            that has not ended, unlike all other fields.
        first_ns: the first occurrence, which is often the longest by far; the fields below leave it out.
        least_ns, most_ns, sum_ns: the shortest and the longest occurrence, and all of them together.
        buckets: their histogram.
    """

    count: int = 0
    exclusive_ns: int = 0
    first_ns: int = 0
    least_ns: int = 0
    most_ns: int = 0
    sum_ns: int = 0
    buckets: dict[int, int] = field(default_factory=dict)
    """Number of the bucket -> occurrences in it."""

    def add(self, duration_ns: int, times: int = 1) -> None:
        """Counts an occurrence of this length, or `times` of them."""
        self.count += times
        if self.count == times:
            self.first_ns = duration_ns
            times -= 1
        if times:
            self.least_ns = min(self.least_ns or duration_ns, duration_ns)
            self.most_ns = max(self.most_ns, duration_ns)
            self.sum_ns += duration_ns * times
            bucket = bisect_left(BOUNDS_NS, duration_ns)
            self.buckets[bucket] = self.buckets.get(bucket, 0) + times

    @property
    def whole_ns(self) -> int:
        """All occurrences together, the first included."""
        return self.first_ns + self.sum_ns

    @property
    def longest_ns(self) -> int:
        """The longest of all occurrences, the first included."""
        return max(self.first_ns, self.most_ns)

    def quantile_ns(self, share: float) -> int | None:
        """Returns what this share (0 to 1) of all occurrences took at most, up to 41 % too high; None: there was none,
        or the histogram was left out."""
        if not self.count or sum(self.buckets.values()) != self.count - 1:
            return None
        first = bisect_left(BOUNDS_NS, self.first_ns)
        missing = max(1, math.ceil(self.count * share))
        for bucket, bound_ns in enumerate(BOUNDS_NS):
            missing -= self.buckets.get(bucket, 0)
            if bucket == first:
                missing -= 1
            if missing <= 0:
                return min(bound_ns, self.longest_ns)
        return self.longest_ns

    def merged(self, other: Durations) -> Durations:
        """Returns the durations of `self` and `other` together. The first one is that of `self`, if it has any."""
        earlier, later = self, other
        if not self.count:
            earlier, later = other, self
        joint = replace(earlier, buckets=dict(earlier.buckets))
        joint.extend(later)
        return joint

    def extend(self, later: Durations) -> None:
        """Appends the durations of `later`, which must begin after the last duration of `self`."""
        self.exclusive_ns += later.exclusive_ns
        if not later.count:
            return
        self.add(later.first_ns)
        self.count += later.count - 1
        self.least_ns = min(self.least_ns, later.least_ns or self.least_ns)
        self.most_ns = max(self.most_ns, later.most_ns)
        self.sum_ns += later.sum_ns
        for bucket, count in later.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count


@dataclass
class RankTimes:
    """The ledger of one rank. The time from `since_ns` to `at_ns` is partitioned over `step`, `sections` and `outside`.

    The time after that is known only in part: from `at_ns`, the last change that the rank reported, to `now_ns` the
    rank was in `tail`, as far as it has reported.

    Attributes:
        since_ns: the rank's first message.
        at_ns: the last change.
        now_ns: when this was written.
        tail: the section, or the value of `Outside`, to which the time after `at_ns` belongs; `tail_is_section` says
            which.
        pause: a pause after `at_ns`, from and until; two zeros: there is none.
        step: of section `step`; where that is not used, from one reported iteration to the next.
        by_iterations: section `step` is not used, and time outside of all sections is time of steps.
        sections: all other sections.
        outside: by the values of `Outside`.
        open: the open sections, each with the moment it was opened.
        attached: the training is watched, or was.
        iteration: the last one known; -1: none.
        resumed: the iteration that was complete when this process began to train, or `UNKNOWN`.
        progress_ns: when the last step was done; 0: none was.
        first_done_ns: when the first step was done; 0: none was.
        first_step_ns: the time of steps until then.
        lost_ns: time of steps that were done again after a restart in process, in `step`, too.
        points: iteration, and time of steps that count until it was reached.
        saved: the iteration at the end of the last section that saves; -1: unknown.
        saved_ns: time of steps that count until then; -1: nothing was saved.
        waited_ns: how long the rank has been without a finished step at `at_ns`, without the time in other sections and
            in pauses; `NO_STEP`: none is expected of it.
        gap_ns: the longest time from one step to the next in the window of `GAP_WINDOW` steps that goes on, counted as
            `waited_ns`; without the first step.
        gap_before_ns: the longest in the window before.
        gap_window: the number of the step with which the present window began.
    """

    since_ns: int = 0
    at_ns: int = 0
    now_ns: int = 0
    tail: str = Outside.STARTING.value
    tail_is_section: bool = False
    pause: tuple[int, int] = (0, 0)
    step: Durations = field(default_factory=Durations)
    by_iterations: bool = False
    sections: dict[str, Durations] = field(default_factory=dict)
    outside: dict[str, int] = field(default_factory=dict)
    open: dict[str, int] = field(default_factory=dict)
    attached: bool = False
    iteration: int = NO_ITERATION
    resumed: int = UNKNOWN
    progress_ns: int = 0
    first_done_ns: int = 0
    first_step_ns: int = 0
    lost_ns: int = 0
    points: list[tuple[int, int]] = field(default_factory=list)
    saved: int = NO_ITERATION
    saved_ns: int = -1
    waited_ns: int = NO_STEP
    gap_ns: int = 0
    gap_before_ns: int = 0
    gap_window: int = 0

    @property
    def longest_gap_ns(self) -> int:
        """The longest time from one step to the next among the last `GAP_WINDOW` steps, and up to as many before."""
        return max(self.gap_ns, self.gap_before_ns)

    def add_gap(self, gap_ns: int) -> None:
        """Notes how long it took from one step to the next. A window that is full becomes the window before."""
        if self.step.count >= self.gap_window + GAP_WINDOW:
            self.gap_window = self.step.count
            self.gap_before_ns, self.gap_ns = self.gap_ns, 0
        self.gap_ns = max(self.gap_ns, gap_ns)

    @property
    def known_ns(self) -> int:
        """The sum of all parts: `at_ns` - `since_ns`."""
        parts = sum(self.outside.values()) + sum(section.exclusive_ns for section in self.sections.values())
        return parts + self.step.exclusive_ns

    @property
    def place(self) -> Outside:
        """What the time is, at the end of this ledger, in which no section is open. A monitor that takes over a rank
        goes on with it."""
        if not self.tail_is_section:
            return Outside(self.tail)
        if self.step.count or STEP in self.open:
            return Outside.BETWEEN
        if self.attached:
            return Outside.PREPARING
        return Outside.STARTING

    def section(self, name: str) -> Durations:
        """Returns the durations of a section, to be added to; those of `OTHERS` where it has no name of its own."""
        if name == STEP:
            return self.step
        found = self.sections.get(name)
        if found is None:
            found = self.sections.setdefault(self.counts_as(name), Durations())
        return found

    def counts_as(self, name: str) -> str:
        """Returns the name under which a section counts."""
        if name == STEP or name in self.sections:
            return name
        # Two bytes are the quotes.
        if len(self.sections) >= MAX_NAMES or len(json.dumps(name)) > MAX_NAME_BYTES + 2:
            return OTHERS
        return name

    def add_point(self, iteration: int, counted_ns: int) -> None:
        """Adds to `points`, unless one of this iteration, or of a later one, is there already."""
        if self.points and iteration <= self.points[-1][0]:
            return
        self.points.append((iteration, counted_ns))
        if len(self.points) > MAX_POINTS:
            # Every other point goes, but not the newest: what is lost at a fault is near the end.
            del self.points[1:-1:2]

    def json(self) -> dict[str, Any]:
        """Returns JSON values of bounded size. Histograms beyond `MAX_BUCKETS_IN_ALL` are left out; those of the
        sections with most time stay."""
        values = dict(vars(self))
        left = MAX_BUCKETS_IN_ALL - len(self.step.buckets)
        values["sections"] = {}
        for name, section in sorted(self.sections.items(), key=lambda item: -item[1].exclusive_ns):
            left -= len(section.buckets)
            values["sections"][name] = _packed(section, with_buckets=left >= 0)
        values["step"] = _packed(self.step, with_buckets=True)
        values["points"] = [number for point in self.points for number in point]
        values["pause"] = list(self.pause)
        return values


def _packed(durations: Durations, with_buckets: bool) -> list[int]:
    """Returns the numbers in the order of the fields, then the number of each bucket and its occurrences."""
    *numbers, buckets = vars(durations).values()
    if with_buckets:
        numbers += [number for item in sorted(buckets.items()) for number in item]
    return numbers


def rank_times(values: Mapping[str, Any]) -> RankTimes:
    """Returns the ledger in JSON values. They come from a monitor of ours, but hold a rank's words.

    Raises:
        ProtocolError: the values are no ledger: a field is missing, is unknown, or does not fit, a number is out of
            range, or there are more names, points or buckets than a ledger has.
    """
    template = vars(RankTimes())
    if values.keys() != template.keys():
        raise ProtocolError(f"a time ledger with the fields {', '.join(sorted(map(str, values)))[:200]}")
    found: dict[str, Any] = {}
    for name, default in template.items():
        value = values[name]
        if isinstance(default, bool):
            fits = type(value) is bool
        elif isinstance(default, int):
            fits = _is_number(value, least=UNKNOWN)
        elif isinstance(default, str):
            fits = type(value) is str and len(value) <= MAX_NAME_BYTES
        elif isinstance(default, dict):
            fits = _are_named(value)
        else:
            fits = _are_numbers(value)
        if not fits:
            raise ProtocolError(f"a time ledger: {name!r} does not fit")
        found[name] = value
    found["step"] = _unpacked(values["step"])
    found["sections"] = {name: _unpacked(numbers) for name, numbers in values["sections"].items()}
    for name in ("outside", "open"):
        if not all(_is_number(value) for value in values[name].values()):
            raise ProtocolError(f"a time ledger: {name!r} does not fit")
    places = {place.value for place in Outside}
    if values["outside"].keys() - places or not (values["tail_is_section"] or values["tail"] in places):
        raise ProtocolError("a time ledger: an unknown place outside of sections")
    points = values["points"]
    if len(points) > 2 * MAX_POINTS or len(points) % 2 or len(values["pause"]) != 2:
        raise ProtocolError("a time ledger: its points or its pause do not fit")
    found["points"] = list(zip(points[::2], points[1::2], strict=True))
    found["pause"] = tuple(values["pause"])
    return RankTimes(**found)


def _is_number(value: object, least: int = 0) -> bool:
    """Whether a JSON value is a whole number of 64 bits, not below `least`."""
    # Not `isinstance`, by which a bool is an int.
    return type(value) is int and least <= value < _MAX_NUMBER


def _are_named(value: object) -> bool:
    if not isinstance(value, dict) or len(value) > MAX_NAMES + 1:
        return False
    return all(type(name) is str and len(name) <= MAX_NAME_BYTES for name in value)


def _are_numbers(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(_is_number(number, least=-1) for number in value)


def _unpacked(numbers: object) -> Durations:
    """Returns the durations that `_packed` made. Raises ProtocolError: they are not such a list."""
    if not isinstance(numbers, list) or not _are_numbers(numbers) or not 6 <= len(numbers) <= 6 + 2 * BUCKETS:
        raise ProtocolError("a time ledger: durations do not fit")
    buckets = dict(zip(numbers[6::2], numbers[7::2], strict=False))
    if any(number < 0 for number in numbers) or any(bucket >= BUCKETS for bucket in buckets):
        raise ProtocolError("a time ledger: durations do not fit")
    count, exclusive_ns, first_ns, least_ns, most_ns, sum_ns = numbers[:6]
    return Durations(count, exclusive_ns, first_ns, least_ns, most_ns, sum_ns, buckets)


def time_until(points: Sequence[tuple[int, float]], iteration: int) -> float:
    """Returns the time of steps that had passed when an iteration was reached; between two points in proportion.

    Before the first point the result is 0, since none of those steps counts. After the last point it is the time of the
    last point. The unit is that of the points.
    """
    if not points or iteration < points[0][0]:
        return 0.0
    after = bisect_right(points, iteration, key=lambda point: point[0])
    if after == len(points):
        return points[-1][1]
    (low, before_s), (high, after_s) = points[after - 1], points[after]
    return before_s + (after_s - before_s) * (iteration - low) / (high - low)
