"""A decision of level 1 as the journal's event `in_process_decision`: what it was made of, and what follows. Pure.

`in_process.py` has it written, and `ft_launcher replay` decides it again. What most ranks have in common, and what is
as at the start, takes no room: a decision about eight ranks is a line of half a kilobyte. The journal's words for the
phases of a rank are those of all releases: phases that are alike to the agent have one.
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
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.restart_phase import AT_WORK, ENTERING, RESTARTING, RestartPhase
from rank_monitor.contract.wire.json_record import from_json
from rank_monitor.contract.wire.messages import NO_ITERATION, RestartReport

NOTICE = "notify_loss"
"""The name of the only step that no other event of the journal tells."""
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
    "heard": Heard,
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
"""The `state` of a message in the journal -> the first of the phases that it stands for."""
_STATES: Mapping[RestartPhase, str] = {
    **dict.fromkeys(AT_WORK, "handling_completed"),
    **dict.fromkeys(RESTARTING, "handling_starting"),
    **dict.fromkeys(ENTERING, "initialized"),
    **{phase: state for state, phase in _PHASES.items()},
}
_OF_EACH = ("last", "due")
"""Fields of a slot that have a form of their own in the record."""
_DIGITS = 6
"""Of seconds, as everywhere in the journal."""


def is_recorded(happened: Happened, known: RecoveryState, steps: list[Step] | None) -> bool:
    """Returns whether the journal holds this: a step follows, or a rank died that has a wrapper, or beside ranks that
    have one. An end that counts as without wrappers is held only where it is a failure: each job ends with such.
    """
    if isinstance(happened, Died) and steps is None:
        return happened.exit_code != 0 and any(slot.last for slot in known.slots)
    return bool(steps) or isinstance(happened, Died)


def to_record(happened: Happened, known: RecoveryState, steps: list[Step] | None, now: float) -> dict[str, Any]:
    """Returns the fields of the event but its cycle.

    Args:
        known: before it happened.
        steps: what follows; None as of `RecoveryLevels.on`.
        now: when it happened (monotonic seconds).
    """
    (what,) = (name for name, kind in _HAPPENED.items() if type(happened) is kind)
    values = dict(vars(happened))
    if isinstance(happened, Heard):
        values["message"] = _of_report(values.pop("report"))
    return {
        "happened": {"what": what, **values},
        "known": _of_state(known, now),
        "follows": _of_steps(steps),
    }


def decide_again(happened: Any, known: Any) -> list[dict[str, Any]] | None:
    """Returns the steps that follow now, as the event has them.

    Args:
        happened, known: fields of the event.

    Raises:
        ProtocolError: they do not fit.
    """
    now = 0.0  # the event has ages
    try:
        state = _state(known, now)
        event = _happened(happened, state.ranks)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"a decision about a restart in process does not fit: {error!r}") from None
    return _of_steps(RecoveryLevels(state).on(event, now))


def _happened(record: Any, ranks: Sequence[int]) -> Happened:
    values = dict(record)
    kind = _HAPPENED[values.pop("what")]
    found: Happened
    if kind is Heard:
        heard = from_json(_Heard, values)
        found = Heard(heard.local_rank, heard.message.report())
    else:
        found = from_json(kind, values)
    if not isinstance(found, DeadlinePassed):
        _check(found.local_rank, ranks)
    return found


def _of_steps(steps: Sequence[Step] | None) -> list[dict[str, Any]] | None:
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
    """Returns what is not as at the start, but the deadline."""
    at_start = vars(RankSlot())
    found = {name: value for name, value in vars(slot).items() if name not in _OF_EACH and value != at_start[name]}
    if slot.last is not None:
        found |= _of_report(slot.last)
        if slot.last.entry_rank == rank:
            del found["member"]
    return found


@dataclass(frozen=True)
class _Message:
    """A report of a rank's wrapper, as the event has it. `iteration`: the round."""

    state: str
    member: int
    iteration: int
    prefix: str
    limit_s: float
    reason: str = ""

    def report(self) -> RestartReport:
        """Returns the report, with what decides nothing here as if it were not known.

        Raises:
            KeyError: no phase has this state.
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
class _Heard:
    """The field `happened` of the event where a rank's wrapper reported something."""

    local_rank: int
    message: _Message


@dataclass(frozen=True)
class _Known:
    """The field `known` of the event."""

    ranks: list[int]
    rejoin: bool
    final_codes: list[int]
    wrappers: list[dict[str, Any]]
    since_s: float | None = None
    failed: int = NO_ITERATION


@dataclass(frozen=True)
class _Alike:
    """The ranks that an item of `wrappers` holds for, and the seconds to the deadline of each, where they have one."""

    local_ranks: list[int]
    due_s: list[float] | None = None


def _state(record: Any, now: float) -> RecoveryState:
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
    slot = from_json(RankSlot, wrapper, ignore_unknown=True)
    others = vars(slot).keys() | {member.name for member in fields(_Alike)}
    message = {name: value for name, value in wrapper.items() if name not in others}
    if message:
        slot.last = from_json(_Message, {"member": rank, **message}).report()
    return slot


def _of_report(report: RestartReport) -> dict[str, Any]:
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
    if not 0 <= local_rank < len(ranks):
        raise ProtocolError(f"there is no local rank {local_rank}")
