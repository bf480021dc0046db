"""The values that nodes, coordinator and restart policy exchange about a fault or a request of a rank. Pure data.

    node --FaultReport or RankRequest--> coordinator --Case or RequestCase--> policy (`job_policy.py`)
    nodes <--PolicyJudgement-- coordinator <--PolicyAnswer-- policy

A node puts the fault of its ranks into its request to join the next cycle. When the cycle has ended on all nodes, the
coordinator picks the report that counts (`job/coordinator/fault_decision.py`) and asks the policy once. The judgement
goes to every node: the decision, and what each node needs to record it and to carry it out. The judgement about a
request of a rank goes to the node of that rank alone. `job/` sends reports, requests and judgements as JSON, so their
fields are part of the protocol between nodes of one release.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ft_launcher.decide.attribution import Fault
from ft_launcher.decide.policy.ended_cycle import CycleLife
from ft_launcher.decide.policy.restart_policy import Decision
from rank_monitor.contract.wire.messages import ControlRequest, ResultInDoubt

MAX_HEADLINE = 500
"""Characters of a headline. It contains text that a rank chose, and goes to every node of the job with the
judgement."""


@dataclass(frozen=True)
class FaultReport:
    """The fault of a node's ranks, as the node or the coordinator found it.

    Attributes:
        life: how long the failed cycle ran on that node, and how far it came.
        headline: one line: which rank of which node failed, and how. Other nodes show it.
    """

    fault: Fault
    life: CycleLife = field(default_factory=CycleLife)
    headline: str = ""


@dataclass(frozen=True)
class RankRequest:
    """What a rank asks the launcher for. `rank` is its number in the job."""

    rank: int
    request: ControlRequest


@dataclass(frozen=True)
class PolicyJudgement:
    """What was decided about a fault, as every node of the job receives it; or about a request, as its node does.

    Attributes:
        decision: what follows, and why.
        node: the node whose fault it is, which records it while the others show one line; or the node whose rank made
            the request.
        headline: the first line about the fault; empty for a request.
        inputs: what the decision was made of, for the journal of that node.
        culprit: the fault that all nodes together found, where it differs from what `node` reported: about the rank
            that held up the ranks of all nodes. Its `local_rank` and `pid` are 0 where the coordinator does not know
            them. None: the node's own report stands.
        relaxed_limit: name of the learned limit that ended the cycle, which each node doubles for the next; empty: no
            learned limit did.
        suspect_result: the suspect result because of which the ranks move to other hardware; None: there is none.
    """

    decision: Decision
    node: str = ""
    headline: str = ""
    inputs: dict[str, Any] = field(default_factory=dict)
    culprit: FaultReport | None = None
    relaxed_limit: str = ""
    suspect_result: ResultInDoubt | None = None

    @property
    def answers_request(self) -> bool:
        """Whether it is about a request of a rank, and not about a fault."""
        return "request" in self.inputs


@dataclass(frozen=True)
class NodeViews:
    """What the nodes saw of their ranks when the cycle ended: where ranks were at a hang, and which had returned.

    Attributes:
        ranks: after a hang, node -> JSON of its ranks, which `decide/attribution/rank_view.py: of_record` reads. Empty
            after any other end.
        names: node -> its host name, for texts.
        is_complete: these are all nodes of the cycle. A node that was lost has sent nothing.
        nccl: node -> JSON of what NCCL said of the job there (`decide/attribution/nccl_view.py: of_record`); no entry,
            or None: nothing.
        returned: global rank -> how many seconds before the stop of its node's ranks it had returned from the program.
    """

    ranks: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    is_complete: bool = False
    nccl: Mapping[str, Any] = field(default_factory=dict)
    returned: Mapping[int, float] = field(default_factory=dict)


NO_VIEWS = NodeViews()


@dataclass(frozen=True)
class Case:
    """The question of the coordinator to the policy.

    Attributes:
        report: the fault, as one node reported it.
        history: the history of restarts in JSON. Its ages in seconds are those of `age_s` seconds ago: the history
            moves between nodes whose clocks cannot be compared.
        other_hardware: a node waits that could take the place of the faulty node.
        views: what all nodes saw of their ranks.
    """

    report: FaultReport
    history: dict[str, Any]
    age_s: float
    other_hardware: bool
    views: NodeViews = NO_VIEWS


@dataclass(frozen=True)
class RequestCase:
    """The question to the policy: a request of a rank, and the history of restarts as it was `age_s` seconds ago."""

    asked: RankRequest
    history: dict[str, Any]
    age_s: float


@dataclass(frozen=True)
class PolicyAnswer:
    """What follows the end of a cycle.

    Attributes:
        reason: why, in words.
        exit_code: the exit code with which the job ends; None: the job goes on.
        judgement: about the fault, for all nodes; None: there was no fault, or it could not be judged.
        history: the new history of restarts, in JSON.
        wait_s: seconds to wait before the next cycle (`--ft-backoff`).
        relocates: a waiting node, if there is one, is to take the place of the faulty node.
        faulty_node: the node of the culprit, where all nodes together found another rank than the one that was
            reported; empty: the node that reported.
    """

    reason: str
    exit_code: int | None
    judgement: PolicyJudgement | None
    history: dict[str, Any]
    wait_s: float = 0.0
    relocates: bool = False
    faulty_node: str = ""


Policy: TypeAlias = Callable[[Case | RequestCase, float], PolicyAnswer]
"""Question, now (monotonic seconds) -> answer. The coordinator gets the restart policy as a function, so that `job/`
need not know it, and tests can pass a simple one."""
