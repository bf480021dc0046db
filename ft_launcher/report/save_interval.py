"""How often a training is to save, chosen by what its job's journals say so far (`--ft-save-interval auto`). Pure.

`agent/save_intervals.py` asks before each cycle. It is the advice of the report, taken over: the interval by Young and
Daly, within bounds, and a first value as long as too little is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ft_launcher.report.advice import FEWEST_FAULTS, best_interval_s
from ft_launcher.report.durations import as_text, counted
from ft_launcher.report.job_findings import JobFindings

FIRST_S = 1800.0
"""Until enough is known: a save that takes 20 s costs 1 % of the time then, and a fault 15 min on average."""
LEAST_S = 60.0
"""Not below that, nor below the time of a save: where faults come so close, other things are to be changed first."""
MOST_S = 4 * 3600.0
"""Not above that: there may be more faults than so far, and a longer interval gains little: less than 1 % of the time
where a save takes two minutes."""


@dataclass(frozen=True)
class SaveInterval:
    """What was chosen, and what by.

    Attributes:
        interval_s: seconds of training between two saves.
        reason: why, in words.
        faults: how many the job had.
        save_s: mean time that the training waited for a save; None: unknown.
        mtbf_s: time of the job per fault; None: there was none.
    """

    interval_s: float
    reason: str
    faults: int = 0
    save_s: float | None = None
    mtbf_s: float | None = None


def choose(findings: JobFindings | None) -> SaveInterval:
    """Returns how often to save from now on.

    Args:
        findings: on this job so far, all attempts that are known; None: nothing is known.
    """
    if findings is None:
        return SaveInterval(FIRST_S, f"{as_text(FIRST_S)}, the first value: nothing is known of the job yet")
    faults, saves = len(findings.faults), findings.saves
    if saves is None or saves.mean_s <= 0:
        why = "no save has been measured yet (a section that saves, docs/client.md)"
        return SaveInterval(FIRST_S, f"{as_text(FIRST_S)}, the first value: {why}", faults, None, findings.mtbf_s)
    save_s, mtbf_s = saves.mean_s, findings.mtbf_s
    if faults < FEWEST_FAULTS or mtbf_s is None:
        interval_s = max(FIRST_S, save_s)
        why = f"{counted(faults, 'fault')} so far, too few to say how often to save; a save takes {as_text(save_s)}"
        return SaveInterval(interval_s, f"{as_text(interval_s)}, the first value: {why}", faults, save_s, mtbf_s)
    best_s = best_interval_s(save_s, mtbf_s)
    interval_s = min(max(best_s, LEAST_S, save_s), max(MOST_S, save_s))
    bounded = ""
    if interval_s > best_s:
        bounded = f", and not below {as_text(interval_s)}"
    elif interval_s < best_s:
        bounded = f", and not above {as_text(interval_s)}"
    reason = (
        f"{as_text(interval_s)}, by Young and Daly: a save takes {as_text(save_s)}, and {faults} faults came one in "
        f"{as_text(mtbf_s)}, with an error of {1 / math.sqrt(faults):.0%}: {as_text(best_s)}{bounded}"
    )
    return SaveInterval(interval_s, reason, faults, save_s, mtbf_s)
