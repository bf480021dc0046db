"""Divides the time of one cycle's ranks, from their start to the end of their stop, into categories. Pure.

All ranks of a training take their steps together, so the ledger of one rank stands for the node. The monitor of a rank
keeps that ledger (`rank_monitor/time_ledger.py`). It is exact until the last change that the rank reported (`at_ns`).
`training` divides the whole span:

    started --launch-- since --known by the ledger-- at --tail-- now --end-- stopped
                       first sign      last change      end of the ledger

The tail is divided by what the agent saw: the time until the fault belongs to what the rank was last seen to do, the
time from the fault to the end of the cycle is `detection`, the rest is `stop`. At last the time of steps is divided:
the excess of the first step over the mean is `warmup`; steps that were done again, and the step that a fault cut off,
are `lost_progress`.

`job_ledger.py` asks `training` at the end of a cycle, and again for each status.
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
        started: when the ranks were started.
        over: when the agent learned that the cycle is over.
        stopped: when all ranks had ended.
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
        times: a part of the job's time, from the start of the ranks to the end of their stop; its begin and end are
            monotonic seconds.
        first_sign_s: seconds from the start of the ranks to the first message of a rank; None: none came.
        first_step_s: seconds from that message until the first step was done; None: no step was.
    """

    times: CycleTimes
    first_sign_s: float | None = None
    first_step_s: float | None = None


def training(ran: RanksRan, times: RankTimes | None, goes_on: bool = False) -> Training:
    """Divides the time in which a cycle's ranks ran.

    Args:
        ran: when they ran.
        times: the ledger of one of the ranks; None: no rank was watched, so the time before the end is `unknown`.
        goes_on: the rank still runs, and counts as doing until `ran.stopped` what it did at the end of its ledger.
    """
    # The moments come from agent, monitor and rank, so their order is not certain: each is limited by its neighbours.
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
        # A section that saves may contain another one that saves. Both are of one checkpoint, so only one name counts.
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
    """Returns the category of time in which no section was open.

    Args:
        place: what the rank did then, a value of `Outside`.
    """
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
    """Adds the time that the ledger knows, scaled so that it adds up to `spent_s`: the moments of the ledger may differ
    a little from those of the agent."""
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
    """Adds the time from the rank's last change to the end of its ledger: the tail.

    A step that has not ended counts as `step` until the training counts as stalled (`stall.py`). The time after that is
    `detection`: if it is a hang, nothing has ended it yet. Pauses of the machine are `excluded`.

    Args:
        at: the rank's last change.
        now: the end of the ledger.
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
    """Adds the time from the end of the ledger to the end of the ranks: `detection` after a fault until the cycle is
    over, and `stop`."""
    over = max(now, ran.over)
    if ran.failed is not None:
        add(seconds, Category.DETECTION, over - now)
    else:
        add(seconds, Category.STOP, over - now)
    add(seconds, Category.STOP, ran.stopped - over)


def _first_step_excess_s(times: RankTimes) -> float:
    """Returns how much longer the first step took than the mean of the others (seconds); 0 with fewer than two steps.

    The first step compiles, allocates and opens connections: its excess is no training.
    """
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
    """Divides the time of steps into `step`, `warmup` (the first step's excess) and `lost_progress` (steps that the
    rank did again after a restart in process, and the step that a fault cut off)."""
    spent_s = seconds.pop(Category.STEP, 0.0)
    cut_off_s = 0.0
    if ran.failed is not None:
        cut_off_s = spent_s - known_steps_s
    lost_s = min(lost_s, known_steps_s - warmup_s)
    add(seconds, Category.WARMUP, warmup_s)
    add(seconds, Category.LOST_PROGRESS, lost_s + cut_off_s)
    add(seconds, Category.STEP, max(0.0, spent_s - warmup_s - lost_s - cut_off_s))
