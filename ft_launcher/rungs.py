"""Rung 1 or rung 2: what a node makes of what its ranks' in-process wrappers say, and of deaths. Pure.

    the wrapper of a rank        a death of that rank now is
    none, or finalized           as without wrappers: it ends the cycle
    joining                      withdrawn: the others may count on it
    initialized, handling_*      told to the others, who restart in process
    left                         expected: it has told the others itself
    aborted                      the end of rung 1

Rung 1 takes a death only while every other rank of the node can go on: in the same call, or gone already. It hands over
to rung 2 when no rank is left, or when it does not come to an end within the limit that the ranks gave. Knows no
process, store or clock; `in_process.py` does what is said here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ft_launcher.rung_steps import EndRank, Joined, Restarted, StartAgain, StayAway, Step, TakeOver, Tell
from rank_monitor.contract.messages import Restarter

JOINING, FINALIZED, LEFT, ABORTED = "joining", "finalized", "left", "aborted"
INITIALIZED, STARTING, COMPLETED = "initialized", "handling_starting", "handling_completed"
AT_WORK = frozenset({INITIALIZED, STARTING, COMPLETED})
MOST_STARTS = 3
"""How often a rank is started again alone between two restarts."""
_UNTOLD_LIMIT_S = 600.0
_NOBODY = "no rank of this node goes on"
_LAST_WORD_S = 5.0
"""From a rank's word that it ends to its end, which has the exit code."""


@dataclass
class _Seat:
    """What is known of a local rank.

    `is_new`: started again, and not let in yet. `is_lost`: rung 1 took its death. `due`: when rung 1 has failed here,
    and `why_due`; `is_ended`: it was killed for that. `starts`: how often it was started again since the last restart;
    `is_next`: it will be after this one.
    """

    said: Restarter | None = None
    exit_code: int | None = None
    is_new: bool = False
    is_lost: bool = False
    due: float | None = None
    why_due: str = ""
    starts: int = 0
    is_next: bool = False
    is_ended: bool = False

    @property
    def state(self) -> str:
        return self.said.state if self.said else ""

    @property
    def goes_on(self) -> bool:
        return self.exit_code is None and not self.is_new and self.state in AT_WORK


