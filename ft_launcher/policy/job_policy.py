"""The restart policy in the form in which the coordinator of several nodes calls it: JSON in, an answer out. Pure.

A node sends its fault to the coordinator as JSON, and gets the decision back as JSON. Other nodes write these records,
so what does not fit is a ProtocolError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from ft_launcher.attribution import Fault, FaultClass, FaultKind, all_nodes, collective, first_failure, rank_view
from ft_launcher.attribution.cycle_evidence import fault_as_json, fault_of_json
from ft_launcher.attribution.fault import HangKind
from ft_launcher.nodes.fault_decision import Case, NodeViews, Policy, PolicyAnswer
from ft_launcher.policy.restart_history import CycleLife, History
from ft_launcher.policy.restart_policy import Action, Decision, Question, answer, inputs_of, is_suspect
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.settings.config import RestartSettings
from rank_monitor.contract.wire.json_record import from_json
from rank_monitor.contract.wire.messages import ResultInDoubt

_LIFE = "life"
_FORGIVEN, _SUSPECT_RESULT, _HEADLINE, _GUILTY = "forgiven_limit", "doubt", "headline", "guilty"
_INPUTS = "inputs"
_BESIDE = (_FORGIVEN, _SUSPECT_RESULT, _HEADLINE, _GUILTY, _INPUTS)
"""What the record of a decision holds beside its fields."""
# Characters. The line contains text of a rank, and goes to every node of the job with the decision.
_MAX_HEADLINE = 500


def fault_record(fault: Fault, life: CycleLife, headline: str = "") -> dict[str, Any]:
    """Returns a fault as JSON values for the coordinator; `headline`: which rank of which node failed, and how."""
    return fault_as_json(fault) | {_LIFE: asdict(life), _HEADLINE: headline[:_MAX_HEADLINE]}


def _fault_of(record: Mapping[str, Any]) -> tuple[Fault, CycleLife]:
    return fault_of_json(record), from_json(CycleLife, record.get(_LIFE, {}))


def decision_of(record: Mapping[str, Any]) -> Decision | None:
    """Returns the decision in an answer of the coordinator; None for an empty answer.

    Raises:
        ProtocolError: it does not fit.
    """
    if not record:
        return None
    values = {name: value for name, value in record.items() if name not in _BESIDE}
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


def inputs_in(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns what a decision was made of, for the journal; None where the coordinator did not send it."""
    found = record.get(_INPUTS)
    if isinstance(found, dict):
        return found
    return None


def guilty_in(record: Mapping[str, Any]) -> tuple[Fault, CycleLife] | None:
    """Returns the fault of the rank that held up those of all nodes, where their views show one; None: they do not.

    Its `local_rank` and `pid` are not known to the coordinator: they are 0.

    Raises:
        ProtocolError: it does not fit.
    """
    found = record.get(_GUILTY)
    if isinstance(found, dict) and found:
        return _fault_of(found)
    return None


def suspect_result_in(record: Mapping[str, Any]) -> ResultInDoubt | None:
    """Returns the suspect result because of which the ranks move to other hardware; None when there is none.

    Raises:
        ProtocolError: it does not fit.
    """
    found = record.get(_SUSPECT_RESULT)
    if found:
        return from_json(ResultInDoubt, found)
    return None


