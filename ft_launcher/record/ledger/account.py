"""The account of a job's time: categories, what each part of the time was spent on, and which steps count. Pure.

The time of a job is cut into parts. A part begins where the ranks of the last cycle had stopped, and ends where those
of this cycle have: it contains the restart that led into the cycle, and the cycle. Each second of a part belongs to one
category (docs/operations.md explains each).

Steps count only if no later cycle does them again. Example: cycle 0 reaches iteration 120, fails, and cycle 1 resumes
at 100. The time of steps 101 to 120 of cycle 0 moves from `step` to `lost_progress`, as soon as cycle 1 says where it
resumed. `account` does this for all parts; goodput is the share of `step` in the whole.

`job_ledger.py` makes the parts while a job runs; the report reads them from journals (`cycle_times`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rank_monitor.contract.wire.rank_times import BUCKETS, MAX_NAMES, SAVE_SECTIONS, STEP, Durations, time_until

MAX_POINTS = 64
"""Points (iteration, seconds) that are kept of one cycle; 1 KB in the journal. Between two points steps are taken to be
equally long."""
PRINTED_STEP = "printed step"
"""The name of the durations between two steps that a rank prints (`--ft-watch-log`), beside the names of sections."""
_MAX_READ_POINTS = 256
_MAX_NAMES = 256
_MAX_NAME = 128
_NS_PER_S = 1e9
_MAX_DURATION_S = 1e9
_MAX_COUNT = 1 << 53
"""The largest count that is read from a journal: whole numbers up to 2**53 are exact in JSON."""


class Category(str, Enum):
    """A category of time. Beside these there is a category `custom:NAME` for each section with another name."""

    __hash__ = str.__hash__
    __str__ = str.__str__

    STEP = "step"
    LOST_PROGRESS = "lost_progress"
    CHECKPOINT_SAVE = "checkpoint_save"
    CHECKPOINT_LOAD = "checkpoint_load"
    DATA = "data"
    EVALUATION = "evaluation"
    LAUNCH = "launch"
    RENDEZVOUS = "rendezvous"
    SETUP = "setup"
    WARMUP = "warmup"
    DETECTION = "detection"
    STOP = "stop"
    HEALTH = "health"
    BACKOFF = "backoff"
    RESCHEDULE = "reschedule"
    MEMBERSHIP = "membership"
    EXCLUDED = "excluded"
    UNKNOWN = "unknown"


CUSTOM = "custom:"
_MAX_CUSTOM = 64
"""Categories `custom:NAME` in one account: as many as the ledger of one rank tells apart. Further sections share
`custom:(others)`."""
_REST = f"{CUSTOM}(others)"

_OF_SECTION = {
    STEP: Category.STEP,
    **dict.fromkeys(SAVE_SECTIONS, Category.CHECKPOINT_SAVE),
    **dict.fromkeys(("checkpoint_load", "load_checkpoint", "restore"), Category.CHECKPOINT_LOAD),
    **dict.fromkeys(("data", "dataloader", "data_loading"), Category.DATA),
    **dict.fromkeys(("evaluation", "eval", "validation"), Category.EVALUATION),
    **dict.fromkeys(("setup", "init", "initialization"), Category.SETUP),
}


def category_of(section: str) -> str:
    """Returns the category of the time in a section of this name."""
    return _OF_SECTION.get(section, CUSTOM + section)


def add(seconds: dict[str, float], category: str, spent_s: float) -> None:
    """Adds time to a category of `seconds`. Beyond 64 custom categories, new ones share one, so that an account stays
    small whatever names a program makes up."""
    if category not in seconds and category.startswith(CUSTOM):
        own = sum(name.startswith(CUSTOM) for name in seconds)
        if own >= _MAX_CUSTOM:
            category = _REST
    seconds[str(category)] = seconds.get(category, 0.0) + spent_s


@dataclass(frozen=True)
class CycleTimes:
    """What one part of a job's time was spent on. The event `ledger` of the journal has the same fields.

    Attributes:
        cycle: the cycle with whose end the part ends; None: the part is what follows the last cycle.
        since, until: begin and end (seconds since 1970).
        seconds: category -> seconds; the sum is the length of the part. Steps that later cycles did again are still in
            `step` here: `account` moves them.
        steps: how many steps were completed.
        iteration: the last iteration known; None: none was reported.
        resumed: the iteration that was complete when the ranks began to train; None: unknown.
        points: pairs of an iteration and the seconds of `step` until it was reached.
        saved: the iteration of the last checkpoint; None: unknown.
        saved_s: seconds of `step` until that checkpoint; None: nothing was saved.
        saves: how often the training has saved.
        recovery: phase -> seconds, of the recovery that led into this cycle; empty: no fault was before it.
        durations: name -> durations of `step` and of each section that occurred; empty where they are no longer kept.
    """

    cycle: int | None
    since: float
    until: float
    seconds: Mapping[str, float]
    steps: int = 0
    iteration: int | None = None
    resumed: int | None = None
    points: Sequence[tuple[int, float]] = ()
    saved: int | None = None
    saved_s: float | None = None
    saves: int = 0
    recovery: Mapping[str, float] = field(default_factory=dict)
    durations: Mapping[str, Durations] = field(default_factory=dict)


@dataclass(frozen=True)
class Account:
    """The time of a job.

    Attributes:
        seconds: category -> seconds; the sum is `wall_s`.
        wall_s: seconds from the begin of the job to its end, or until now.
        goodput: share of the time of steps that count, from 0 to 1. Steps since the last checkpoint may still be lost.
        goodput_saved: share of the time of steps that count and are saved.
        steps: how many steps were completed, counting those that were done twice as two.
    """

    seconds: Mapping[str, float]
    wall_s: float
    goodput: float
    goodput_saved: float
    steps: int


def account(parts: Sequence[CycleTimes], stages: Sequence[int] = (), shares: Sequence[float] = ()) -> Account:
    """Adds up the parts of a job's time, and settles which steps count.

    Args:
        parts: in the order of time.
        stages: for each part the number of its cycle among all cycles of the job. Two nodes may report parts of one
            cycle, which then have the same number. Empty: each part is of a cycle of its own.
        shares: for each part the share of it that is counted, from 0 to 1; empty: all of each.
    """
    stages = stages or range(len(parts))
    shares = shares or [1.0] * len(parts)
    seconds: dict[str, float] = {}
    saved_s = 0.0
    steps = 0.0
    for part, (kept_s, part_saved_s), share in zip(parts, _kept(parts, stages), shares, strict=True):
        step_s = part.seconds.get(Category.STEP, 0.0)
        for category, spent_s in part.seconds.items():
            if category != Category.STEP:
                add(seconds, category, spent_s * share)
        add(seconds, Category.STEP, kept_s * share)
        add(seconds, Category.LOST_PROGRESS, (step_s - kept_s) * share)
        saved_s += part_saved_s * share
        steps += part.steps * share
    wall_s = math.fsum(seconds.values())
    counted_s = seconds.get(Category.STEP, 0.0)
    return Account(seconds, wall_s, _share(counted_s, wall_s), _share(saved_s, wall_s), round(steps))


def _share(part_s: float, whole_s: float) -> float:
    if whole_s <= 0:
        return 0.0
    return min(1.0, part_s / whole_s)


def _kept(parts: Sequence[CycleTimes], stages: Sequence[int]) -> list[tuple[float, float]]:
    """Returns, for each part, the seconds of steps that count, and how many of these are saved.

    Goes from the last cycle to the first: what counts of a cycle depends on the earliest iteration at which any later
    cycle resumed.
    """
    found = [(0.0, 0.0)] * len(parts)
    limit: int | None = None
    is_followed = False
    by_stage: dict[int, list[int]] = {}
    for index, stage in enumerate(stages):
        by_stage.setdefault(stage, []).append(index)
    for stage in sorted(by_stage, reverse=True):
        of_stage = by_stage[stage]
        for index in of_stage:
            found[index] = _kept_of(parts[index], limit, is_followed)
        trained = [parts[index] for index in of_stage if parts[index].steps]
        resumed = [part.resumed for part in trained if part.resumed is not None]
        is_followed = is_followed or bool(trained)
        if resumed:
            limit = min(resumed) if limit is None else min(limit, *resumed)
    return found


def _kept_of(part: CycleTimes, limit: int | None, is_followed: bool) -> tuple[float, float]:
    """Returns, for one part, the seconds of steps that count, and how many of these are saved.

    Args:
        limit: the earliest iteration at which a later cycle resumed; None: unknown, or none did.
        is_followed: a later cycle trained, so that steps of this one may have been done again.
    """
    step_s = part.seconds.get(Category.STEP, 0.0)
    saved_s = min(step_s, part.saved_s or 0.0)
    if not is_followed:
        return step_s, saved_s
    if limit is not None and part.points:
        kept_s = min(step_s, time_until(part.points, limit))
    elif part.saved_s is not None:
        # Nobody reports iterations. A restart is then taken to resume at the last checkpoint.
        kept_s = saved_s
    else:
        kept_s = step_s
    return kept_s, kept_s


def steps_lost(parts: Sequence[CycleTimes]) -> int:
    """Returns how many steps later parts did again: for each part from where it resumed to what was reached before.

    Args:
        parts: in the order of time; a part without a cycle keeps what was reached before.
    """
    lost, reached = 0, None
    for part in parts:
        if part.resumed is not None and reached is not None:
            lost += max(0, reached - part.resumed)
        if part.iteration is not None:
            reached = part.iteration
    return lost


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns at most `MAX_POINTS` of these points: every second one between the first and the last is left out, as
    often as needed."""
    found = list(points)
    while len(found) > MAX_POINTS:
        del found[1:-1:2]
    return found


