"""Makes the decision of one event again, by the code that made it, from the inputs that the journal holds. Pure.

`replay.py` calls one function per event, and compares the result with the event's facts. Settings, history and evidence
come from the journal; nothing comes from this machine, so the result is the same everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ft_launcher.agent.in_process import recovery_record
from ft_launcher.decide.attribution import Fault, all_nodes, collective, first_failure
from ft_launcher.decide.attribution.all_nodes import NodeScene
from ft_launcher.decide.attribution.cycle_evidence import fault_of_json, of_record
from ft_launcher.decide.attribution.fault import HANGS
from ft_launcher.decide.health.reading import Reading, changes
from ft_launcher.decide.policy.restart_policy import Question, after_request, answer, is_known
from ft_launcher.node.memory_files.adoption import LeftBehind, adoption
from ft_launcher.record import events
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.restart_history import History
from rank_monitor.contract.wire.json_record import from_json
from rank_monitor.contract.wire.messages import ControlRequest

Facts = Mapping[str, Any]
_NOW = 0.0
"""The time of every replayed decision. A history in a journal has ages instead of moments, so any time will do."""
_IN_ORDER = ("ok", "not present")
"""States of a check that are in order. What is in order may change from one to the other without an event."""
_ABOUT_STATE = ("set_aside_from", "no_save_until")
"""The facts of a decision about the state in memory; 0: nothing becomes of it."""
_AGES = "charged"
"""The part of a history that consists of ages: one for each charged restart."""


def fault_by(evidence: Facts, returned: Facts | None = None) -> dict[str, Any] | None:
    """Returns the facts of the fault that an event `evidence` shows, without the cycle; None: no rank failed.

    Args:
        evidence: the facts of the event.
        returned: rank -> how many seconds before the stop it had returned from its program, for ranks of the whole job,
            from the inputs of the decision.

    Raises:
        ProtocolError: the event does not fit.
    """
    found = of_record(evidence)
    fault = first_failure.find_fault(found, lambda error: None)
    if fault is None:
        return None
    try:
        ended = {int(rank): float(ago_s) for rank, ago_s in (returned or {}).items()}
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise ProtocolError(f"the rank that had returned does not fit: {error}") from None
    if ended:
        fault = first_failure.with_returned(fault, ended)
        fault = first_failure.with_lost(fault, first_failure.lost_a_peer(found.ranks))
    return _facts(events.FaultEvent.of(fault, cycle=0))


def decision_about(fault: Facts, inputs: Facts) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the facts of a decision without its cycle, and the history after it without ages.

    What journals of earlier releases lack is left out: the sentence about the budget, which follows from the other
    facts, and what becomes of the state in memory, where nothing does.

    Args:
        fault: the facts of the event `fault`.
        inputs: the inputs of the event `decision`.

    Raises:
        ProtocolError: they do not fit.
    """
    asked = Question.from_record(inputs, _NOW)
    decided, history = answer(_decided_on(fault, inputs), asked, _NOW)
    facts = _facts(events.DecisionEvent.of(decided, cycle=0))
    facts.pop("budget", None)
    for name in _ABOUT_STATE:
        if not facts[name]:
            facts.pop(name)
    return facts, without_ages(history.to_record(_NOW))


def decision_about_request(inputs: Facts) -> dict[str, Any]:
    """Returns the facts of a decision about a rank's request, without its cycle.

    Args:
        inputs: the inputs of the event `decision`, of which `request` is the rank's.

    Raises:
        ProtocolError: they do not fit.
    """
    asked, made = Question.from_record(inputs, _NOW), dict(inputs["request"])
    rank = made.pop("rank", None)
    request = from_json(ControlRequest, made)
    if type(rank) is not int or not is_known(request):
        raise ProtocolError("the request of a rank does not fit")
    facts = _facts(events.DecisionEvent.of(after_request(request, rank, asked, _NOW), cycle=0))
    for name in ("budget", *_ABOUT_STATE):
        facts.pop(name, None)
    return facts


def history_in(inputs: Facts) -> dict[str, Any]:
    """Returns the history before a decision, without ages.

    Args:
        inputs: the inputs of the event `decision`.

    Raises:
        ProtocolError: they do not fit.
    """
    return without_ages(Question.from_record(inputs, _NOW).history.to_record(_NOW))


