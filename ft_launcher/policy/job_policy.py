"""The restart policy in the form in which the coordinator of several nodes calls it: JSON in, an answer out. Pure.

A node sends its fault to the coordinator as JSON, and gets the decision back as JSON. Other nodes write these records,
so what does not fit is a ProtocolError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from ft_launcher.attribution import Fault, FaultClass, FaultKind
from ft_launcher.nodes.fault_decision import Case, Policy, PolicyAnswer
from ft_launcher.policy.restart_history import CycleLife, History
from ft_launcher.policy.restart_policy import Action, Decision, decide, is_suspect, with_decision
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.settings.config import RestartSettings
from rank_monitor.contract.wire.json_record import from_json
from rank_monitor.contract.wire.messages import ResultInDoubt

_LIFE = "life"
_FORGIVEN, _DOUBT, _HEADLINE = "forgiven_limit", "doubt", "headline"
# Characters. The line contains text of a rank, and goes to every node of the job with the decision.
_MAX_HEADLINE = 500


def fault_record(fault: Fault, life: CycleLife, headline: str = "") -> dict[str, Any]:
    """Returns a fault as JSON values for the coordinator; `headline`: which rank of which node failed, and how."""
    return asdict(fault) | {"kind": fault.kind.value, _LIFE: asdict(life), _HEADLINE: headline[:_MAX_HEADLINE]}


def _fault_of(record: Mapping[str, Any]) -> tuple[Fault, CycleLife]:
    known = {field.name for field in fields(Fault)}
    values = {name: value for name, value in record.items() if name in known}
    try:
        values |= {name: tuple(values.get(name, ())) for name in ("detail", "others", "failed")}
        values["doubt"] = doubt_in(values)
        agreed = values.get("agreed_exit_code")
        # The exact type, since JSON's true would pass as an int and become the exit code 1.
        if type(agreed) not in (int, type(None)):
            raise ValueError(f"agreed_exit_code {agreed!r}")
        values["kind"], values["exit_code"] = FaultKind(values["kind"]), int(values["exit_code"])
        values["fault_class"] = FaultClass(values.get("fault_class", FaultClass.UNKNOWN))
        fault = Fault(**values)
        return fault, from_json(CycleLife, record.get(_LIFE, {}))
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"the fault of a node does not fit: {error}") from None


def decision_of(record: Mapping[str, Any]) -> Decision | None:
    """Returns the decision in an answer of the coordinator; None for an empty answer.

    Raises:
        ProtocolError: it does not fit.
    """
    if not record:
        return None
    values = {name: value for name, value in record.items() if name not in (_FORGIVEN, _DOUBT, _HEADLINE)}
    try:
        return Decision(**(values | {"action": Action(values["action"])}))
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"a decision does not fit: {error}") from None


def forgiven_limit(record: Mapping[str, Any]) -> str:
    """Returns the learned limit that ended the cycle, which is doubled in the next; empty when there is none."""
    return str(record.get(_FORGIVEN, ""))


def headline_in(record: Mapping[str, Any]) -> str:
    """Returns the first line about the fault of a decision; empty when there is none."""
    return str(record.get(_HEADLINE, ""))[:_MAX_HEADLINE]


def doubt_in(record: Mapping[str, Any]) -> ResultInDoubt | None:
    """Returns the suspect result because of which the ranks move to other hardware; None when there is none.

    Raises:
        ProtocolError: it does not fit.
    """
    found = record.get(_DOUBT)
    if found:
        return from_json(ResultInDoubt, found)
    return None


def make_policy(settings: RestartSettings, max_restarts: int) -> Policy:
    """Returns the restart policy as the function that a coordinator calls for each fault."""

    def policy(case: Case, now: float) -> PolicyAnswer:
        fault, life = _fault_of(case.fault)
        history = History.from_record(case.history, now - case.age_s).ended(fault, life, settings, now)
        in_doubt = fault.exit_code == ExitCode.RESUME_TO_DISAMBIGUATE
        elsewhere = case.elsewhere or (in_doubt and case.swap)
        decision = decide(fault, history, settings, max_restarts, now, elsewhere)
        record = asdict(decision) | {"action": decision.action.value, _HEADLINE: headline_in(case.fault)}
        if fault.learned_limit:
            record[_FORGIVEN] = fault.limit
        after = with_decision(history, decision, now).to_record(now)
        if in_doubt and fault.doubt is not None:
            record[_DOUBT] = asdict(fault.doubt)
        relocates = is_suspect(fault)
        return PolicyAnswer(decision.reason, decision.exit_code, record, after, decision.wait_s, relocates, in_doubt)

    return policy
