"""A decision of recovery level 1 as the journal's event `in_process_decision`: what happened, what was known, what
follows. Pure.

`in_process.py` has the event written, if `is_recorded` says so, with the fields of `to_record`. `ft_launcher replay`
decides the same again (`decide_again`) and compares the steps: so a change of `recovery_level.py` that decides
otherwise shows in old journals.

The fields of the event:

    happened   what      the kind of event (`_HAPPENED`), with the fields of the class
    known      ranks     the global rank of each local rank
               rejoin, final_codes     as in `RecoveryState`
               wrappers  for each group of ranks with equal values: `local_ranks`, the values that differ from the start
                         (fields of `RankSlot`, and of its last report), `due_s` for each rank that has a deadline
               since_s, failed         of the restart that is under way; absent: there is none
    follows    a list of steps, each with `step` (`_STEPS`) and the fields of the class; null: the death counts as
               without wrappers

Ranks that have the same values share one item of `wrappers`, and values that are as at the start are left out: so a
decision about eight ranks is a line of half a kilobyte. The words in the journal are those of all releases, so that
old journals can be replayed: phases that mean the same to the agent have one word, and a round is an `iteration`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ft_launcher.agent.in_process.recovery_level import RankSlot, RecoveryLevels, RecoveryState
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
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.restart_phase import AT_WORK, ENTERING, RESTARTING, RestartPhase
from rank_monitor.contract.wire.json_record import from_json
from rank_monitor.contract.wire.messages import NO_ITERATION, RestartReport

NOTICE = "notify_loss"
"""The name of the only step about which the journal has no event of its own."""

# The three tables hold words in files: a word may be added, but none may change.
_STEPS: Mapping[type[Step], str] = {
    NotifyLoss: NOTICE,
    StartAgain: "start_again",
    StayAway: "stay_away",
    Joined: "joined",
    Restarted: "restarted",
    EndRank: "end_rank",
    TakeOver: "take_over",
}
_HAPPENED: Mapping[str, type[Happened]] = {
    "heard": Reported,
    "died": Died,
    "loss_notified": LossNotified,
    "deadline": DeadlinePassed,
}
_PHASES: Mapping[str, RestartPhase] = {
    "joining": RestartPhase.JOINING,
    "initialized": RestartPhase.ASSIGNING,
    "handling_starting": RestartPhase.RECOVERING,
    "handling_completed": RestartPhase.RUNNING,
    "finalized": RestartPhase.DONE,
    "left": RestartPhase.LEFT,
    "aborted": RestartPhase.GAVE_UP,
}
"""The `state` of a message in the journal -> the first of the phases for which it stands."""
_STATES: Mapping[RestartPhase, str] = {
    **dict.fromkeys(AT_WORK, "handling_completed"),
    **dict.fromkeys(RESTARTING, "handling_starting"),
    **dict.fromkeys(ENTERING, "initialized"),
    **{phase: state for state, phase in _PHASES.items()},
}
_OF_EACH = ("last", "due")
"""Fields of a `RankSlot` that have a form of their own in the record: a message, and a deadline for each rank."""
_DIGITS = 6
"""Decimals of seconds, as everywhere in the journal."""


def is_recorded(happened: Happened, known: RecoveryState, steps: list[Step] | None) -> bool:
    """Returns whether the journal has an event for this decision.

    It has one if a step follows, and for each death that level 1 handles. A death that counts as without wrappers has
    one only if it is a failure beside ranks with wrappers: every job ends with ranks that exit with 0.
    """
    if isinstance(happened, Died) and steps is None:
        return happened.exit_code != 0 and any(slot.last for slot in known.slots)
    return bool(steps) or isinstance(happened, Died)


def to_record(happened: Happened, known: RecoveryState, steps: list[Step] | None, now: float) -> dict[str, Any]:
    """Returns the fields of the event, without the number of its cycle.

    Args:
        happened: what was decided about.
        known: the state before that.
        steps: what follows; None: as `RecoveryLevels.on` returns it.
        now: when it happened (monotonic seconds). The record has ages in place of moments.
    """
    (what,) = (name for name, kind in _HAPPENED.items() if type(happened) is kind)
    values = dict(vars(happened))
    if isinstance(happened, Reported):
        values["message"] = _of_report(values.pop("report"))
    return {
        "happened": {"what": what, **values},
        "known": _of_state(known, now),
        "follows": _of_steps(steps),
    }


def decide_again(happened: Any, known: Any) -> list[dict[str, Any]] | None:
    """Decides again what an event of the journal is about; returns the steps, in the event's form.

    Args:
        happened, known: the fields of the event.

    Raises:
        ProtocolError: the fields are not those of such an event.
    """
    now = 0.0  # Any moment will do, since the event has ages.
    try:
        state = _state(known, now)
        event = _happened(happened, state.ranks)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"a decision about a restart in process does not fit: {error!r}") from None
    return _of_steps(RecoveryLevels(state).on(event, now))


def _happened(record: Any, ranks: Sequence[int]) -> Happened:
    """Returns what happened, by the event's field. Raises ProtocolError, KeyError, TypeError or ValueError."""
    values = dict(record)
    kind = _HAPPENED[values.pop("what")]
    found: Happened
    if kind is Reported:
        reported = from_json(_Reported, values)
        found = Reported(reported.local_rank, reported.message.report())
    else:
        found = from_json(kind, values)
    if not isinstance(found, DeadlinePassed):
        _check(found.local_rank, ranks)
    return found


