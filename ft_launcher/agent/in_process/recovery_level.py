"""Decides between recovery level 1 and 2, from the messages of in-process wrappers and the deaths of ranks. Pure.

    phase of a rank              a death of that rank now is
    none, or DONE                as without wrappers: it ends the cycle
    JOINING                      withdrawn: the others may count on it
    of AT_WORK                   reported to the others, which restart in process
    LEFT                         expected: it has notified the others itself
    GAVE_UP                      the end of level 1

Level 1, restart in process, takes a death only while every other rank of the node can go on: in the same call, or gone
already. It hands over to level 2, a new cycle, when no rank is left, or when it does not come to an end within the
limit that the ranks gave. Knows no process, store or clock; `in_process.py` carries the steps out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ft_launcher.agent.in_process.recovery_steps import (
    DeadlinePassed,
    Died,
    EndRank,
    Happened,
    Heard,
    Joined,
    LossNotified,
    NotifyLoss,
    Restarted,
    StartAgain,
    StayAway,
    Step,
    TakeOver,
)
from rank_monitor.contract.restart_phase import AT_WORK, ENTERING, GONE, RESTARTING, RestartPhase
from rank_monitor.contract.wire.messages import RestartReport

_RUNS = frozenset({RestartPhase.PREPARING, RestartPhase.RUNNING, RestartPhase.WAITING})
"""The rank has come to the end of the restart."""
_CHANGES_NOTHING = frozenset(
    {RestartPhase.NONE, RestartPhase.INTERRUPTING, RestartPhase.COMPLETING, RestartPhase.LEAVING}
)
"""What a death means, and what is awaited of the rank, is as in the phase before."""
# A rank that dies at each start, for a broken device for example, must not be started for ever.
MAX_STARTS = 3
"""How often a rank is started again alone between two restarts."""
# Ranks are at most a few rounds apart; but a rank may send any number, and a journal may hold any.
_MAX_ENDS = 100
"""Ends of restarts that are reported at once, each by a step. There are more where the launcher stood still."""
_MAX_SKIPPED = 1_000_000
"""More of them are not counted: they would take hours."""
# Seconds, for a wrapper that reports no limit of its own. Without one a lost restart would never reach level 2.
_DEFAULT_LIMIT_S = 600.0
_NOBODY = "no rank of this node goes on"
_LAST_MESSAGE_S = 5.0
"""From a rank's report that it leaves to its end, which has the exit code (seconds)."""


@dataclass
class RankSlot:
    """What is known of a local rank.

    `last`: the last report of its wrapper by which something changed here. `is_new`: started again, and not let in yet.
    `is_lost`: level 1 handles its death. `due`: the deadline after which level 1 has failed here; `is_ended`: it was
    killed for that. `starts`: how often it was started again since the last restart; `is_next`: it is to be started
    again.
    """

    last: RestartReport | None = None
    exit_code: int | None = None
    is_new: bool = False
    is_lost: bool = False
    due: float | None = None
    starts: int = 0
    is_next: bool = False
    is_ended: bool = False

    @property
    def phase(self) -> RestartPhase:
        if self.last:
            return self.last.phase
        return RestartPhase.NONE

    @property
    def goes_on(self) -> bool:
        return self.exit_code is None and not self.is_new and self.phase in AT_WORK

    def is_told_by(self, report: RestartReport) -> bool:
        """Whether a report says something new."""
        if report == self.last or report.phase in _CHANGES_NOTHING:
            return False
        if self.last is None or report.phase not in ENTERING:
            return True
        # On the way into the next round of the same call.
        is_in_call = self.phase in AT_WORK or self.phase is RestartPhase.JOINING
        return not (is_in_call and report.call_prefix == self.last.call_prefix)


@dataclass
class RecoveryState:
    """What is known of the local ranks of one cycle.

    `ranks`: the global rank of each local rank, for reasons. `rejoin`: whether a dead rank is started again.
    `final_codes`: exit codes that speak to the launcher: level 2 handles them. `since`: the first sign of the fault
    that is dealt with in process; None: there is none. `failed`: the round that is restarted.
    """

    ranks: Sequence[int]
    rejoin: bool
    final_codes: Collection[int]
    slots: list[RankSlot]
    since: float | None = None
    failed: int = -1

    @classmethod
    def at_start(cls, ranks: Sequence[int], rejoin: bool, final_codes: Collection[int]) -> RecoveryState:
        """Returns the state when the ranks have just started."""
        return cls(ranks, rejoin, final_codes, [RankSlot() for _ in ranks])