def cycle_times(line: Mapping[str, Any]) -> CycleTimes | None:
    """Returns the part in an event `ledger` of a journal, without its durations; None: the event cannot be one of ours.

    Anyone may have written that file, so each field is checked: types, finite numbers, sizes.

    Args:
        line: the fields of the event.
    """
    seconds, points, recovery = line.get("seconds"), line.get("points", []), line.get("recovery", {})
    numbers = [line.get(name) for name in ("cycle", "iteration", "resumed", "saved")]
    fits = (
        _are_seconds(seconds)
        and _are_seconds(recovery)
        and all(number is None or type(number) is int for number in numbers)
        and all(_is_real(line.get(name)) for name in ("since", "until"))
        and all(type(line.get(name, 0)) is int for name in ("steps", "saves"))
        and (line.get("saved_s") is None or _is_real(line.get("saved_s")))
        and _are_points(points)
    )
    if not fits or line["until"] < line["since"]:
        return None
    known: dict[str, Any] = {name: line.get(name) for name in ("cycle", "iteration", "resumed", "saved", "saved_s")}
    in_order: list[tuple[int, float]] = sorted(map(tuple, points))
    return CycleTimes(
        since=line["since"],
        until=line["until"],
        seconds=dict(seconds or {}),
        steps=line.get("steps", 0),
        saves=line.get("saves", 0),
        points=in_order,
        recovery=dict(recovery),
        **known,
    )


