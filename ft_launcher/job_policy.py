"""The restart policy as the coordinator of several nodes calls it: JSON in, a judgement out. Pure.

A node's fault crosses to the coordinator as JSON, and its decision comes back the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from ft_launcher.attribution import Fault, FaultClass, FaultKind
from ft_launcher.nodes.terms import Case, Judge, Judgement
from ft_launcher.restart_history import CycleLife, History
from ft_launcher.restart_policy import Action, Decision, decide, is_suspect
from rank_monitor.contract.config import RestartSettings
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.json_record import from_json
from rank_monitor.contract.messages import ResultInDoubt

_LIFE = "life"
_FORGIVEN, _DOUBT, _HEADLINE = "forgiven_limit", "doubt", "headline"
_MAX_HEADLINE = 500


def fault_record(fault: Fault, life: CycleLife, headline: str = "") -> dict[str, Any]:
    """A fault as it crosses to the coordinator; `headline`: which rank of which node failed, and how."""
    return asdict(fault) | {"kind": fault.kind.value, _LIFE: asdict(life), _HEADLINE: headline[:_MAX_HEADLINE]}


def _fault_of(record: Mapping[str, Any]) -> tuple[Fault, CycleLife]:
    known = {field.name for field in fields(Fault)}
    values = {name: value for name, value in record.items() if name in known}
    try:
        values |= {name: tuple(values.get(name, ())) for name in ("detail", "others", "failed")}
        values["doubt"] = doubt_in(values)
        if type(agreed := values.get("agreed_exit_code")) not in (int, type(None)):
            raise ValueError(f"agreed_exit_code {agreed!r}")
        values["kind"], values["exit_code"] = FaultKind(values["kind"]), int(values["exit_code"])
        values["fault_class"] = FaultClass(values.get("fault_class", FaultClass.UNKNOWN))
        fault = Fault(**values)
        return fault, from_json(CycleLife, record.get(_LIFE, {}))
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"the fault of a node does not fit: {error}") from None


def decision_of(record: Mapping[str, Any]) -> Decision | None:
    """The decision in an answer of the coordinator; None: it holds none."""
    if not record:
        return None
    values = {name: value for name, value in record.items() if name not in (_FORGIVEN, _DOUBT, _HEADLINE)}
    try:
        return Decision(**(values | {"action": Action(values["action"])}))
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"a decision does not fit: {error}") from None


def forgiven_limit(record: Mapping[str, Any]) -> str:
    """The learned limit that ended the cycle, which applies doubled in the next; empty: none."""
    return str(record.get(_FORGIVEN, ""))


def headline_in(record: Mapping[str, Any]) -> str:
    """The first line about the fault that a decision is about; empty: there is none."""
    return str(record.get(_HEADLINE, ""))[:_MAX_HEADLINE]


def doubt_in(record: Mapping[str, Any]) -> ResultInDoubt | None:
    """The result in doubt for whose sake the ranks move to other hardware.

    Raises:
        ProtocolError: it does not fit.
    """
    found = record.get(_DOUBT)
    return from_json(ResultInDoubt, found) if found else None


def judge_by(settings: RestartSettings, max_restarts: int) -> Judge:
    """What a coordinator judges faults by."""

    def judge(case: Case, now: float) -> Judgement:
        fault, life = _fault_of(case.fault)
        history = History.from_record(case.history, now - case.age_s).ended(fault, life, settings, now)
        in_doubt = fault.exit_code == ExitCode.RESUME_TO_DISAMBIGUATE
        elsewhere = case.elsewhere or (in_doubt and case.exchange)
        decision = decide(fault, history, settings, max_restarts, now, elsewhere)
        record = asdict(decision) | {"action": decision.action.value, _HEADLINE: headline_in(case.fault)}
        if fault.learned_limit:
            record[_FORGIVEN] = fault.limit
        after = history.after(decision, now).to_record(now)
        if in_doubt and fault.doubt is not None:
            record[_DOUBT] = asdict(fault.doubt)
        moves = is_suspect(fault)
        return Judgement(decision.reason, decision.exit_code, record, after, decision.wait_s, moves, in_doubt)

    return judge