class RecoveryLevels:
    """The local ranks of one cycle.

    Args:
        state: what is known already; it changes with each event.
        enabled: whether level 1 is used at all; else reports of wrappers are left out, as if there were none.
    """

    def __init__(self, state: RecoveryState, enabled: bool = True) -> None:
        self._state, self._enabled = state, enabled
        self._slots = state.slots

    @property
    def lost(self) -> set[int]:
        """Local ranks that do not take part now: dead, or started again and not let in yet."""
        return {number for number, slot in enumerate(self._slots) if slot.is_new or slot.is_lost}

    @property
    def is_restarting(self) -> bool:
        """Whether a fault is dealt with in process."""
        return self._state.since is not None

    def needs_message(self, local_rank: int) -> bool:
        """Whether the last message of a rank that ended is needed: its monitor may not have passed it on yet."""
        slot = self._slots[local_rank]
        return slot.is_new or slot.phase not in (RestartPhase.NONE, RestartPhase.DONE)

    def may_have_declared(self, local_rank: int) -> bool:
        """Whether a rank without a message may have sent one that its monitor still has: other ranks have wrappers."""
        return self._slots[local_rank].last is None and any(slot.last for slot in self._slots)

    def next_check(self) -> float | None:
        """When `tick` is to be called (monotonic seconds); None: no deadline runs."""
        return min((slot.due for slot in self._slots if slot.due is not None), default=None)

    def known(self) -> RecoveryState:
        """Returns the present state, which further events do not change."""
        return replace(self._state, slots=[replace(slot) for slot in self._slots])

    def on(self, happened: Happened, now: float) -> list[Step] | None:
        """Takes what happened; returns the steps of level 1, or None for a death that counts as without wrappers."""
        match happened:
            case Heard(local_rank, report):
                return self.on_message(local_rank, report, now)
            case Died(local_rank, exit_code):
                return self.died(local_rank, exit_code, now)
            case LossNotified(local_rank, problem):
                return self.loss_notified(local_rank, problem, now)
            case DeadlinePassed():
                return self.tick(now)

    def on_message(self, local_rank: int, report: RestartReport, now: float) -> list[Step]:
        """Handles a report of a rank's wrapper; a repeated report changes nothing."""
        slot = self._slots[local_rank]
        if not self._enabled or slot.exit_code is not None or not slot.is_told_by(report):
            return []
        slot.last, steps = report, list[Step]()
        if slot.is_new and report.phase in AT_WORK:
            slot.is_new = False
            steps.append(Joined(local_rank, report.round))
        if report.phase in ENTERING:
            steps += self._notify_again(report)
        if report.phase in RESTARTING:
            self._begin(report.round, now)
            # The limit is for all phases of a restart together.
            if report.phase is RestartPhase.RECOVERING or slot.due is None:
                self._expect(local_rank, now)
        elif report.phase is RestartPhase.GAVE_UP or (report.phase in GONE and not self._any_goes_on()):
            slot.due = now + _LAST_MESSAGE_S
        else:
            slot.due = None
        if report.phase in _RUNS:
            self._expect_silent_ones(report, now)
        return steps + self._restarted(now) + self._start_next()

    def died(self, local_rank: int, exit_code: int, now: float) -> list[Step] | None:
        """Takes a rank's end; returns the steps of level 1, or None where the end counts as without wrappers."""
        slot = self._slots[local_rank]
        is_declared = self.needs_message(local_rank)
        slot.exit_code, slot.due = exit_code, None
        # Without a wrapper nobody else can recover, and a final code is a request to the launcher.
        if not is_declared or exit_code in self._state.final_codes:
            return None
        steps: list[Step] | None
        if slot.is_new:
            steps = self._newcomer_died(local_rank)
        else:
            steps = self._member_died(local_rank, now)
        slot.is_lost = steps is not None
        return steps

    def loss_notified(self, local_rank: int, problem: str, now: float) -> list[Step]:
        """Takes the outcome of a `NotifyLoss`: the others took note, or `problem` says why not."""
        slot = self._slots[local_rank]
        if not problem:
            slot.is_next, steps = slot.phase is not RestartPhase.LEFT, self._restarted(now)
            if all(other.due is None for other in self._slots):  # they knew, and nobody restarts
                self._state.since = None
            return steps + self._start_next()
        if slot.is_new:
            return [StayAway(local_rank, f"its request to join could not be cancelled: {problem}")]
        return [
            TakeOver(local_rank, f"the others could not be notified that {self._name(local_rank)} is gone: {problem}")
        ]

    def started(self, local_rank: int) -> None:
        """Notes that the rank was started again."""
        self._slots[local_rank] = RankSlot(is_new=True, starts=self._slots[local_rank].starts)

    def tick(self, now: float) -> list[Step]:
        """Returns the steps for deadlines that have passed."""
        late = [(slot.due, number) for number, slot in enumerate(self._slots) if slot.due is not None]
        due, number = min(late, default=(now, -1))
        if number < 0 or due > now:
            return []
        slot = self._slots[number]
        # A rank that the others went on without is killed first; only if that does not end it, level 2 takes over.
        if slot.is_ended or not self._is_left_behind(slot):
            return [TakeOver(number, self._why_late(number))]
        slot.is_ended, slot.due = True, now + _LAST_MESSAGE_S
        return [EndRank(number, self._why_late(number))]

    # Deaths.

    def _newcomer_died(self, local_rank: int) -> list[Step]:
        """Returns the steps for a death before the rank was let in: the others go on."""
        last = self._slots[local_rank].last
        if last is None:
            self._slots[local_rank].is_next = True
            return self._start_next()
        if last.phase is not RestartPhase.JOINING or self._is_finished(last.call_prefix):
            return []
        return [self._notify(local_rank, last)]

    def _member_died(self, local_rank: int, now: float) -> list[Step] | None:
        slot = self._slots[local_rank]
        last = slot.last
        assert last is not None
        if last.phase is RestartPhase.GAVE_UP:
            return [TakeOver(local_rank, self._gave_up(local_rank))]
        if last.phase is RestartPhase.LEFT:
            if self._any_goes_on() or self._is_finished(last.call_prefix):
                return []
            return [TakeOver(local_rank, self._why_nobody_goes_on())]
        if self._is_left_behind(slot) and self._is_finished(last.call_prefix):
            return []
        why_not = self._why_not(last)
        if slot.exit_code == 0 and (why_not or self._all_ended_well()):
            return None
        if why_not:
            return [TakeOver(local_rank, f"{self._name(local_rank)} is gone, and {why_not}")]
        self._begin(last.round, now)
        return [self._notify(local_rank, last)]

    def _notify(self, local_rank: int, last: RestartReport) -> NotifyLoss:
        joins = last.phase is RestartPhase.JOINING
        return NotifyLoss(local_rank, last.entry_rank, last.call_prefix, _limit_s(last), joins)

    def _notify_again(self, report: RestartReport) -> list[Step]:
        """Notifies a further call of the wrapped function of ranks that are gone: its start would wait for them."""
        steps = list[Step]()
        for number, slot in enumerate(self._slots):
            is_gone = slot.is_lost and slot.exit_code is not None
            if is_gone and slot.last and report.call_prefix and slot.last.call_prefix != report.call_prefix:
                slot.last = replace(slot.last, call_prefix=report.call_prefix)
                steps.append(
                    NotifyLoss(number, slot.last.entry_rank, report.call_prefix, _limit_s(report), joins=False)
                )
        return steps

    def _start_next(self) -> list[Step]:
        """Starts ranks again, but not during a restart: that would delay it, and they can only join at the next one."""
        steps = list[Step]()
        for number, slot in enumerate(self._slots):
            if slot.is_next and not self.is_restarting:
                slot.is_next = False
                steps += self._start_again(number)
        return steps

    def _start_again(self, local_rank: int) -> list[Step]:
        slot = self._slots[local_rank]
        if not self._state.rejoin or self._is_finished(slot.last.call_prefix if slot.last else None):
            return []
        # It ended well without having taken part: another start would do the same.
        if slot.is_new and slot.exit_code == 0:
            return [StayAway(local_rank, "it ended before it had joined")]
        if slot.starts >= MAX_STARTS:
            return [StayAway(local_rank, f"it died {slot.starts + 1} times between two restarts")]
        slot.starts += 1
        return [StartAgain(local_rank)]

    def _why_not(self, last: RestartReport) -> str:
        """Why level 1 cannot handle the death of a rank whose last report is `last`; empty: it can."""
        if not last.call_prefix:
            return "its wrapper uses a store in which the launcher cannot notify the others"
        for number, other in enumerate(self._slots):
            if other.last is last or other.is_lost or other.is_new or other.phase in GONE:
                continue
            if other.last is None or other.phase not in AT_WORK or other.last.call_prefix != last.call_prefix:
                return f"{self._name(number)} is not in the wrapped function"
        if self._any_goes_on():
            return ""
        return self._why_nobody_goes_on()

    # Restarts.

    def _expect(self, local_rank: int, now: float) -> None:
        """Starts the deadline by which the rank must come to the end of a restart."""
        slot = self._slots[local_rank]
        slot.due = now + _limit_s(slot.last)

    def _expect_silent_ones(self, report: RestartReport, now: float) -> None:
        """Starts the deadline of ranks that have not even reported that they handle the fault."""
        for number, slot in enumerate(self._slots):
            if slot.goes_on and slot.last and slot.due is None and slot.last.round < report.round:
                self._expect(number, now)

    def _begin(self, number: int, now: float) -> None:
        """Notes the first sign of a fault, unless one is being handled already."""
        if self._state.since is None:
            self._state.since, self._state.failed = now, number

    def _restarted(self, now: float) -> list[Step]:
        """Returns the ends of restarts that all ranks have reached: one for each round.

        Messages of one rank arrive in order, those of two in any: one may handle the next fault already, or the one
        after it, before the message that another has recovered from the first.
        """
        going_on = [slot.last for slot in self._slots if slot.goes_on and slot.last]
        reached = min((report.round for report in going_on), default=self._state.failed)
        if self._state.since is None or (going_on and reached <= self._state.failed):
            return []
        took_s, self._state.since = now - self._state.since, None
        for slot in self._slots:
            # A restart in which all ranks took part shows that they can start.
            slot.starts = 0
        if going_on:
            prefix = going_on[0].call_prefix
        else:
            prefix = ""
        first = max(self._state.failed, reached - _MAX_ENDS)
        ends: list[Step] = [Restarted(number + 1, took_s, number, prefix) for number in range(first, reached)]
        skipped = min(first - self._state.failed, _MAX_SKIPPED)
        if skipped:
            ends[0] = Restarted(first + 1, took_s, first, prefix, skipped)
        if any(report.phase in RESTARTING or report.round > reached for report in going_on):
            self._begin(reached, now)
        return ends

    # What is so.

    def _all_ended_well(self) -> bool:
        return all(slot.exit_code == 0 or slot.is_new for slot in self._slots)

    def _is_left_behind(self, slot: RankSlot) -> bool:
        """Whether others came to the end of a restart without this rank."""
        last = slot.last
        if last is None or last.phase not in AT_WORK:
            return False
        same_call = [other.last for other in self._slots if other.last and other.last.call_prefix == last.call_prefix]
        restarted = [other for other in same_call if other.phase in _RUNS or other.phase is RestartPhase.DONE]
        return any(other.round > last.round for other in restarted)

    def _any_goes_on(self) -> bool:
        return any(slot.goes_on for slot in self._slots)

    def _is_finished(self, prefix: str | None) -> bool:
        """Whether a rank has reported that this call is done; None: any call."""
        finalized = [slot.last for slot in self._slots if slot.last and slot.phase is RestartPhase.DONE]
        return any(prefix in (None, last.call_prefix) for last in finalized)

    def _why_late(self, local_rank: int) -> str:
        """Why level 1 has failed when the deadline of a rank has passed."""
        slot = self._slots[local_rank]
        if slot.phase is RestartPhase.GAVE_UP:
            return self._gave_up(local_rank)
        if slot.phase is RestartPhase.LEFT:
            return self._why_nobody_goes_on()
        limit_s = _limit_s(slot.last)
        return f"{self._name(local_rank)} did not come to the end of the restart within {limit_s:g} s"

    def _why_nobody_goes_on(self) -> str:
        """Returns the reason of a rank whose wrapper gave up, if there is one: other ranks end because of it."""
        for number, slot in enumerate(self._slots):
            if slot.phase is RestartPhase.GAVE_UP:
                return self._gave_up(number)
        return _NOBODY

    def _gave_up(self, local_rank: int) -> str:
        last = self._slots[local_rank].last
        if last is not None and last.reason:
            why = f": {last.reason}"
        else:
            why = ""
        return f"the wrapper of {self._name(local_rank)} gave up{why}"

    def _name(self, local_rank: int) -> str:
        return f"rank {self._state.ranks[local_rank]}"


def _limit_s(report: RestartReport | None) -> float:
    """Returns the longest time that a restart may take, by a wrapper's last report."""
    if report is None:
        return _DEFAULT_LIMIT_S
    return report.limit_s or _DEFAULT_LIMIT_S