def _of_steps(steps: Sequence[Step] | None) -> list[dict[str, Any]] | None:
    """Returns steps in the event's form: rounds are called iterations there. None stays None."""
    if steps is None:
        return None
    found = [{"step": _STEPS[type(step)], **asdict(step)} for step in steps]
    for step in found:
        if "number" in step:
            step["iteration"] = step.pop("number")
        if "took_s" in step:
            step["took_s"] = round(step["took_s"], _DIGITS)
    return found


# What was known.


def _of_state(state: RecoveryState, now: float) -> dict[str, Any]:
    """Returns the event's field `known`. Ranks in the state of the start are left out.

    Deadlines of ranks differ by microseconds, so they are no part of the key by which ranks share an item: only whether
    there is a deadline is. `now`: the moment from which ages count (monotonic seconds).
    """
    alike: dict[str, dict[str, Any]] = {}
    for local_rank, slot in enumerate(state.slots):
        values = _of_slot(slot, state.ranks[local_rank])
        if slot == RankSlot():
            continue
        key = json.dumps([values, slot.due is None])
        wrapper = alike.setdefault(key, {"local_ranks": [], **values})
        wrapper["local_ranks"].append(local_rank)
        if slot.due is not None:
            wrapper.setdefault("due_s", []).append(round(slot.due - now, _DIGITS))
    found: dict[str, Any] = {
        "ranks": list(state.ranks),
        "rejoin": state.rejoin,
        "final_codes": sorted(state.final_codes),
        "wrappers": list(alike.values()),
    }
    if state.since is not None:
        found |= {"since_s": round(now - state.since, _DIGITS), "failed": state.failed}
    return found


def _of_slot(slot: RankSlot, rank: int) -> dict[str, Any]:
    """Returns the values of a rank that are not as at the start, without its deadline. `rank`: its global rank."""
    at_start = vars(RankSlot())
    found = {name: value for name, value in vars(slot).items() if name not in _OF_EACH and value != at_start[name]}
    if slot.last is not None:
        found |= _of_report(slot.last)
        if slot.last.entry_rank == rank:
            del found["member"]
    return found


