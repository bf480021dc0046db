"""The question to the restart policy after a failed cycle: all that it decides by except the fault, as one value. Pure.

The journal holds it with each decision, so that `ft_launcher replay` can ask it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ft_launcher.attribution import Fault
from ft_launcher.policy.restart_history import CycleLife, History
from ft_launcher.policy.restart_policy import Decision, decide
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.settings.config import RestartSettings
from rank_monitor.contract.wire.json_record import from_json

_NOT_ASKED = ("checkpoint_iteration_file", "max_no_progress_restarts", "restart_policy", "soft_timeout_limit")
"""Settings that other parts of the launcher read: the path is the user's, and nothing of it belongs into a record."""

_MOST_CHARGED = 1 << 20
"""Restarts: a number in a journal that anyone may have written must not fill the memory."""


@dataclass(frozen=True)
class Question:
    """What the restart policy is asked.

    Attributes:
        settings, max_restarts: the policy.
        history: of the job before the cycle that has ended.
        life: of that cycle.
        elsewhere: there is another device or node that a restart would use.
    """

    settings: RestartSettings
    max_restarts: int
    history: History = field(default_factory=History)
    life: CycleLife = field(default_factory=CycleLife)
    elsewhere: bool = False


def answer(fault: Fault, question: Question, now: float) -> tuple[Decision, History]:
    """Returns what follows a fault, and the history after that; `now` in monotonic seconds."""
    settings = question.settings
    history = question.history.ended(fault, question.life, settings, now)
    decision = decide(fault, history, settings, question.max_restarts, now, question.elsewhere)
    if decision.charged:
        history = replace(history, charged=(*history.charged, now))
    return decision, history


def inputs_of(
    fault: Fault, question: Question, now: float, by_views: int = 0, returned: Mapping[int, float] | None = None
) -> dict[str, Any]:
    """Returns what a decision is made of as JSON values, beside what the event of the fault holds.

    Args:
        by_views: by where the ranks of so many nodes were the fault was found; 0: by the evidence of its own node.
        returned: the rank that had returned, with the seconds since, by which nodes together found the fault.
    """
    found = to_record(question, now) | {"agreed_exit_code": fault.agreed_exit_code, "by_views": by_views}
    if returned:
        found["returned"] = {str(rank): ago_s for rank, ago_s in returned.items()}
    return found


def to_record(question: Question, now: float) -> dict[str, Any]:
    """Returns JSON values, with ages in seconds instead of times."""
    settings = {name: value for name, value in asdict(question.settings).items() if name not in _NOT_ASKED}
    history = question.history.to_record(now)
    if question.settings.restart_window is None:
        # Without a window only their number counts, and a job may have thousands.
        history["charged"] = len(history["charged"])
    return {
        "settings": settings,
        "max_restarts": question.max_restarts,
        "history": history,
        **asdict(question.life),
        "elsewhere": question.elsewhere,
    }


def of_record(record: Mapping[str, Any], now: float) -> Question:
    """Reads a record of `to_record`; a setting that it lacks has its default, and one that is not known is ignored.

    Raises:
        ProtocolError: it does not fit.
    """
    try:
        given = record["settings"]
        known = {setting.name: given[setting.name] for setting in fields(RestartSettings) if setting.name in given}
        history = dict(record["history"])
        if type(history.get("charged")) is int and 0 <= history["charged"] <= _MOST_CHARGED:
            history["charged"] = [0.0] * history["charged"]
        lists = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        return Question(
            from_json(RestartSettings, known | lists),
            int(record["max_restarts"]),
            History.from_record(history, now),
            from_json(CycleLife, {name: record[name] for name in ("lived_s", "iteration")}),
            bool(record["elsewhere"]),
        )
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise ProtocolError(f"a question to the restart policy does not fit: {error!r}") from None
