"""The time ledger of a job on this node: from the begin on, each second belongs to what the node did then. Pure.

`agent/times.py` reports each event when it happens; the category of the time that follows is:

    event                          category until the next event
    -----                          -----------------------------
    begin of the job               launch
    health check begins            health
    rendezvous begins              rendezvous
    cycle formed                   launch
    ranks started                  by the ledger of one rank (`training.py`), until the ranks are stopped
    ranks stopped                  stop
    wait of `--ft-backoff` begins  backoff

While the group of nodes forms anew without a fault, health, rendezvous, launch and stop count as `membership`. A part
ends with `stopped`; the ledger of its rank may still come afterwards and corrects that part (`rank_times`).

Moments are monotonic seconds. Events may come in any order, and none goes back in time: whatever comes, the parts add
up to the time that has passed. Not thread-safe; `agent/times.py` has the lock. `laid_out` puts the phases of a recovery
on a line of time, for the report's trace and the spans of a running job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ft_launcher.record.ledger.account import Account, Category, CycleTimes, account, add, steps_lost
from ft_launcher.record.ledger.stall import Stall, stall_of
from ft_launcher.record.ledger.training import RanksRan, Training, training
from rank_monitor.contract.wire.rank_times import MAX_NAMES, OTHERS, Durations, RankTimes

_MAX_PARTS = 256
"""Parts that are kept apart, with the points of their steps. When there are more, the older half becomes one part of
sums (`_fold`), so that a job of thousands of cycles needs no more memory."""
_MEMBERSHIP = (Category.HEALTH, Category.RENDEZVOUS, Category.LAUNCH, Category.STOP)
_PHASES = {
    Category.BACKOFF: "backoff",
    Category.HEALTH: "health",
    Category.RENDEZVOUS: "rendezvous",
    Category.LAUNCH: "start",
}
_BEFORE = ("detection", "stop", "backoff", "health", "rendezvous")
_AFTER = ("start", "first_step")
"""The phases of a recovery in their order: before the start of the ranks, and after it."""


@dataclass(frozen=True)
class JobTime:
    """The job's time until now.

    Attributes:
        category: what the node does now; empty while ranks run.
        present: the part that has not ended.
        account: the account of the whole job.
        durations: name -> durations of `step` and of the sections of one rank until now.
        past: the last parts that have ended, in the order of time.
        saved_age_s: how long ago the last checkpoint of this cycle was reported (seconds); None: there was none.
        steps_lost: how many steps later cycles did again.
        stall: the stall of the training; None: the ranks make steps, or it is not known.
    """

    category: str
    present: CycleTimes
    account: Account
    durations: Mapping[str, Durations]
    past: Sequence[CycleTimes] = ()
    saved_age_s: float | None = None
    stall: Stall | None = None
    steps_lost: int = 0


class JobLedger:
    """The ledger of one launcher.

    Args:
        now: when the job began on this node (monotonic seconds).
        wall: the same moment in seconds since 1970. Parts have wall times, by this pair of clocks: a change of the
            wall clock during the job moves nothing.
    """

    def __init__(self, now: float, wall: float) -> None:
        self._wall_offset = wall - now
        self._since = self._now = now
        self._category = Category.LAUNCH
        self._spent: dict[str, float] = {}
        self._cycle: int | None = None
        self._ran: RanksRan | None = None
        self._is_over = False
        self._times: RankTimes | None = None
        self._is_membership = False
        self._parts: list[CycleTimes] = []
        self._last: _Ended | None = None
        self._steps_lost = 0
        """By the cycles of which only the sums are kept."""
        self._durations: dict[str, Durations] = {}
        """Of all cycles before the last one."""

    # Events.

    def begins(self, category: Category, now: float) -> None:
        """Notes what the node does from now on, while no rank runs. If a cycle still runs here, it counts as
        stopped."""
        self.stopped(now)
        self._pass(now)
        self._category = category

    def ranks_started(self, cycle: int, now: float) -> None:
        """Notes that the ranks of a cycle run."""
        self.stopped(now)
        self._pass(now)
        self._is_membership = False
        self._cycle = cycle
        self._ran = RanksRan(self._now, self._now, self._now)
        self._is_over = False
        self._times = None

    def rank_times(self, cycle: int, times: RankTimes | None) -> None:
        """Records the ledger of one rank of a cycle. Each call replaces the ledger before. A ledger that comes after
        the end of its cycle corrects the part of that cycle.

        Args:
            times: None: no rank has a ledger; nothing changes.
        """
        if times is None:
            return
        if self._ran is not None and cycle == self._cycle:
            self._times = times
        elif self._last is not None and cycle == self._last.cycle:
            self._last = replace(self._last, found=training(self._last.ran, times))
            self._parts[-1] = self._part(self._last)

    def cycle_over(self, now: float) -> None:
        """Notes that the cycle is over; the agent stops its ranks from now on."""
        now = self._later(now)
        if self._ran is not None and not self._is_over:
            self._is_over = True
            self._ran = replace(self._ran, over=now)

    def failed(self, began: float | None) -> None:
        """Notes that the cycle ended by a fault. The time from its begin to the end of the cycle is `detection`.

        Args:
            began: when the fault began, as far as is known; None: when the cycle was over.
        """
        if self._ran is not None:
            self._is_membership = False
            if began is None:
                began = self._ran.over if self._is_over else self._now
            self._ran = replace(self._ran, failed=began)

    def membership_changes(self) -> None:
        """Notes that the group of nodes forms anew without a fault: what the node does until the next start of ranks
        counts as `membership`."""
        self._is_membership = True

    def stopped(self, now: float) -> None:
        """Notes that the ranks of the cycle have ended, which ends its part. Does nothing while no ranks run."""
        if self._ran is None:
            return
        self.cycle_over(now)
        self._now = self._later(now)
        if self._last is not None:
            self._durations = _joined(self._durations, self._last.found)
            # The durations of a past part are in the journal. Kept here, they would be most of what 256 parts need.
            self._parts[-1] = replace(self._parts[-1], durations={})
        if len(self._parts) >= _MAX_PARTS:
            self._fold()
        self._last = self._ended(self._now)
        self._parts.append(self._part(self._last))
        self._since, self._spent, self._ran, self._category = self._now, {}, None, Category.STOP

    def waited(self, wait_s: float) -> None:
        """Notes that `wait_s` seconds of the rendezvous were a wait that the restart policy had decided: on several
        nodes the coordinator waits, and a node only learns afterwards for how long."""
        moved_s = min(max(0.0, wait_s), self._spent.get(Category.RENDEZVOUS, 0.0))
        if moved_s:
            self._spent[str(Category.RENDEZVOUS)] -= moved_s
            add(self._spent, Category.BACKOFF, moved_s)

    # What the ledger says. None of these methods changes anything.

    @property
    def last(self) -> CycleTimes | None:
        """The part of the last cycle that has ended; None: none has."""
        if self._parts and self._parts[-1].cycle is not None:
            return self._parts[-1]
        return None

    @property
    def past(self) -> tuple[CycleTimes, ...]:
        """The parts that have ended and are kept apart, in the order of time."""
        return tuple(self._parts)

    @property
    def category(self) -> str:
        """What the node does now; empty while ranks run."""
        if self._ran is not None:
            return ""
        return str(self._category)

    @property
    def stall(self) -> Stall | None:
        """The stall of the training by the last ledger of its rank; None: there is no stall, or no ranks run."""
        if self._ran is None or self._is_over or self._times is None:
            return None
        return stall_of(self._times)

    def durations(self, now: float) -> dict[str, Durations]:
        """Returns how long `step` and each section took in all cycles until now, by name: on one rank."""
        found = self._durations
        if self._last is not None:
            found = _joined(found, self._last.found)
        if self._ran is not None:
            found = _joined(found, self._ended(self._later(now)).found)
        return found

    def present(self, now: float) -> CycleTimes:
        """Returns the part that has not ended: of the cycle that runs, or of what follows the last cycle."""
        now = self._later(now)
        spent = dict(self._spent)
        if self._ran is None:
            self._add_spent(spent, now)
            return CycleTimes(None, self._since + self._wall_offset, now + self._wall_offset, spent)
        return self._part(self._ended(now))

    def account(self, now: float) -> Account:
        """Returns the account of the job until now."""
        return account([*self._parts, self.present(now)])

    def steps_lost(self, now: float) -> int:
        """Returns how many steps later cycles did again until now. It grows as soon as a cycle says where it
        resumed."""
        return self._steps_lost + steps_lost([*self._parts, self.present(now)])

    # How it is kept.

    def _later(self, now: float) -> float:
        return max(now, self._now)

    def _pass(self, now: float) -> None:
        """Adds the time since the last event to the present category."""
        now = self._later(now)
        self._add_spent(self._spent, now)
        self._now = now

    def _add_spent(self, spent: dict[str, float], now: float) -> None:
        category = self._category
        if self._is_membership and category in _MEMBERSHIP:
            category = Category.MEMBERSHIP
        add(spent, category, now - self._now)

    def _ended(self, now: float) -> _Ended:
        """Returns the present cycle as if its ranks had ended now."""
        assert self._ran is not None
        ran = replace(self._ran, stopped=now)
        if not self._is_over:
            ran = replace(ran, over=now)
        before = None
        if self._last is not None and self._last.ran.failed is not None:
            before = self._last.found.times.seconds
        found = training(ran, self._times, goes_on=not self._is_over)
        return _Ended(self._cycle, self._since, ran, dict(self._spent), found, self._is_membership, before)

    def _part(self, ended: _Ended) -> CycleTimes:
        found, ran = ended.found.times, ended.ran
        seconds = dict(ended.spent)
        for category, spent_s in found.seconds.items():
            if spent_s:
                add(seconds, category, spent_s)
        if ended.for_membership and ran.failed is None and Category.STOP in seconds:
            add(seconds, Category.MEMBERSHIP, seconds.pop(Category.STOP))
        since, until = ended.since + self._wall_offset, ran.stopped + self._wall_offset
        recovery = _recovery(ended)
        return replace(found, cycle=ended.cycle, since=since, until=until, seconds=seconds, recovery=recovery)

    def _fold(self) -> None:
        """Joins the older half of the parts into one part of sums. Which of their steps count is settled by what is
        known now: a cycle that resumes before the joined parts later changes them no more."""
        half = len(self._parts) // 2
        shares = [1.0] * half + [0.0] * (len(self._parts) - half)
        settled = account(self._parts, shares=shares)
        first, last = self._parts[0], self._parts[half - 1]
        self._steps_lost += steps_lost(self._parts[:half])
        reached = [part.iteration for part in self._parts[:half] if part.iteration is not None]
        joined = CycleTimes(None, first.since, last.until, settled.seconds, settled.steps)
        self._parts[:half] = [replace(joined, iteration=next(reversed(reached), None))]


def _joined(before: Mapping[str, Durations], found: Training) -> dict[str, Durations]:
    """Returns the durations of all cycles before with those of one more cycle. A cycle has 64 names at most, but a
    program may make up new names in each cycle: names beyond the bound share one entry."""
    joint = dict(before)
    for name, known in found.times.durations.items():
        kept = name
        if name not in joint and len(joint) >= MAX_NAMES:
            kept = OTHERS
        joint[kept] = joint.get(kept, Durations()).merged(known)
    return joint


@dataclass(frozen=True)
class _Ended:
    """A cycle whose ranks have ended, with all that is needed to compute its part again: the ledger of its rank may
    still come, or a later one.

    Attributes:
        since: when its part began (monotonic seconds).
        ran: when its ranks ran.
        spent: category -> seconds, from the begin of the part until the start of the ranks.
        found: what its ranks did, by the last ledger.
        for_membership: the cycle ended because the group of nodes forms anew.
        failed_before: category -> seconds of the ranks of the cycle before, if that cycle failed; None: it did not.
    """

    cycle: int | None
    since: float
    ran: RanksRan
    spent: Mapping[str, float]
    found: Training
    for_membership: bool
    failed_before: Mapping[str, float] | None


def _recovery(ended: _Ended) -> dict[str, float]:
    """Returns the phases of the recovery that led into a cycle, in seconds; empty: no fault was before the cycle.

    Detection and a part of the stop lie in the cycle before, the other phases in this one.
    """
    if ended.failed_before is None:
        return {}
    phases = {phase: ended.failed_before.get(phase, 0.0) for phase in (Category.DETECTION.value, Category.STOP.value)}
    phases["stop"] += ended.spent.get(Category.STOP, 0.0)
    for category, phase in _PHASES.items():
        phases[phase] = ended.spent.get(category, 0.0)
    phases["start"] += ended.found.first_sign_s or 0.0
    if ended.found.first_step_s is not None:
        phases["first_step"] = ended.found.first_step_s
    return phases


def laid_out(recovery: Mapping[str, float], started: float) -> Iterator[tuple[str, float, float]]:
    """Yields name, begin and length of each phase of the recovery that led into a cycle.

    The ledger has only the lengths. The phases are laid one after the other around the start of the cycle's ranks, in
    the order of `_BEFORE` and `_AFTER`. A phase that took no time is left out.

    Args:
        recovery: `CycleTimes.recovery`.
        started: when the ranks were started (seconds, of any clock; the result has the same origin).
    """
    moment = started - sum(recovery.get(phase, 0.0) for phase in _BEFORE)
    for phase in (*_BEFORE, *_AFTER):
        length_s = recovery.get(phase, 0.0)
        if length_s > 0:
            yield phase, moment, length_s
        moment += length_s
