"""A decision of rung 1 as the journal's event `in_process_decision`: what it was made of, and what follows. Pure.

`in_process.py` has it written, and `ft_launcher replay` decides it again. What most ranks have in common, and what is
as at the start, takes no room: a decision about eight ranks is a line of half a kilobyte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ft_launcher.cycle.rung_steps import (
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
from ft_launcher.cycle.rungs import Rungs, RungState, WrapperSlot
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.wire.json_record import from_json
from rank_monitor.contract.wire.messages import Restarter

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
_OF_EACH = ("last", "due")
"""Fields of a slot that have a form of their own in the record."""
_DIGITS = 6
"""Of seconds, as everywhere in the journal."""


def is_recorded(happened: Happened, known: RungState, steps: list[Step] | None) -> bool:
    """Returns whether the journal holds this: a step follows, or a rank died that has a wrapper, or beside ranks that
    have one. An end that counts as without wrappers is held only where it is a failure: each job ends with such.
    """
    if isinstance(happened, Died) and steps is None:
        return happened.exit_code != 0 and any(slot.last for slot in known.slots)
    return bool(steps) or isinstance(happened, Died)


def to_record(happened: Happened, known: RungState, steps: list[Step] | None, now: float) -> dict[str, Any]:
    """Returns the fields of the event but its cycle.

    Args:
        known: before it happened.
        steps: what follows; None as of `Rungs.on`.
        now: when it happened (monotonic seconds).
    """
    (what,) = (name for name, kind in _HAPPENED.items() if type(happened) is kind)
    values = dict(vars(happened))
    if isinstance(happened, Heard):
        values["message"] = _of_message(happened.message)
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
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ProtocolError(f"a decision about a restart in process does not fit: {error!r}") from None
    return _of_steps(Rungs(state).on(event, now))


def _happened(record: Any, ranks: Sequence[int]) -> Happened:
    values = dict(record)
    kind = _HAPPENED[values.pop("what")]
    if kind is Heard:
        values["message"] = from_json(Restarter, values["message"])
    found = from_json(kind, values)
    if not isinstance(found, DeadlinePassed):
        _check(found.local_rank, ranks)
    return found


def _of_steps(steps: Sequence[Step] | None) -> list[dict[str, Any]] | None:
    if steps is None:
        return None
    found = [{"step": _STEPS[type(step)], **asdict(step)} for step in steps]
    for step in found:
        if "took_s" in step:
            step["took_s"] = round(step["took_s"], _DIGITS)
    return found


# What was known.


def _of_state(state: RungState, now: float) -> dict[str, Any]:
    alike: dict[str, dict[str, Any]] = {}
    for local_rank, slot in enumerate(state.slots):
        values = _of_slot(slot, state.ranks[local_rank])
        if slot == WrapperSlot():
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


def _of_slot(slot: WrapperSlot, rank: int) -> dict[str, Any]:
    """Returns what is not as at the start, but the deadline."""
    at_start = vars(WrapperSlot())
    found = {name: value for name, value in vars(slot).items() if name not in _OF_EACH and value != at_start[name]}
    if slot.last is not None:
        found |= _of_message(slot.last)
        if slot.last.member == rank:
            del found["member"]
    return found


def _state(record: Any, now: float) -> RungState:
    ranks, codes = _whole_numbers(record["ranks"]), _whole_numbers(record["final_codes"])
    state = RungState.at_start(ranks, bool(record["rejoin"]), codes)
    if "since_s" in record:
        state.since, (state.failed,) = now - float(record["since_s"]), _whole_numbers([record["failed"]])
    for wrapper in record["wrappers"]:
        values = dict(wrapper)
        local_ranks, ages = _whole_numbers(values.pop("local_ranks")), values.pop("due_s", None)
        if ages is None:
            ages = [None] * len(local_ranks)
        for local_rank, due_s in zip(local_ranks, ages, strict=True):
            _check(local_rank, ranks)
            slot = state.slots[local_rank] = _slot(values, ranks[local_rank])
            if due_s is not None:
                slot.due = now + float(due_s)
    return state


def _slot(record: Mapping[str, Any], rank: int) -> WrapperSlot:
    own = vars(WrapperSlot())
    values = {name: value for name, value in record.items() if name in own}
    message = {name: value for name, value in record.items() if name not in own}
    if message:
        values["last"] = from_json(Restarter, {"member": rank, **message})
    return from_json(WrapperSlot, values)


def _of_message(message: Restarter) -> dict[str, Any]:
    return {name: value for name, value in vars(message).items() if name != "reason" or value}


def _check(local_rank: int, ranks: Sequence[int]) -> None:
    if not 0 <= local_rank < len(ranks):
        raise ProtocolError(f"there is no local rank {local_rank}")


def _whole_numbers(values: Any) -> list[int]:
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise ProtocolError("no list of whole numbers")
    return values
