"""Decides between recovery level 1 and 2, from the reports of in-process wrappers and the deaths of ranks. Pure.

Level 1 is in-process restart: the ranks keep their processes, and call the wrapped function again. Level 2 is a new
cycle: all ranks are stopped and started again. `rank_monitor/contract/restart_phase.py` explains the phases of a rank.

Level 1 handles the death of a rank as follows. The agent notifies the other ranks over their store (`NotifyLoss`). They
restart without the dead rank. The agent starts that rank again, alone (`StartAgain`), unless it is not to rejoin, or
has died too often. The new process joins at the next restart of the others (`Joined`).

Level 1 handles a death only while every other rank of the node can go on: in the same call of the wrapped function, or
gone already. What a death means depends on the phase that the rank reported last:

    none, or DONE      as without wrappers: the death ends the cycle
    JOINING            the request to join is withdrawn, since the others may count on the rank
    of AT_WORK         the others are notified, and restart in process
    LEFT               expected: the rank has notified the others itself
    GAVE_UP            the end of level 1

Level 2 takes over (`TakeOver`) when no rank is left that goes on, or when a restart does not come to its end within the
limit that the ranks gave.

Knows no process, store or clock. `in_process.py` feeds it and carries out the steps; `ft_launcher replay` feeds it from
the journal.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ft_launcher.agent.in_process.recovery_steps import (
    DeadlinePassed,
    Died,
    EndRank,
    Happened,
    Joined,
    LossNotified,
    NotifyLoss,
    Reported,
    Restarted,
    StartAgain,
    StayAway,
    Step,
    TakeOver,
)
from rank_monitor.contract.restart_phase import AT_WORK, ENTERING, GONE, RESTARTING, RestartPhase
from rank_monitor.contract.wire.messages import RestartReport

_RUNS = frozenset({RestartPhase.PREPARING, RestartPhase.RUNNING, RestartPhase.WAITING})
"""In these phases the rank has come to the end of the restart."""
_CHANGES_NOTHING = frozenset(
    {RestartPhase.NONE, RestartPhase.INTERRUPTING, RestartPhase.COMPLETING, RestartPhase.LEAVING}
)
"""Phases in which a death means the same, and the same is awaited of the rank, as in the phase before."""
MAX_STARTS = 3
"""How often a rank is started again alone between two restarts. One that dies at each start, for example for a broken
device, must not be started for ever."""
_MAX_ENDS = 100
"""Ends of restarts that are reported at once, each by a step. Ranks are at most a few rounds apart. There are more
where the launcher stood still, or where a rank or a journal has any number."""
_MAX_SKIPPED = 1_000_000
"""Ends of restarts that are counted without a step of their own. More are not counted: so many restarts take hours."""
_DEFAULT_LIMIT_S = 600.0
"""Seconds for a restart of a wrapper that reports no limit. Without a limit a lost restart would never reach level
2."""
_NOBODY = "no rank of this node goes on"
_LAST_MESSAGE_S = 5.0
"""Seconds from a rank's report that it leaves, or from its kill, to the end of its process, which has the exit code."""


