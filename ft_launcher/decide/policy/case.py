"""What nodes and the restart policy tell each other about a fault, and about a request of a rank. Pure data.

A node sends a `FaultReport` to the coordinator. The coordinator asks the policy about a `Case` and gets a
`PolicyAnswer`. Its `PolicyJudgement` goes to all nodes: the decision, and what each node needs to record it and to
carry it out.

A node sends a `RankRequest` too. The coordinator asks the policy about a `RequestCase`, and the judgement goes to the
node of the rank alone. `job_policy.py` answers; `job/` sends reports, requests and judgements as JSON.
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
"""Characters. The headline contains text of a rank, and goes to every node of the job with the judgement."""


@dataclass(frozen=True)
class FaultReport:
    """The fault of a node's ranks, as the node or the coordinator found it.

    Attributes:
        life: of the cycle that failed.
        headline: which rank of which node failed, and how.
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
        node: the node whose fault it is, or whose rank has made the request.
        headline: the first line about the fault; empty for a request.
        inputs: what the decision was made of, for the journal of that node.
        culprit: the fault of the rank that held up those of all nodes, where the views of all nodes show one. Its
            `local_rank` and `pid` are 0 where the coordinator does not know them.
        relaxed_limit: the learned limit that ended the cycle, which is doubled in the next; empty: none did.
        suspect_result: because of it the ranks move to other hardware.
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
    """What the nodes saw of their ranks when the cycle ended: where they were, if by a hang, and which had returned.

    Attributes:
        ranks: after a hang, by node, JSON that `decide/attribution/rank_view.py: of_record` reads; else empty.
        names: of these nodes.
        is_complete: these are all nodes of the cycle.
        nccl: by node, what NCCL said of the job there, JSON that `decide/attribution/nccl_view.py: of_record` reads;
            None, or no entry: nothing.
        returned: by rank, how many seconds before its node stopped its ranks it had returned from the program.
    """

    ranks: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    is_complete: bool = False
    nccl: Mapping[str, Any] = field(default_factory=dict)
    returned: Mapping[int, float] = field(default_factory=dict)


NO_VIEWS = NodeViews()


@dataclass(frozen=True)
class Case:
    """The question to the policy: a fault, and the history of restarts as it was `age_s` seconds ago.

    Attributes:
        other_hardware: a node waits that could take the faulty one's place.
        views: what the nodes saw of their ranks.
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
    """What follows the end of a cycle: go on (`exit_code` None), after `wait_s`, or give up.

    Attributes:
        judgement: of the fault; None: there was none, or it could not be judged.
        history: the new history of restarts.
        relocates: a waiting node, if there is one, is to take the faulty one's place.
        faulty_node: another node's rank held up those of the node whose fault it was; empty: none did.
    """

    reason: str
    exit_code: int | None
    judgement: PolicyJudgement | None
    history: dict[str, Any]
    wait_s: float = 0.0
    relocates: bool = False
    faulty_node: str = ""


Policy: TypeAlias = Callable[[Case | RequestCase, float], PolicyAnswer]
"""Question, now -> answer. The coordinator gets the restart policy as a function."""