def make_policy(settings: RestartSettings, max_restarts: int) -> Policy:
    """Returns the restart policy as the function that a coordinator calls for each fault."""

    def policy(case: Case, now: float) -> PolicyAnswer:
        fault, life = _fault_of(case.fault)
        headline, faulty_node, by_views = headline_in(case.fault), "", 0
        guilty = _faulty_of_all_nodes(fault, case.views)
        if guilty is not None:
            fault, faulty_node = guilty
            by_views = len(case.views.ranks)
            headline = f"rank {fault.rank} on {case.views.names.get(faulty_node, faulty_node)} {fault.what}"[
                :_MAX_HEADLINE
            ]
        told = first_failure.with_returned(fault, case.views.returned)
        returned: Mapping[int, float] = {}
        if told is not fault:
            fault, returned = told, case.views.returned
        before = History.from_record(case.history, now - case.age_s)
        has_suspect_result = fault.exit_code == ExitCode.RESUME_TO_DISAMBIGUATE
        question = Question(settings, max_restarts, before, life, case.elsewhere)
        decision, history = answer(fault, question, now)
        record = asdict(decision) | {"action": decision.action.value, _HEADLINE: headline}
        record[_INPUTS] = inputs_of(fault, question, now, by_views, returned)
        if guilty is not None or returned:
            record[_GUILTY] = fault_record(fault, life)
        if fault.learned_limit:
            record[_FORGIVEN] = fault.limit
        if has_suspect_result and fault.doubt is not None:
            record[_SUSPECT_RESULT] = asdict(fault.doubt)
        relocates = is_suspect(fault)
        return PolicyAnswer(
            decision.reason,
            decision.exit_code,
            record,
            history.to_record(now),
            decision.wait_s,
            relocates,
            faulty_node,
        )

    return policy


def _with_cause(fault: Fault, cause: str) -> str:
    """Returns what is said of a rank that holds up those of all nodes, with the cause that the nodes found together."""
    if fault.kind is FaultKind.HANG:
        return first_failure.of_cause(cause, fault.exceeded)
    return f"{fault.what}; {cause}"


def _faulty_of_all_nodes(fault: Fault, seen: NodeViews) -> tuple[Fault, str] | None:
    """Returns the fault of the rank that holds up those of all nodes, and its node.

    None where `fault` is no hang, where the views name nobody or do not fit, or where they name others, which run,
    although the rank of `fault` waits for nobody (it passed its own limit outside of a collective).
    """
    hangs = fault.kind is FaultKind.HANG or fault.fault_class is FaultClass.HANG
    if not (hangs and len(seen.ranks) > 1):
        return None
    try:
        nodes = {
            node: all_nodes.of_records(seen.names.get(node, node), records, seen.nccl.get(node))
            for node, records in seen.ranks.items()
        }
        blame = all_nodes.find(list(nodes.values()), seen.is_complete)
    except Exception:  # other nodes wrote these: the restart does without, and the fault that a node reported stands
        return None
    views = [view for node in nodes.values() for view in node.views]
    node_of = {view.rank: name for name, node in nodes.items() for view in node.views}
    if blame.finding is HangKind.TRANSPORT and not blame.ranks and fault.collateral:
        if fault.rank not in node_of:  # no node saw it
            return None
        # Whose limit passed first says nothing; what all nodes saw together does.
        found = replace(fault, finding=blame.finding.value, waiting=len(blame.waiting), hint=blame.text)
        return replace(found, others=rank_view.others(views, fault.rank)), node_of[fault.rank]
    # A rank that is stopped or has ended explains also why another exceeded its limit outside of any collective.
    is_certain = fault.collateral or blame.finding is HangKind.GONE
    if fault.rank not in blame.ranks and not (blame.ranks and is_certain):
        return None
    found = replace(fault, finding=blame.finding.value, blamed=blame.ranks, waiting=len(blame.waiting))
    if fault.rank in blame.ranks:
        view = next(view for view in views if view.rank == fault.rank)
        # Its own node saw some of the ranks that wait for it, or none.
        found = replace(found, what=_with_cause(fault, f"it {collective.sentence(blame, view.scene)}"))
        if fault.collateral:  # the hint speaks of a wait for others
            found = replace(found, hint="", collateral=False)
        return replace(found, others=rank_view.others(views, fault.rank)), node_of[fault.rank]
    view = next(view for view in views if view.rank == blame.ranks[0])
    found = replace(
        found,
        kind=FaultKind.HANG,
        fault_class=FaultClass.HANG,
        rank=view.rank,
        local_rank=0,
        pid=0,
        what=first_failure.of_cause(f"it {collective.sentence(blame, view.scene)}"),
        exceeded="",
        where="",
        hint="",
        detail=tuple(view.scene.frames[:4]),
        others=rank_view.others(views, view.rank),
        iteration=view.iteration,
        limit="",
        learned_limit=False,
        collateral=False,
        failed=blame.ranks,
    )
    return found, node_of[view.rank]