def without_ages(history: Facts) -> dict[str, Any]:
    """Returns the record of a history with the number of its charged restarts in place of their ages.

    Two records of the same history, written at different times, are then equal.
    """
    return {**history, _AGES: len(history[_AGES])}


FIRST_HISTORY = without_ages(asdict(History()))
"""The history at the start of a job."""


def health_change(facts: Facts, before: str | None) -> dict[str, Any] | None:
    """Returns the facts of a change of health, without its cycle; None: by the events before, nothing changed.

    Args:
        facts: the facts of the event `health_change`.
        before: the state of the check by the last event about it; None: there is no such event.
    """
    if before is None or (before in _IN_ORDER and facts["before"] in _IN_ORDER):
        # A check that is in order may go from one such state to the other without an event.
        before = facts["before"]
    reading = Reading(facts["check"], facts["state"], facts["reason"], 0.0)
    found, _ = changes({reading.check: before}, [reading])  # type: ignore[dict-item]
    if not found:
        return None
    return _facts(events.HealthChangeEvent.of(found[0], cycle=0))


def state_found(facts: Facts) -> dict[str, Any]:
    """Returns whether the state that an earlier start left in memory is taken over.

    Args:
        facts: the facts of the event `memory_found`.

    Raises:
        ProtocolError: they do not fit.
    """
    found = adoption(from_json(LeftBehind, facts.get("left")))
    return {"step": found.step, "reason": found.reason}


def decision_in_process(facts: Facts) -> dict[str, Any]:
    """Returns what follows for ranks that restart in process: the steps of recovery level 1.

    Args:
        facts: the facts of the event `in_process_decision`.

    Raises:
        ProtocolError: they do not fit.
    """
    return {"follows": recovery_record.decide_again(facts.get("happened"), facts.get("known"))}


def scene_in(evidence: Facts, node: str) -> NodeScene:
    """Returns what a node saw at the end of a cycle, as its agent sends it to the coordinator.

    Args:
        evidence: the facts of the event `evidence`.
        node: the node's name.

    Raises:
        ProtocolError: the event does not fit.
    """
    found = of_record(evidence)
    seen = all_nodes.to_record(found.ranks, found.stop_began, True, found.nccl)
    return all_nodes.of_records(node, seen["ranks"], seen.get("nccl"))


def culprits_by(nodes: list[NodeScene], all_ranks: bool, fault: Facts, evidence: Facts | None) -> dict[str, Any]:
    """Returns the facts of a fault that follow from where the ranks of all nodes were: finding, culprits, rank and
    text.

    Args:
        nodes: what each node saw.
        all_ranks: whether these are all nodes of the job.
        fault: the facts of the event `fault`.
        evidence: the facts of the event `evidence` of the node whose rank the fault names; None: its journal has none.

    Raises:
        ProtocolError: the evidence does not fit.
    """
    finding = all_nodes.find_culprits(nodes, all_ranks)
    found = {"finding": finding.kind.value, "blamed": list(finding.culprits), "waiting": len(finding.waiting)}
    if not finding.culprits:
        return found
    own = fault_by(evidence) if evidence is not None else None
    if own is not None and own["rank"] == fault.get("rank") and own["rank"] in finding.culprits:
        # Several ranks are culprits. The one that its own node found stays the rank of the fault, with what that node
        # says of it.
        return found
    view = next(view for node in nodes for view in node.views if view.rank == finding.culprits[0])
    return found | {"rank": view.rank, "what": f"{HANGS}it {collective.sentence(finding, view.scene)}"}


def _decided_on(fault: Facts, inputs: Facts) -> Fault:
    """Returns a fault with the exit code on which all nodes agreed, since its own node knew only its own ranks."""
    return fault_of_json({**fault, "agreed_exit_code": inputs.get("agreed_exit_code")})


def _facts(event: events.Event) -> dict[str, Any]:
    """Returns the facts of an event as a journal has them, which has lists and no tuples, without the cycle."""
    facts: dict[str, Any] = json.loads(json.dumps(event.facts()))
    facts.pop("cycle")
    return facts
