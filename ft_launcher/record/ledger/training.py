"""The time of one cycle's ranks, from their start to the end of their stop, by category. Pure.

All ranks of a training take their steps together, so one rank's ledger stands for the node. It is exact until the last
change that the rank reported; what follows is divided by what the agent saw of the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ft_launcher.record.ledger.account import Category, CycleTimes, add, category_of, thinned
from ft_launcher.record.ledger.stall import stall_of
from rank_monitor.contract.wire.messages import NO_ITERATION
from rank_monitor.contract.wire.rank_times import SAVE_SECTIONS, STEP, UNKNOWN, Outside, RankTimes

NS_PER_S = 1e9


@dataclass(frozen=True)
class RanksRan:
    """When the ranks of a cycle ran (monotonic seconds).

    Attributes:
        started: they were started.
        over: the agent learned that the cycle is over.
        stopped: they had ended.
        failed: when the fault began, as far as is known; None: the cycle did not end by a fault.
    """

    started: float
    over: float
    stopped: float
    failed: float | None = None


@dataclass(frozen=True)
class Training:
    """What a cycle's ranks did with their time.

    Attributes:
        times: as the part of the job's time from their start to the end of their stop (monotonic seconds).
        first_sign_s: from the start of the ranks to the first message of one; None: none came.
        first_step_s: from then until the first step was done; None: none was.
    """

    times: CycleTimes
    first_sign_s: float | None = None
    first_step_s: float | None = None


def training(ran: RanksRan, times: RankTimes | None, goes_on: bool = False) -> Training:
    """Divides the time in which a cycle's ranks ran.

    Args:
        times: the ledger of one of them; None: no rank was watched, and nothing is known of the time before the end.
        goes_on: the rank runs, and is taken to be where it was at the end of the ledger until `ran.stopped`.
    """
    # Moments of several sources: the end of a cycle may be told later than the next part begins.
    ran = replace(ran, over=_between(ran.over, ran.started, ran.stopped))
    if times is None or not times.since_ns:
        return Training(CycleTimes(None, ran.started, ran.stopped, _without_ledger(ran)))
    since = _between(times.since_ns / NS_PER_S, ran.started, ran.stopped)
    at = _between(times.at_ns / NS_PER_S, since, ran.stopped)
    now = _between(times.now_ns / NS_PER_S, at, ran.stopped)
    if goes_on:
        now = ran.stopped
    seconds: dict[str, float] = {}
    add(seconds, Category.LAUNCH, since - ran.started)
    _add_known(seconds, times, at - since)
    known_steps_s = seconds.get(Category.STEP, 0.0)
    _add_tail(seconds, times, ran, at, now)
    _add_end(seconds, ran, now)
    warmup_s = min(_first_step_excess_s(times), known_steps_s)
    _divide_steps(seconds, ran, times.lost_ns / NS_PER_S, warmup_s, known_steps_s)
    points = [(iteration, max(0.0, spent_ns / NS_PER_S - warmup_s)) for iteration, spent_ns in times.points]
    found = CycleTimes(
        cycle=None,
        since=ran.started,
        until=ran.stopped,
        seconds=seconds,
        steps=times.step.count,
        iteration=_known(times.iteration, NO_ITERATION),
        resumed=_known(times.resumed, UNKNOWN),
        points=thinned(points),
        saved=_known(times.saved, NO_ITERATION),
        saved_s=None if times.saved_ns < 0 else max(0.0, times.saved_ns / NS_PER_S - warmup_s),
        # A section that saves may hold another one: both are of one checkpoint.
        saves=max((times.sections[name].count for name in SAVE_SECTIONS & times.sections.keys()), default=0),
        durations={name: known for name, known in {STEP: times.step, **times.sections}.items() if known.count},
    )
    first_step_s = None
    if times.first_done_ns:
        first_step_s = max(0.0, times.first_done_ns / NS_PER_S - since)
    return Training(found, since - ran.started, first_step_s)


def _between(moment: float, earliest: float, latest: float) -> float:
    return min(max(moment, earliest), latest)


def _known(iteration: int, unknown: int) -> int | None:
    if iteration == unknown:
        return None
    return iteration


def _without_ledger(ran: RanksRan) -> dict[str, float]:
    failed = ran.over
    if ran.failed is not None:
        failed = _between(ran.failed, ran.started, ran.over)
    seconds: dict[str, float] = {}
    add(seconds, Category.UNKNOWN, failed - ran.started)
    add(seconds, Category.DETECTION, ran.over - failed)
    add(seconds, Category.STOP, ran.stopped - ran.over)
    return seconds


def _of_outside(place: str, times: RankTimes) -> Category:
    """The category of time in which no section was open."""
    has_steps = times.step.count > 0 or times.step.exclusive_ns > 0
    match place:
        case Outside.STARTING if not times.attached:
            return Category.UNKNOWN
        case Outside.STARTING | Outside.RESTARTING:
            return Category.SETUP
        case Outside.PREPARING | Outside.BETWEEN if times.by_iterations:
            return Category.STEP
        case Outside.PREPARING if has_steps:
            return Category.SETUP
        case Outside.FINALIZING:
            return Category.STOP
        case Outside.STALLED:
            return Category.DETECTION
        case Outside.EXCLUDED:
            return Category.EXCLUDED
    return Category.UNKNOWN


def _add_known(seconds: dict[str, float], times: RankTimes, spent_s: float) -> None:
    """Adds what the ledger knows: `spent_s` in all, also where its moments do not fit those of the agent."""
    if times.known_ns <= 0:
        add(seconds, Category.UNKNOWN, spent_s)
        return
    scale = spent_s / times.known_ns
    add(seconds, Category.STEP, times.step.exclusive_ns * scale)
    for name, section in times.sections.items():
        add(seconds, category_of(name), section.exclusive_ns * scale)
    for place, place_ns in times.outside.items():
        add(seconds, _of_outside(place, times), place_ns * scale)


def _add_tail(seconds: dict[str, float], times: RankTimes, ran: RanksRan, at: float, now: float) -> None:
    """Adds the time from the rank's last change to the end of its ledger.

    A step that has not ended is one until the training counts as stalled: what follows is the time in which a hang, if
    it is one, is not ended yet.
    """
    if times.tail_is_section:
        category = category_of(times.tail)
    else:
        category = str(_of_outside(times.tail, times))
    failed = over = now
    if ran.failed is not None:
        failed = _between(ran.failed, at, now)
        over = _between(ran.over, failed, now)
    stalled, stall = failed, stall_of(times)
    if stall is not None:
        stalled = _between(stall.since_ns / NS_PER_S, at, failed)
    pauses = [moment / NS_PER_S for moment in times.pause]
    for begin, end, of in ((at, stalled, category), (stalled, over, Category.DETECTION), (over, now, Category.STOP)):
        paused_s = max(0.0, min(end, pauses[1]) - max(begin, pauses[0]))
        add(seconds, Category.EXCLUDED, paused_s)
        add(seconds, of, max(0.0, end - begin - paused_s))


def _add_end(seconds: dict[str, float], ran: RanksRan, now: float) -> None:
    """Adds the time after the end of the ledger."""
    over = max(now, ran.over)
    if ran.failed is not None:
        add(seconds, Category.DETECTION, over - now)
    else:
        add(seconds, Category.STOP, over - now)
    add(seconds, Category.STOP, ran.stopped - over)


def _first_step_excess_s(times: RankTimes) -> float:
    """How much longer the first step took than the mean of the others."""
    others = times.step.count - 1
    first_ns = times.first_step_ns
    if others < 1:
        return 0.0
    spent_ns = times.step.exclusive_ns
    if times.by_iterations:
        spent_ns = times.outside.get(Outside.PREPARING, 0) + times.outside.get(Outside.BETWEEN, 0)
    return max(0.0, first_ns - max(0, spent_ns - first_ns) / others) / NS_PER_S


def _divide_steps(
    seconds: dict[str, float], ran: RanksRan, lost_s: float, warmup_s: float, known_steps_s: float
) -> None:
    """Divides the time of steps: what was done again, the first step's excess, and the step that a fault cut off."""
    spent_s = seconds.pop(Category.STEP, 0.0)
    cut_off_s = 0.0
    if ran.failed is not None:
        cut_off_s = spent_s - known_steps_s
    lost_s = min(lost_s, known_steps_s - warmup_s)
    add(seconds, Category.WARMUP, warmup_s)
    add(seconds, Category.LOST_PROGRESS, lost_s + cut_off_s)
    add(seconds, Category.STEP, max(0.0, spent_s - warmup_s - lost_s - cut_off_s))