def part_as_json(part: CycleTimes, account: Account) -> dict[str, Any]:
    """Returns the fields of the event `ledger` but for `has_ended`: a part, and the account of the job until its end.

    Times are rounded to whole microseconds.
    """
    facts = {name: _rounded(value) for name, value in vars(part).items()}
    return facts | {
        "seconds": seconds_as_json(part.seconds),
        "durations": durations_as_json(part.durations),
        "total": seconds_as_json(account.seconds),
        "goodput": round(account.goodput, 6),
        "goodput_saved": round(account.goodput_saved, 6),
    }


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return round(value, 6)
        case Mapping():
            return {key: _rounded(part) for key, part in value.items()}
        case list() | tuple():
            return [_rounded(part) for part in value]
    return value


def seconds_as_json(seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns seconds by category for JSON: rounded to whole microseconds, without categories of zero seconds."""
    found = {str(category): round(spent_s, 6) for category, spent_s in seconds.items()}
    return {category: spent_s for category, spent_s in found.items() if spent_s}


def durations_as_json(durations: Mapping[str, Durations]) -> dict[str, Any]:
    """Returns durations as the event `ledger` has them: one object for each section, in seconds."""
    return {
        name: {
            "count": known.count,
            "first_s": round(known.first_ns / _NS_PER_S, 6),
            "max_s": round(known.longest_ns / _NS_PER_S, 6),
            "buckets": [[bucket, count] for bucket, count in sorted(known.buckets.items())],
        }
        for name, known in durations.items()
    }


def durations_of(line: Mapping[str, Any]) -> dict[str, Durations]:
    """Returns the durations in an event `ledger` of a journal; entries that cannot be ours are left out. The journal
    has no sums, so the sums of the result are not known."""
    values = line.get("durations")
    if not isinstance(values, dict) or len(values) > MAX_NAMES + 2:
        return {}
    found = {}
    for name, known in values.items():
        if isinstance(known, dict) and len(name) <= _MAX_NAME and _are_durations(known):
            found[name] = Durations(
                count=known["count"],
                first_ns=round(known["first_s"] * _NS_PER_S),
                most_ns=round(known["max_s"] * _NS_PER_S),
                buckets=dict(known["buckets"]),
            )
    return found


def _are_durations(known: Mapping[str, Any]) -> bool:
    count, buckets = known.get("count"), known.get("buckets")
    if type(count) is not int or not 0 < count <= _MAX_COUNT:
        return False
    if not isinstance(buckets, list) or len(buckets) > BUCKETS or not _are_buckets(buckets):
        return False
    return all(_is_real(known.get(name)) and 0 <= known[name] <= _MAX_DURATION_S for name in ("first_s", "max_s"))


def _are_buckets(values: list[Any]) -> bool:
    """Returns whether these are pairs of a bucket and a count. All are checked at once, as in `_are_points`."""
    if not values:
        return True
    if not _are_pairs(values):
        return False
    buckets: tuple[int, ...]
    counts: tuple[int, ...]
    buckets, counts = zip(*values, strict=True)
    if not set(map(type, (*buckets, *counts))) <= {int}:
        return False
    return min(buckets) >= 0 and max(buckets) < BUCKETS and min(counts) > 0 and max(counts) <= _MAX_COUNT


def _are_pairs(values: list[Any]) -> bool:
    return set(map(type, values)) <= {list} and set(map(len, values)) <= {2}


def _is_real(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _are_seconds(value: object) -> bool:
    if not isinstance(value, dict) or len(value) > _MAX_NAMES:
        return False
    if not value:
        return True
    if not (set(map(type, value)) <= {str} and set(map(type, value.values())) <= {int, float}):
        return False
    return max(map(len, value)) <= _MAX_NAME and all(map(math.isfinite, value.values())) and min(value.values()) >= 0


def _are_points(values: object) -> bool:
    """Returns whether these are pairs of an iteration and seconds. A report reads millions of pairs, so all are checked
    at once by built-in functions and not one by one."""
    if not isinstance(values, list) or len(values) > _MAX_READ_POINTS:
        return False
    if not values:
        return True
    if not _are_pairs(values):
        return False
    iterations, spent = zip(*values, strict=True)
    if not (set(map(type, iterations)) <= {int} and set(map(type, spent)) <= {int, float}):
        return False
    return all(map(math.isfinite, spent))
