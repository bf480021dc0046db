"""Nodes, rules and a judge for the tests of the nodes' rooms. Knows no store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ft_launcher.decide.attribution import Fault, FaultKind
from ft_launcher.decide.policy.case import (
    Case,
    FaultReport,
    PolicyAnswer,
    PolicyJudgement,
    RankRequest,
    RequestCase,
)
from ft_launcher.decide.policy.restart_policy import REQUESTS, Action, Decision
from ft_launcher.job.coordinator.coordinator import Coordinator
from ft_launcher.job.coordinator.formation import Rules, Size
from ft_launcher.job.coordinator.node_messages import NO_CYCLE, NO_RANK, JoinRequest, RankAssigned, Reply, Work
from rank_monitor.contract.wire.messages import ControlRequest


def failed(headline: str = "", **changes: Any) -> FaultReport:
    """The fault of a rank that exited, with these changes."""
    return FaultReport(replace(Fault(FaultKind.EXIT, 0, 0, 1, 1, "exited", "", ""), **changes), headline=headline)


def node(name: str, seq: int = 1, cycle: int = NO_CYCLE, **fields: Any) -> JoinRequest:
    """An arrival of the node of this name."""
    usual = {"address": "127.0.0.1", "nprocs": 2, "order": name, "rank": NO_RANK, "cycle": cycle}
    return JoinRequest(name, seq, name, **(usual | fields))


def request(action: str = "restart", rank: int = 3) -> RankRequest:
    """What a rank asks for."""
    return RankRequest(rank, ControlRequest(action, "please"))


def place(cycle: int, rank: int, nodes: int, reason: str = "") -> RankAssigned:
    """The place of a node of two ranks among others like it."""
    return RankAssigned(cycle, rank, nodes, reason, 2 * rank, 2 * nodes, 2 * rank, 2 * nodes)


def judge(case: Case | RequestCase, now: float) -> PolicyAnswer:
    """A restart, counted in the history: after 5 s where the headline is `wait 5`, and none where it is `fatal`.

    A request is answered by the table of requests.
    """
    if isinstance(case, RequestCase):
        action, code = REQUESTS[case.asked.request.action]
        decision = Decision(action, "asked for", exit_code=code)
        judgement = PolicyJudgement(decision, inputs={"request": {"rank": case.asked.rank}})
        return PolicyAnswer("asked for", code, judgement, case.history)
    history = {"restarts": int(case.history.get("restarts", 0)) + 1}
    if case.report.headline == "fatal":
        return PolicyAnswer("it is fatal", 3, PolicyJudgement(Decision(Action.GIVE_UP, "it is fatal")), case.history)
    reason, wait_s = f"restart {history['restarts']}", 0.0
    if case.report.headline.startswith("wait"):
        wait_s = float(case.report.headline.removeprefix("wait"))
    return PolicyAnswer(reason, None, PolicyJudgement(Decision(Action.RESTART, reason)), history, wait_s)


def rules_of(minimum: int, maximum: int, **rules: Any) -> Rules:
    """The rules of a job; fields of Size among `rules` go there."""
    size = {key: rules.pop(key) for key in list(rules) if key in Size.__dataclass_fields__}
    return Rules(Size(minimum, maximum, **size), **rules)


def coordinator(minimum: int, maximum: int, me: str = "a", **rules: Any) -> Coordinator:
    """A coordinator at moment 0."""
    return Coordinator(me, rules_of(minimum, maximum, **rules), judge, 0.0)


def places(work: list[Work]) -> dict[str, int]:
    """Ranks given in this work, by node."""
    replies = [one for one in work if isinstance(one, Reply)]
    return {one.node: one.answer.rank for one in replies if isinstance(one.answer, RankAssigned)}