@dataclass(frozen=True)
class _Message:
    """A report of a rank's wrapper, in the event's form.

    Attributes:
        state: the word for its phase (`_PHASES`).
        member: the rank at the entry of the wrapped call.
        iteration: the number of the round.
        prefix: of the keys of the call.
        limit_s: how long a restart may take (seconds).
        reason: why the wrapper gave up; empty: it did not.
    """

    state: str
    member: int
    iteration: int
    prefix: str
    limit_s: float
    reason: str = ""

    def report(self) -> RestartReport:
        """Returns the report. Fields by which nothing is decided here have neutral values.

        Raises:
            KeyError: `state` is no word for a phase.
        """
        return RestartReport(
            phase=_PHASES[self.state],
            round=self.iteration,
            began_ns=0,
            is_timed=True,
            soft_timeout_s=0.0,
            hard_timeout_s=0.0,
            grace_s=0.0,
            entry_rank=self.member,
            call_prefix=self.prefix,
            limit_s=self.limit_s,
            reason=self.reason,
        )


@dataclass(frozen=True)
class _Reported:
    """The field `happened` of the event where a rank's wrapper reported something: `Reported`, with the report in the
    event's form."""

    local_rank: int
    message: _Message


@dataclass(frozen=True)
class _Known:
    """The field `known` of the event, of which `wrappers` is read in a second step: its items have more fields.

    Journals hold moments as ages: `since_s` is how long ago the first sign of the fault came; None: no fault is being
    handled.
    """

    ranks: list[int]
    rejoin: bool
    final_codes: list[int]
    wrappers: list[dict[str, Any]]
    since_s: float | None = None
    failed: int = NO_ITERATION


@dataclass(frozen=True)
class _Alike:
    """The ranks for which an item of `wrappers` holds, and the seconds until the deadline of each; None: no
    deadline."""

    local_ranks: list[int]
    due_s: list[float] | None = None


def _state(record: Any, now: float) -> RecoveryState:
    """Returns the state, by the event's field `known`. The opposite of `_of_state`.

    `now`: the moment from which its ages count. Raises ProtocolError, KeyError, TypeError or ValueError.
    """
    known = from_json(_Known, record)
    state = RecoveryState.at_start(known.ranks, known.rejoin, known.final_codes)
    if known.since_s is not None:
        state.since, state.failed = now - known.since_s, known.failed
    for wrapper in known.wrappers:
        alike = from_json(_Alike, wrapper, ignore_unknown=True)
        for local_rank in alike.local_ranks:
            _check(local_rank, known.ranks)
            state.slots[local_rank] = _slot(wrapper, known.ranks[local_rank])
        if alike.due_s is not None:
            for local_rank, due_s in zip(alike.local_ranks, alike.due_s, strict=True):
                state.slots[local_rank].due = now + due_s
    return state


def _slot(wrapper: Mapping[str, Any], rank: int) -> RankSlot:
    """Returns what an item of `wrappers` says of a rank. `rank`: its global rank, the default of `member`.

    An item has the fields of a `RankSlot` and those of a report beside each other. A report is there if any of its
    fields is.
    """
    slot = from_json(RankSlot, wrapper, ignore_unknown=True)
    others = vars(slot).keys() | {member.name for member in fields(_Alike)}
    message = {name: value for name, value in wrapper.items() if name not in others}
    if message:
        slot.last = from_json(_Message, {"member": rank, **message}).report()
    return slot


def _of_report(report: RestartReport) -> dict[str, Any]:
    """Returns a report in the event's form. An empty reason is left out."""
    message = _Message(
        state=_STATES[report.phase],
        member=report.entry_rank,
        iteration=report.round,
        prefix=report.call_prefix,
        limit_s=report.limit_s,
        reason=report.reason,
    )
    return {name: value for name, value in vars(message).items() if name != "reason" or value}


def _check(local_rank: int, ranks: Sequence[int]) -> None:
    """Raises ProtocolError where there is no such local rank: a journal may have any number in its place."""
    if not 0 <= local_rank < len(ranks):
        raise ProtocolError(f"there is no local rank {local_rank}")