@dataclass
class RankSlot:
    """What is known of a local rank. The journal holds these fields under these names.

    Attributes:
        last: the last report of its wrapper by which something changed here; None: there was none.
        exit_code: of its process; None: it runs.
        is_new: whether the rank was started again, and the others have not let it in yet.
        is_lost: whether level 1 handles its death.
        due: when level 1 has failed for this rank (monotonic seconds); None: nothing is awaited of it.
        starts: how often the rank was started again since the last restart.
        is_next: whether the rank is to be started again, once no restart is under way.
        is_ended: whether the rank was killed because its deadline had passed.
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
        """The phase that the rank has reported last; NONE: it has reported none."""
        if self.last:
            return self.last.phase
        return RestartPhase.NONE

    @property
    def goes_on(self) -> bool:
        """Whether the rank takes part in a call of the wrapped function now."""
        return self.exit_code is None and not self.is_new and self.phase in AT_WORK

    def is_changed_by(self, report: RestartReport) -> bool:
        """Returns whether a report changes what is known of the rank."""
        if report == self.last or report.phase in _CHANGES_NOTHING:
            return False
        if self.last is None or report.phase not in ENTERING:
            return True
        # A rank that enters the next round of the same call is where it was.
        is_in_call = self.phase in AT_WORK or self.phase is RestartPhase.JOINING
        return not (is_in_call and report.call_prefix == self.last.call_prefix)


@dataclass
class RecoveryState:
    """What is known of the local ranks of one cycle. The journal holds these fields under these names.

    Attributes:
        ranks: the global rank of each local rank, for the texts of reasons.
        rejoin: whether a dead rank is started again.
        final_codes: exit codes that are a request to the launcher, such as "do not restart". Level 2 handles these.
        slots: what is known of each local rank.
        since: when the first sign of the fault came that is being handled in process (monotonic seconds); None: there
            is no such fault.
        failed: the number of the round that failed and is restarted; -1: none yet.
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
    """The decisions about the local ranks of one cycle.

    Args:
        state: what is known at the beginning. Each event changes it.
        enabled: whether level 1 is used at all. If not, reports of wrappers are ignored, as if there were none.
    """

    def __init__(self, state: RecoveryState, enabled: bool = True) -> None:
        self._state, self._enabled = state, enabled
        self._slots = state.slots

    @property
    def lost(self) -> set[int]:
        """The local ranks that do not take part now: dead, or started again and not let in yet."""
        return {number for number, slot in enumerate(self._slots) if slot.is_new or slot.is_lost}

    @property
    def is_restarting(self) -> bool:
        """Whether a fault is being handled in process."""
        return self._state.since is not None

    @property
    def is_used(self) -> bool:
        """Whether a rank of this node has reported a wrapper. Until then each death counts as without wrappers."""
        return any(slot.last is not None or slot.is_new for slot in self._slots)

    def is_declared(self, local_rank: int) -> bool:
        """Returns whether the end of a rank is one that level 1 handles: by its last report it was in a wrapped call,
        or is on its way into one.

        What the rank's monitor has must be received before this is asked.
        """
        slot = self._slots[local_rank]
        return slot.is_new or slot.phase not in (RestartPhase.NONE, RestartPhase.DONE)

    def next_check(self) -> float | None:
        """Returns when `DeadlinePassed` is due (monotonic seconds); None: no deadline runs."""
        return min((slot.due for slot in self._slots if slot.due is not None), default=None)

    def known(self) -> RecoveryState:
        """Returns a copy of the present state, which further events do not change."""
        return replace(self._state, slots=[replace(slot) for slot in self._slots])

    def on(self, happened: Happened, now: float) -> list[Step] | None:
        """Applies an event; returns the steps of level 1, or None for a death that counts as without wrappers.

        The one way in for events that decide something: from `in_process.py` while ranks run, and from a journal, where
        the same events are written down, at a replay.

        Args:
            happened: the event.
            now: when it happened (monotonic seconds).
        """
        match happened:
            case Reported(local_rank, report):
                return self._on_message(local_rank, report, now)
            case Died(local_rank, exit_code):
                return self._died(local_rank, exit_code, now)
            case LossNotified(local_rank, problem):
                return self._loss_notified(local_rank, problem, now)
            case DeadlinePassed():
                return self._tick(now)

    def _on_message(self, local_rank: int, report: RestartReport, now: float) -> list[Step]:
        """Handles a report of a rank's wrapper; a repeated report changes nothing. Returns the steps that follow."""
        slot = self._slots[local_rank]
        if not self._enabled or slot.exit_code is not None or not slot.is_changed_by(report):
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

    def note_exit(self, local_rank: int, exit_code: int) -> None:
        """Notes that a rank's process has ended: no later report of the rank counts, and nothing is awaited of it."""
        slot = self._slots[local_rank]
        slot.exit_code, slot.due = exit_code, None

    def _died(self, local_rank: int, exit_code: int, now: float) -> list[Step] | None:
        """Handles a rank's end.

        Returns:
            None: level 1 does not handle the end. It counts as that of a rank without a wrapper: an error ends the
            cycle.
            A list: level 1 handles the end, and these steps follow. The list is empty where nothing is to be done, for
            instance because the rank had left before. A list with `TakeOver` ends the cycle: level 1 has failed.
        """
        slot = self._slots[local_rank]
        is_declared = self.is_declared(local_rank)
        self.note_exit(local_rank, exit_code)
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

    def _loss_notified(self, local_rank: int, problem: str, now: float) -> list[Step]:
        """Handles the outcome of a `NotifyLoss`; returns the steps that follow.

        Args:
            local_rank: the rank that is gone.
            problem: why the other ranks could not be notified; empty: they have taken note.
            now: monotonic seconds.
        """
        slot = self._slots[local_rank]
        if not problem:
            slot.is_next, steps = slot.phase is not RestartPhase.LEFT, self._restarted(now)
            # The others knew of the loss already, and nobody restarts: no fault is being handled any more.
            if all(other.due is None for other in self._slots):
                self._state.since = None
            return steps + self._start_next()
        if slot.is_new:
            return [StayAway(local_rank, f"its request to join could not be cancelled: {problem}")]
        return [
            TakeOver(local_rank, f"the others could not be notified that {self._name(local_rank)} is gone: {problem}")
        ]

    def started(self, local_rank: int) -> None:
        """Notes that a rank was started again, as `StartAgain` asked."""
        self._slots[local_rank] = RankSlot(is_new=True, starts=self._slots[local_rank].starts)

    def _tick(self, now: float) -> list[Step]:
        """Returns the step for the earliest deadline if it has passed."""
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
        """Returns the steps for a death before the rank was let in: the others go on without it."""
        last = self._slots[local_rank].last
        if last is None:
            self._slots[local_rank].is_next = True
            return self._start_next()
        if last.phase is not RestartPhase.JOINING or self._is_finished(last.call_prefix):
            return []
        return [self._notify(local_rank, last)]

    def _member_died(self, local_rank: int, now: float) -> list[Step] | None:
        """Returns the steps for the death of a rank that took part; None: it counts as without wrappers."""
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
        obstacle = self._obstacle(last)
        if slot.exit_code == 0 and (obstacle or self._all_ended_well()):
            return None
        if obstacle:
            return [TakeOver(local_rank, f"{self._name(local_rank)} is gone, and {obstacle}")]
        self._begin(last.round, now)
        return [self._notify(local_rank, last)]

    def _notify(self, local_rank: int, last: RestartReport) -> NotifyLoss:
        """Returns the step that notifies the others of a death. `last`: the last report of the dead rank."""
        joins = last.phase is RestartPhase.JOINING
        return NotifyLoss(local_rank, last.entry_rank, last.call_prefix, _limit_s(last), joins)

    def _notify_again(self, report: RestartReport) -> list[Step]:
        """Returns the steps that notify a further call of the wrapped function of ranks that are gone.

        Each call has keys of its own in the store. Without these steps its start would wait for the ranks.
        """
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
        """Returns the steps that start ranks again, unless a restart is under way.

        A start would delay that restart, and the new rank can join only at the next one.
        """
        steps = list[Step]()
        for number, slot in enumerate(self._slots):
            if slot.is_next and not self.is_restarting:
                slot.is_next = False
                steps += self._start_again(number)
        return steps

    def _start_again(self, local_rank: int) -> list[Step]:
        """Returns the step that starts a rank again, or why it stays away; empty: nothing is to be done or said."""
        slot = self._slots[local_rank]
        if not self._state.rejoin or self._is_finished(slot.last.call_prefix if slot.last else None):
            return []
        # The rank ended well without having taken part: another start would do the same.
        if slot.is_new and slot.exit_code == 0:
            return [StayAway(local_rank, "it ended before it had joined")]
        if slot.starts >= MAX_STARTS:
            return [StayAway(local_rank, f"it died {slot.starts + 1} times between two restarts")]
        slot.starts += 1
        return [StartAgain(local_rank)]

    def _obstacle(self, last: RestartReport) -> str:
        """Returns why level 1 cannot handle the death of a rank whose last report is `last`; empty: it can."""
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
        """Sets the deadline by which the rank must come to the end of a restart."""
        slot = self._slots[local_rank]
        slot.due = now + _limit_s(slot.last)

    def _expect_silent_ones(self, report: RestartReport, now: float) -> None:
        """Sets the deadline of ranks that have not even reported that they handle the fault.

        Args:
            report: of a rank that has come to the end of the restart already.
            now: monotonic seconds.
        """
        for number, slot in enumerate(self._slots):
            if slot.goes_on and slot.last and slot.due is None and slot.last.round < report.round:
                self._expect(number, now)

    def _begin(self, number: int, now: float) -> None:
        """Notes the first sign of a fault in round `number`, unless a fault is being handled already."""
        if self._state.since is None:
            self._state.since, self._state.failed = now, number

    def _restarted(self, now: float) -> list[Step]:
        """Returns the ends of restarts that all ranks have reached: one step for each round.

        Messages of one rank arrive in order; messages of two ranks do not. One rank may report the next fault, or the
        one after that, before the report arrives that another rank has recovered from the first fault.
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

    # Facts about the ranks.

    def _all_ended_well(self) -> bool:
        """Returns whether all ranks that took part have ended with exit code 0."""
        return all(slot.exit_code == 0 or slot.is_new for slot in self._slots)

    def _is_left_behind(self, slot: RankSlot) -> bool:
        """Returns whether others came to the end of a restart without this rank."""
        last = slot.last
        if last is None or last.phase not in AT_WORK:
            return False
        same_call = [other.last for other in self._slots if other.last and other.last.call_prefix == last.call_prefix]
        restarted = [other for other in same_call if other.phase in _RUNS or other.phase is RestartPhase.DONE]
        return any(other.round > last.round for other in restarted)

    def _any_goes_on(self) -> bool:
        """Returns whether a rank of this node takes part in a call now."""
        return any(slot.goes_on for slot in self._slots)

    def _is_finished(self, prefix: str | None) -> bool:
        """Returns whether a rank has reported that the call with this prefix is done; None: any call."""
        finalized = [slot.last for slot in self._slots if slot.last and slot.phase is RestartPhase.DONE]
        return any(prefix in (None, last.call_prefix) for last in finalized)

    def _why_late(self, local_rank: int) -> str:
        """Returns why level 1 has failed when the deadline of a rank has passed."""
        slot = self._slots[local_rank]
        if slot.phase is RestartPhase.GAVE_UP:
            return self._gave_up(local_rank)
        if slot.phase is RestartPhase.LEFT:
            return self._why_nobody_goes_on()
        limit_s = _limit_s(slot.last)
        return f"{self._name(local_rank)} did not come to the end of the restart within {limit_s:g} s"

    def _why_nobody_goes_on(self) -> str:
        """Returns why no rank goes on: the reason of a rank whose wrapper gave up, if there is one.

        The others leave because of that rank.
        """
        for number, slot in enumerate(self._slots):
            if slot.phase is RestartPhase.GAVE_UP:
                return self._gave_up(number)
        return _NOBODY

    def _gave_up(self, local_rank: int) -> str:
        """Returns the text that a rank's wrapper gave up, with the reason that it has reported."""
        last = self._slots[local_rank].last
        if last is not None and last.reason:
            reason = f": {last.reason}"
        else:
            reason = ""
        return f"the wrapper of {self._name(local_rank)} gave up{reason}"

    def _name(self, local_rank: int) -> str:
        """Returns a rank in words, by its global number."""
        return f"rank {self._state.ranks[local_rank]}"


def _limit_s(report: RestartReport | None) -> float:
    """Returns the longest time that a restart may take, by a wrapper's last report (seconds)."""
    if report is None:
        return _DEFAULT_LIMIT_S
    return report.limit_s or _DEFAULT_LIMIT_S
