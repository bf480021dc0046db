"""Suggests what to change in a job, with the numbers that each suggestion is made of. Pure.

`tools/commands/report.py` calls `advise` with the findings. Each suggestion is made only when enough is known: a rate
that is known from n events has a relative error of about 1/sqrt(n), and where the error decides, the text says that it
cannot be said.

Each topic has one function, which returns an `Advice` or None:

    checkpoint interval   sqrt(2 d M) - d, from the time of a save and the time between faults (`best_interval_s`)
    limit of a section    the longest observed time with a margin (`section_durations.py`)
    spares                what one more spare would have saved, and cost (`spares.py`)
    the largest loss      the category that took the most time without being steps

One suggestion the launcher follows by itself: how often to save (`--ft-save-interval auto`).
`tools/report/save_intervals.py` calls `choose_save_interval` before each cycle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ft_launcher.record.events import SaveIntervalEvent
from ft_launcher.record.ledger.account import CUSTOM, PRINTED_STEP, Category
from ft_launcher.tools.report.job_findings import JobFindings, as_text, counted
from ft_launcher.tools.report.section_durations import LimitFit, WatchedSection
from ft_launcher.tools.report.spares import Spares
from rank_monitor.contract.wire.rank_times import STEP

_FEWEST_FAULTS = 3
"""With fewer faults the relative error of the time between faults, 1/sqrt(n), is above 0.7: nothing follows from such a
number."""
FIRST_SAVE_S = 1800.0
"""Seconds between two saves until enough is known. A save of 20 s then costs 1 % of the time, and a fault 15 min on
average."""
_LEAST_SAVE_S = 60.0
"""Shortest interval (seconds), or the time of a save if that is longer. Where faults come so close together, other
things have to be changed first."""
_MAX_SAVE_S = 4 * 3600.0
"""Longest interval (seconds). There may be more faults than so far, and a longer interval gains less than 1 % of the
time where a save takes two minutes."""
_DAY_S = 86400.0
_LEAST_SHARE = 0.01
"""Share of the time below which a category is not worth a change."""

_WHAT_HELPS: Mapping[str, str] = {
    Category.LOST_PROGRESS: "steps were done again after restarts; checkpoints at shorter intervals lose fewer",
    Category.CHECKPOINT_SAVE: "the training waited for checkpoints; a checkpoint that is written in the background, or "
    "longer intervals, would cost less",
    Category.CHECKPOINT_LOAD: "ranks loaded checkpoints after each start",
    Category.DATA: "the training waited for data; more loader processes or prefetching may help",
    Category.EVALUATION: "the training evaluated",
    Category.LAUNCH: "the launcher and the ranks started; a warm start (docs/warm_start.md) makes this shorter",
    Category.RENDEZVOUS: "nodes waited for each other to form a cycle",
    Category.SETUP: "ranks prepared (imports, the model) after each start",
    Category.WARMUP: "the first steps took longer than the others: compilation and caches",
    Category.DETECTION: "ranks stood still before the launcher knew; shorter limits (docs/client.md) see hangs sooner",
    Category.STOP: "ranks had to end; those that do not heed SIGTERM cost the whole limit",
    Category.HEALTH: "nodes were checked before cycles",
    Category.BACKOFF: "the launcher waited before restarts (--ft-backoff)",
    Category.RESCHEDULE: "the job waited between its attempts",
    Category.MEMBERSHIP: "the group of nodes grew or shrank",
    Category.EXCLUDED: "the machine stood still",
    Category.UNKNOWN: "nothing is known of it: a training with sections (docs/client.md) says what it does",
}
"""Category -> what it means and what makes it smaller."""


@dataclass(frozen=True)
class Advice:
    """One suggestion.

    Attributes:
        topic: what it is about.
        text: the suggestion, with its reason.
        numbers: what it is made of, in seconds, counts and shares.
        worth: what it may gain; empty: not known.
    """

    topic: str
    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    worth: str = ""

    def as_json(self) -> dict[str, Any]:
        """Returns the suggestion as JSON has it."""
        return asdict(self)


def advise(findings: JobFindings) -> list[Advice]:
    """Returns the suggestions: saves, limits, spares, the largest loss.

    A topic of which too little is known has none. All numbers of the report come from `findings`, so the same journals
    give the same advice.
    """
    suggestions = [
        _interval(findings),
        *(_limit(section, findings.sections) for section in findings.sections),
        _spares(findings),
        _largest(findings),
    ]
    return [advice for advice in suggestions if advice is not None]


def best_interval_s(save_s: float, mtbf_s: float) -> float:
    """Returns how long to train between two checkpoints: sqrt(2 d M) - d, by Young (1974) and Daly (2006).

    Saving more often costs the time of the saves; saving less often costs, at each fault, the steps since the last
    save. The formula is where the sum of both is least. The result is 0 where a checkpoint takes so long, beside the
    time between faults, that the formula does not hold.

    An example: a save takes 20 s, and faults come one in 24 hours: sqrt(2 * 20 * 86400) - 20, which is 1839 s.

    Args:
        save_s: d: how long the training waits for a checkpoint (seconds).
        mtbf_s: M: mean time between faults (seconds).
    """
    return max(0.0, math.sqrt(2 * save_s * mtbf_s) - save_s)


def choose_save_interval(cycle: int, findings: JobFindings | None) -> SaveIntervalEvent:
    """Returns how often to save from now on, as the event that says so.

    The interval is `best_interval_s` within bounds, or a first value as long as too few faults or no save are known.

    Args:
        cycle: the cycle that begins now.
        findings: on this job so far, with all attempts that are known; None: nothing is known.
    """
    first = f"{as_text(FIRST_SAVE_S)}, the first value"
    if findings is None:
        return SaveIntervalEvent(cycle, FIRST_SAVE_S, f"{first}: nothing is known of the job yet", 0, None, None)
    faults, saves = len(findings.faults), findings.saves
    if saves is None or saves.mean_s <= 0:
        reason = "no save has been measured yet (a section that saves, docs/client.md)"
        return SaveIntervalEvent(cycle, FIRST_SAVE_S, f"{first}: {reason}", faults, None, findings.mtbf_s)
    save_s, mtbf_s = saves.mean_s, findings.mtbf_s
    if faults < _FEWEST_FAULTS or mtbf_s is None:
        interval_s = max(FIRST_SAVE_S, save_s)
        reason = f"{counted(faults, 'fault')} so far, too few to say how often to save; a save takes {as_text(save_s)}"
        return SaveIntervalEvent(
            cycle, interval_s, f"{as_text(interval_s)}, the first value: {reason}", faults, save_s, mtbf_s
        )
    # Enough faults are known: the formula decides, within bounds.
    best_s = best_interval_s(save_s, mtbf_s)
    interval_s = min(max(best_s, _LEAST_SAVE_S, save_s), max(_MAX_SAVE_S, save_s))
    bounded = ""
    if interval_s > best_s:
        bounded = f", and not below {as_text(interval_s)}"
    elif interval_s < best_s:
        bounded = f", and not above {as_text(interval_s)}"
    reason = (
        f"{as_text(interval_s)}, by Young and Daly: a save takes {as_text(save_s)}, and {faults} faults came one in "
        f"{as_text(mtbf_s)}, with an error of {1 / math.sqrt(faults):.0%}: {as_text(best_s)}{bounded}"
    )
    return SaveIntervalEvent(cycle, interval_s, reason, faults, save_s, mtbf_s)


def _interval(findings: JobFindings) -> Advice | None:
    """Returns how often to save, beside how often the training did; None: no save or no fault is known.

    The best interval has an error, since the time between faults has one: a range comes out, and the interval in use is
    compared with the range.
    """
    saves, count = findings.saves, len(findings.faults)
    if saves is None or findings.mtbf_s is None or saves.mean_s <= 0:
        return None
    used = f"the training saved every {as_text(saves.interval_s)}, and waited {as_text(saves.mean_s)} for each"
    numbers = {
        "faults": float(count),
        "save_s": saves.mean_s,
        "used_s": saves.interval_s,
        "mtbf_s": findings.mtbf_s,
    }
    if count < _FEWEST_FAULTS:
        faults = "one fault is" if count == 1 else f"{count} faults are"
        text = f"{faults} too few to say how often to save; {used}"
        return Advice("checkpoint interval", text, numbers)
    # The error of the time between faults, which is known from so many faults, gives the range of intervals that pay.
    error = 1 / math.sqrt(count)
    best_s = best_interval_s(saves.mean_s, findings.mtbf_s)
    low_s = best_interval_s(saves.mean_s, findings.mtbf_s * (1 - error))
    high_s = best_interval_s(saves.mean_s, findings.mtbf_s * (1 + error))
    numbers |= {"best_s": best_s, "low_s": low_s, "high_s": high_s}
    if low_s <= 0:
        text = (
            f"a checkpoint takes too long, beside {as_text(findings.mtbf_s)} between faults, to say how often; {used}"
        )
        return Advice("checkpoint interval", text, numbers)
    if saves.interval_s < low_s:
        judged = "which is more often than the range that pays"
    elif saves.interval_s > high_s:
        judged = "which is less often than the range that pays"
    else:
        judged = "which is in the range that pays"
    text = (
        f"save every {as_text(best_s)} of training (--ft-save-interval {best_s:.0f}); "
        f"{used}, {judged}: {as_text(low_s)} to {as_text(high_s)}, since "
        f"{count} faults tell the time between faults, {as_text(findings.mtbf_s)}, with an error of {error:.0%}"
    )
    return Advice("checkpoint interval", text, numbers)


def _limit(section: WatchedSection, sections: Sequence[WatchedSection]) -> Advice | None:
    """Returns what to do about the limit of a section; None: the limit fits, or too little is known.

    Args:
        sections: all sections. Where a rank prints steps, these are watched by the limit from one printed step to the
            next, and the section `step` needs no limit of its own.
    """
    has_printed = any(other.name == PRINTED_STEP for other in sections)
    topic = f"limit of section {section.name}"
    if section.name == STEP:
        seen = f"in {section.times:,} steps"
    elif section.name == PRINTED_STEP:
        topic = "limit from one printed step to the next (--ft-watch-log-timeout)"
        seen = f"in {section.times:,} printed steps"
    else:
        seen = f"in the {section.times:,} times that the section was open"
    longest = f"the longest took {as_text(section.max_s)}"
    proposed = f"{as_text(section.proposed_s)} would never have fired {seen}, of which {longest}"
    numbers = {"times": float(section.times), "max_s": section.max_s, "proposed_s": section.proposed_s}
    limit_s = section.limit_s or 0.0
    if section.limit_s is not None:
        numbers |= {"limit_s": limit_s, "fired": float(section.fired)}
    worth = ""
    # A limit that fits, and a section that was seen too few times, give no advice. The section `step` needs no limit of
    # its own where printed steps have one.
    match section.fit:
        case LimitFit.UNWATCHED if section.name == PRINTED_STEP or (section.name == STEP and not has_printed):
            text = f"no limit watches it; {proposed}"
        case LimitFit.LONG:
            sooner = as_text(limit_s - section.proposed_s)
            text = f"the limit of {as_text(limit_s)} is long; {proposed}: a hang would be seen {sooner} sooner"
            worth = f"{sooner} at each hang"
            if section.fired:
                text += f". The limit fired in {counted(section.fired, 'cycle')}"
        case LimitFit.TIGHT:
            text = f"the limit of {as_text(limit_s)} is tight: {seen} {longest}; {as_text(section.proposed_s)} is safer"
            if section.fired:
                text += f". The limit fired in {counted(section.fired, 'cycle')}: look whether these were hangs"
        case _:
            return None
    return Advice(topic, text, numbers, worth)


def _spares(findings: JobFindings) -> Advice | None:
    """Returns whether one more spare pays; None: no node was lost, and no spare waited in vain.

    Three sentences at most: how often nodes were lost, what one more spare would have saved and cost, and what the
    spares that there were cost while they waited.
    """
    spares = findings.spares
    if spares is None or not (spares.losses or spares.idle_rank_s):
        return None
    numbers = {
        "losses": float(spares.losses),
        "by_spare": float(spares.by_spare),
        "saved_rank_s": spares.saved_rank_s,
        "cost_rank_s": spares.cost_rank_s,
        "idle_rank_s": spares.idle_rank_s,
        "goodput_allocated": findings.goodput * spares.active,
    }
    sentences = []
    if spares.losses:
        sentences = [_losses(spares, numbers), _one_more(spares)]
    if spares.idle_rank_s:
        idle, places = _rank_hours(spares.idle_rank_s), counted(spares.by_spare, "place")
        of_all = numbers["goodput_allocated"]
        sentences.append(
            f"The nodes that waited cost {idle}, and took {places}: steps that count were {of_all:.1%} of the time of "
            f"all ranks, instead of {findings.goodput:.1%}"
        )
    if not spares.losses:
        # The rule of three: an event that was not seen in n trials has, with 95 % probability, a rate below 3/n.
        sentences.append(
            f"No node was lost in {as_text(spares.ran_s)}, so less than one in {as_text(spares.ran_s / 3)}"
        )
    return Advice("spares", ". ".join(sentences), numbers)


def _losses(spares: Spares, numbers: dict[str, float]) -> str:
    """Returns how often nodes were lost and for how long they were missed, in words. Adds both to `numbers`."""
    mtbf_s = spares.mtbf_s or 0.0
    numbers["mtbf_s"] = mtbf_s
    text = f"A node was lost {counted(spares.losses, 'time')} in {as_text(spares.ran_s)}"
    if spares.losses >= _FEWEST_FAULTS and mtbf_s > 0:
        numbers["a_day"] = _DAY_S / mtbf_s
        text += f", one in {as_text(mtbf_s)} ({_DAY_S / mtbf_s:.2g} a day)"
    if spares.back_s is not None:
        numbers["back_s"] = spares.back_s
        text += f"; without a spare as many nodes ran again after {as_text(spares.back_s)}"
    return text


def _one_more(spares: Spares) -> str:
    """Returns what one more spare would have saved and cost, and which of both is more.

    The number of losses is known from few events, so it has an error. Where the error could turn the result round, the
    text says that it cannot be said.
    """
    saved, cost = _rank_hours(spares.saved_rank_s), _rank_hours(spares.cost_rank_s)
    beside = f"One more spare would have saved {saved}, and cost {cost}"
    if spares.losses < _FEWEST_FAULTS:
        return f"{beside}: so few losses do not say whether it pays"
    # Saved time is proportional to the number of losses, and so has the relative error of that number.
    error = 1 / math.sqrt(spares.losses)
    if spares.saved_rank_s * (1 - error) > spares.cost_rank_s:
        judged = "it pays"
    elif spares.saved_rank_s * (1 + error) < spares.cost_rank_s:
        judged = "it does not pay"
    else:
        judged = f"with {spares.losses} losses, an error of {error:.0%}, it cannot be said whether it pays"
    return f"{beside}: {judged}"


def _rank_hours(rank_s: float) -> str:
    """Returns seconds of ranks as rank-hours, in words."""
    hours = rank_s / 3600
    if hours >= 100:
        return f"{hours:,.0f} rank-hours"
    return f"{hours:.3g} rank-hours"


def _largest(findings: JobFindings) -> Advice | None:
    """Returns the category that took the most time without being steps; None: no category takes 1 % of the time.

    A section with a name of the training's own has no advice of ours: the name is passed back to the user.
    """
    for name, spent_s, share in findings.shares():
        if name != Category.STEP:
            if share < _LEAST_SHARE:
                return None
            if name.startswith(CUSTOM):
                reason = f"the training was in its section {name.removeprefix(CUSTOM)}"
            else:
                reason = _WHAT_HELPS.get(name, "this release does not know it")
            text = f"most of the time that was no step is {name}, {as_text(spent_s)} ({share:.1%}): {reason}"
            return Advice("largest loss", text, {"seconds": spent_s, "share": share}, f"up to {as_text(spent_s)}")
    return None