class Rungs:
    """The local ranks of one cycle.

    Args:
        ranks: the global rank of each local rank, for words.
        enabled: whether there is a rung 1.
        rejoin: whether a dead rank is started again.
        final_codes: exit codes that are meant for the launcher: rung 2 hears of them.
    """

    def __init__(self, ranks: Sequence[int], enabled: bool, rejoin: bool, final_codes: Collection[int]) -> None:
        self._ranks, self._enabled, self._rejoin, self._final_codes = ranks, enabled, rejoin, final_codes
        self._seats = [_Seat() for _ in ranks]
        self._since: float | None = None
        self._failed = -1
        """The iteration that is restarted."""

    @property
    def lost(self) -> set[int]:
        """Local ranks that do not take part now: dead, or started again and not let in yet."""
        return {number for number, seat in enumerate(self._seats) if seat.is_new or seat.is_lost}

    @property
    def is_restarting(self) -> bool:
        """Whether a fault is dealt with in process."""
        return self._since is not None

    def needs_word(self, local_rank: int) -> bool:
        """Whether the last word of a rank that ended matters: it may be under way."""
        seat = self._seats[local_rank]
        return self._enabled and (seat.is_new or seat.state not in ("", FINALIZED))

    def may_have_declared(self, local_rank: int) -> bool:
        """Whether a rank that has not said anything may have: others did, and its word may be under way."""
        return self._enabled and not self._seats[local_rank].state and any(seat.said for seat in self._seats)

    def next_check(self) -> float | None:
        """When `tick` is to be called."""
        return min((seat.due for seat in self._seats if seat.due is not None), default=None)

    def heard(self, local_rank: int, message: Restarter, now: float) -> list[Step]:
        """A rank's wrapper said something; the same once more changes nothing."""
        seat = self._seats[local_rank]
        if not self._enabled or seat.exit_code is not None or message == seat.said:
            return []
        seat.said, steps = message, list[Step]()
        if seat.is_new and message.state in AT_WORK:
            seat.is_new = False
            steps.append(Joined(local_rank, message.iteration))
        if message.state == INITIALIZED:
            steps += self._tell_again(message)
        if message.state == STARTING:
            self._begin(message.iteration, now)
            self._expect(local_rank, message, now)
        elif message.state == ABORTED:
            seat.due, seat.why_due = now + _LAST_WORD_S, self._gave_up(local_rank)
        elif message.state == LEFT and not self._any_goes_on():
            seat.due, seat.why_due = now + _LAST_WORD_S, _NOBODY
        else:
            seat.due = None
        if message.state == COMPLETED:
            self._expect_silent_ones(message, now)
        return steps + self._restarted(now) + self._start_next()

    def died(self, local_rank: int, exit_code: int, now: float) -> list[Step] | None:
        """A rank's process ended; what rung 1 does about it, None: it ends as without wrappers."""
        seat = self._seats[local_rank]
        is_declared = self.needs_word(local_rank)
        seat.exit_code, seat.due = exit_code, None
        if not is_declared or exit_code in self._final_codes:
            return None
        steps = self._newcomer_died(local_rank) if seat.is_new else self._member_died(local_rank, now)
        seat.is_lost = steps is not None
        return steps

    def told(self, local_rank: int, problem: str, now: float) -> list[Step]:
        """The others took note of a death; `problem`: or why not."""
        seat = self._seats[local_rank]
        if not problem:
            seat.is_next, steps = seat.state != LEFT, self._restarted(now)
            if all(other.due is None for other in self._seats):  # they knew, and nobody restarts
                self._since = None
            return steps + self._start_next()
        if seat.is_new:
            return [StayAway(local_rank, f"its wish to join could not be taken back: {problem}")]
        return [TakeOver(local_rank, f"the others could not be told that {self._name(local_rank)} is gone: {problem}")]

    def started(self, local_rank: int) -> None:
        """The rank was started again."""
        self._seats[local_rank] = _Seat(is_new=True, starts=self._seats[local_rank].starts)

    def tick(self, now: float) -> list[Step]:
        """What is due by now."""
        late = [(seat.due, number) for number, seat in enumerate(self._seats) if seat.due is not None]
        due, number = min(late, default=(now, -1))
        if number < 0 or due > now:
            return []
        seat = self._seats[number]
        if seat.is_ended or not self._is_left_behind(seat):
            return [TakeOver(number, seat.why_due)]
        seat.is_ended, seat.due = True, now + _LAST_WORD_S
        return [EndRank(number, seat.why_due)]

    # Deaths.

    def _newcomer_died(self, local_rank: int) -> list[Step]:
        """It had not been let in: the others go on."""
        said = self._seats[local_rank].said
        if said is None:
            self._seats[local_rank].is_next = True
            return self._start_next()
        if said.state != JOINING or self._is_finished(said.prefix):
            return []
        return [self._tell(local_rank, said)]

    def _member_died(self, local_rank: int, now: float) -> list[Step] | None:
        seat = self._seats[local_rank]
        said = seat.said
        assert said is not None
        if said.state == ABORTED:
            return [TakeOver(local_rank, self._gave_up(local_rank))]
        if said.state == LEFT:
            return [] if self._any_goes_on() or self._is_finished(said.prefix) else [TakeOver(local_rank, _NOBODY)]
        if self._is_left_behind(seat) and self._is_finished(said.prefix):
            return []
        why_not = self._why_not(said)
        if seat.exit_code == 0 and (why_not or self._all_ended_well()):
            return None
        if why_not:
            return [TakeOver(local_rank, f"{self._name(local_rank)} is gone, and {why_not}")]
        self._begin(said.iteration, now)
        return [self._tell(local_rank, said)]

    def _tell(self, local_rank: int, said: Restarter) -> Tell:
        limit_s = said.limit_s or _UNTOLD_LIMIT_S
        return Tell(local_rank, said.member, said.prefix, limit_s, said.state == JOINING)

    def _tell_again(self, message: Restarter) -> list[Step]:
        """A further call of a wrapped function begins: those that are gone will not come to its start."""
        steps = list[Step]()
        for number, seat in enumerate(self._seats):
            is_gone = seat.is_lost and seat.exit_code is not None
            if is_gone and seat.said and message.prefix and seat.said.prefix != message.prefix:
                seat.said = replace(seat.said, prefix=message.prefix)
                limit_s = message.limit_s or _UNTOLD_LIMIT_S
                steps.append(Tell(number, seat.said.member, message.prefix, limit_s, joins=False))
        return steps

    def _start_next(self) -> list[Step]:
        """Not while the others restart: it would take their time, and join at the next restart only."""
        steps = list[Step]()
        for number, seat in enumerate(self._seats):
            if seat.is_next and not self.is_restarting:
                seat.is_next = False
                steps += self._start_again(number)
        return steps

    def _start_again(self, local_rank: int) -> list[Step]:
        seat = self._seats[local_rank]
        if not self._rejoin or self._is_finished(seat.said.prefix if seat.said else None):
            return []
        if seat.is_new and seat.exit_code == 0:
            return [StayAway(local_rank, "it ended before it was let in")]
        if seat.starts >= MOST_STARTS:
            return [StayAway(local_rank, f"it died {seat.starts + 1} times between two restarts")]
        seat.starts += 1
        return [StartAgain(local_rank)]

    def _why_not(self, said: Restarter) -> str:
        """Why rung 1 cannot take the death of a rank that said this; empty: it can."""
        if not said.prefix:
            return "its wrapper uses a store in which the launcher cannot tell the others"
        for number, other in enumerate(self._seats):
            if other.said is said or other.is_lost or other.is_new or other.state in (LEFT, ABORTED):
                continue
            if other.said is None or other.state not in AT_WORK or other.said.prefix != said.prefix:
                return f"{self._name(number)} is not in the wrapped function"
        return "" if self._any_goes_on() else _NOBODY

    # Restarts.

    def _expect(self, local_rank: int, said: Restarter, now: float) -> None:
        """From now on the rank owes the end of a restart."""
        seat, limit_s = self._seats[local_rank], said.limit_s or _UNTOLD_LIMIT_S
        seat.due = now + limit_s
        seat.why_due = f"{self._name(local_rank)} did not come to the end of the restart within {limit_s:g} s"

    def _expect_silent_ones(self, message: Restarter, now: float) -> None:
        """Those that have not said so much as that they deal with the fault."""
        for number, seat in enumerate(self._seats):
            if seat.goes_on and seat.said and seat.due is None and seat.said.iteration < message.iteration:
                self._expect(number, message, now)

    def _begin(self, iteration: int, now: float) -> None:
        """The first sign of a fault, unless one is dealt with already."""
        if self._since is None:
            self._since, self._failed = now, iteration

    def _restarted(self, now: float) -> list[Step]:
        """The ends of restarts, once all ranks have come to them: one for each iteration.

        Words of one rank come in order, those of two in any: one may deal with the next fault already, or with the one
        after it, before it is known that another came to the end of the first.
        """
        going_on = [seat.said for seat in self._seats if seat.goes_on and seat.said]
        reached = min((word.iteration for word in going_on), default=self._failed)
        if self._since is None or (going_on and reached <= self._failed):
            return []
        took_s, self._since = now - self._since, None
        for seat in self._seats:
            seat.starts = 0
        prefix = going_on[0].prefix if going_on else ""
        ends: list[Step] = [Restarted(number + 1, took_s, number, prefix) for number in range(self._failed, reached)]
        if any(word.state == STARTING or word.iteration > reached for word in going_on):
            self._begin(reached, now)
        return ends

    # What is so.

    def _all_ended_well(self) -> bool:
        return all(seat.exit_code == 0 or seat.is_new for seat in self._seats)

    def _is_left_behind(self, seat: _Seat) -> bool:
        """Whether others came to the end of a restart without this rank."""
        said = seat.said
        return (
            said is not None
            and said.state in AT_WORK
            and any(
                other.said and other.state in (COMPLETED, FINALIZED) and other.said.iteration > said.iteration
                for other in self._seats
                if other.said and other.said.prefix == said.prefix
            )
        )

    def _any_goes_on(self) -> bool:
        return any(seat.goes_on for seat in self._seats)

    def _is_finished(self, prefix: str | None) -> bool:
        """Whether a call is done, as one rank said; None: whichever."""
        return any(seat.said and seat.state == FINALIZED and prefix in (None, seat.said.prefix) for seat in self._seats)

    def _gave_up(self, local_rank: int) -> str:
        said = self._seats[local_rank].said
        why = f": {said.reason}" if said is not None and said.reason else ""
        return f"the wrapper of {self._name(local_rank)} gave up{why}"

    def _name(self, local_rank: int) -> str:
        return f"rank {self._ranks[local_rank]}"
