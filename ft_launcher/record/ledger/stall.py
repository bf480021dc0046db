"""Whether a training makes no steps, from the time ledger of one rank. Pure.

No limit and no verdict: nothing is ended by it. `job_ledger.py` asks `stall_of` for the status of a job whose ranks
run, and `training.py` for the part of the open step that counts as `detection` in place of `step`.

It is another thing than the monitor's stall warning (`--ft-stall-warning`, `rank_monitor/watch.py: RankWatch.stall`):
that one is about a main thread that executes no Python, whether steps are known or not.
"""

from __future__ import annotations

from dataclasses import dataclass

from rank_monitor.contract.wire.rank_times import NO_STEP, STEP, Outside, RankTimes

_MEDIANS = 10
"""A step that takes so many times the usual one is no slow step any more."""
_LEAST_S = 5.0
"""Of fast steps a few dozen are missed by any write of a log; nobody needs to hear of less."""
_GAPS = 1.5
"""The longest gap of late is one of an evaluation or a checkpoint outside of all sections: the next one may take
longer, but not by half."""
_NS_PER_S = 1e9


@dataclass(frozen=True)
class Stall:
    """A training that runs and makes no steps.

    Attributes:
        steps: that were done before it, by which one stall of a cycle is told from the next.
        waited_s: seconds since the last step was done, without the time in other sections than `step`.
        usual_s: the median time of a step, at most 41 % too high (seconds).
        since_ns: the moment from which on it counts as one (nanoseconds of CLOCK_MONOTONIC).
    """

    steps: int
    waited_s: float
    usual_s: float
    since_ns: int

    @property
    def text(self) -> str:
        """What is wrong, in words."""
        return f"no step for {self.waited_s:.0f} s, {self.waited_s / self.usual_s:,.0f} times the usual one"


def stall_of(times: RankTimes) -> Stall | None:
    """Returns the stall of a rank at the end of its ledger, `now_ns`; None: it makes steps, is in another section, was
    not seen to make any step yet, or is not watched.

    It is one after the greatest of 10 times the usual step, 5 s, and 1.5 times the longest gap of the last 1,000 steps.
    """
    if times.tail_is_section:
        awaits_step = times.tail == STEP
    else:
        awaits_step = times.tail == Outside.BETWEEN
    usual_ns = times.step.quantile_ns(0.5)
    if times.waited_ns == NO_STEP or not awaits_step or not usual_ns:
        return None
    limit_ns = max(_MEDIANS * usual_ns, round(_LEAST_S * _NS_PER_S), round(_GAPS * times.longest_gap_ns))
    from_ns, until_ns = times.pause
    # A pause after the last change of the rank is not excluded in the ledger yet.
    paused_ns = max(0, min(until_ns, times.now_ns) - max(from_ns, times.at_ns))
    waited_ns = times.waited_ns + times.now_ns - times.at_ns - paused_ns
    if waited_ns <= limit_ns:
        return None
    since_ns = max(times.at_ns, times.now_ns - (waited_ns - limit_ns))
    return Stall(times.step.count, waited_ns / _NS_PER_S, usual_ns / _NS_PER_S, since_ns)
