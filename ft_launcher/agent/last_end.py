"""The record of a cycle's end: what this node found of the cycle, and what the coordinator decided.

A fault and the decision about it become known at different times, and journal and console show them together. So this
object keeps the first until the second arrives:

1. `store`, when the ranks are stopped (`membership.py`). The fault is also set in the rendezvous, which sends it with
   the next request for a place.
2. The coordinator decides once for all nodes, when it has the faults of all.
3. `record`, when the decision has arrived with the place (`joining.py` on one node, else `membership.py`), or when the
   job is over.

Called on the agent's thread; does not block. Decides nothing.
"""

from __future__ import annotations

from dataclasses import replace

from ft_launcher.agent.fault_finding import NodeFindings
from ft_launcher.agent.ranks import Ranks
from ft_launcher.decide.attribution import first_failure
from ft_launcher.decide.policy.case import MAX_HEADLINE, FaultReport, PolicyJudgement, RankRequest
from ft_launcher.job.coordinator.node_messages import JobOver
from ft_launcher.job.rendezvous.handler import NodeRendezvous
from rank_monitor.contract.exit_codes import ExitCode


class LastEnd:
    """What this node found of the cycle that ended last, until the coordinator has said what follows.

    Args:
        ranks: of this node.
        rendezvous: brings what was found to the coordinator, with the next arrival.

    Attributes:
        found: what was found of the cycle that has ended; empty again once it is recorded.
        asked: the request of a rank of this node that ended the cycle; None: something else did.
        cycle: the number of the cycle that ended last.
    """

    def __init__(self, ranks: Ranks, rendezvous: NodeRendezvous) -> None:
        self.found = NodeFindings()
        self.asked: RankRequest | None = None
        self.cycle = 0
        self._ranks = ranks
        self._nodes = rendezvous

    def store(self, found: NodeFindings, asked: RankRequest | None = None) -> None:
        """Stores what was found of the cycle that has ended, for the coordinator and for this node's record.

        Args:
            found: the fault, and where the ranks were; without a fault where no rank of this node failed by itself.
            asked: the request of a rank of this node that ended the cycle.
        """
        self.found = found
        self.asked = asked
        self.cycle = self._ranks.cycle
        report = None
        if found.fault is not None:
            headline = self._ranks.parts.recorder.headline(found.fault)
            report = FaultReport(found.fault, found.life, headline[:MAX_HEADLINE])
        views = found.views
        # The views are for nodes that compare where all ranks were. On one node the fault was found by them already.
        if self._nodes.is_local:
            views = {}
        self._nodes.attach(report, views)

    def record(self, judgement: PolicyJudgement | None, reason: str, over: JobOver | None = None) -> None:
        """Records why the cycle ended, with the coordinator's decision, and forgets what was found of the cycle.

        Exactly one of these is recorded, the first that applies:
        - the request of a rank of this node, if the decision answers it;
        - the fault of this node in full, if the decision is about this node's fault;
        - the headline of another node's fault;
        - the end of the job, if it is no success;
        - the reason for the new formation.

        Args:
            judgement: the coordinator's decision, and about which node's fault; None: nothing failed.
            reason: for the new formation, or for the end of the job.
            over: the job is over for this node; None: a cycle follows.
        """
        found, asked = self.found, self.asked
        self.found, self.asked = NodeFindings(), None
        recorder = self._ranks.parts.recorder
        ended = None
        if self._ranks.were_started:
            ended = self.cycle
        # Of several faults of one cycle the coordinator decided about one. Only the node of that fault records all of
        # it.
        is_ours = judgement is not None and judgement.node == self._nodes.node
        if asked is not None and judgement is not None and is_ours and judgement.answers_request:
            recorder.asked(self.cycle, asked.request, judgement.decision, judgement.inputs)
            return
        if judgement is not None and is_ours:
            found = _with_culprit(judgement, found)
        if found.fault is not None and judgement is not None and is_ours:
            recorder.failed(self.cycle, found.fault, judgement.decision, found.life, judgement.inputs)
        elif ended is not None and judgement is not None:
            recorder.failed_on_other_node(ended, judgement.headline[:MAX_HEADLINE], judgement.decision, found.lost)
        elif over is not None:
            if over.exit_code != ExitCode.OK:
                recorder.job_over(ended, reason, over.exit_code)
        elif ended is not None:
            recorder.reform(ended, reason, found.lost)


def _with_culprit(judgement: PolicyJudgement, found: NodeFindings) -> NodeFindings:
    """Returns `found` with the rank of this node that held up those of all nodes, if the coordinator found one.

    A node alone may have blamed a rank that waited for another. Only the coordinator sees where the ranks of all nodes
    were; it knows neither local rank nor pid, which are filled in here.
    """
    if judgement.culprit is None:
        return found
    fault = judgement.culprit.fault
    for local_rank, seen in enumerate(found.views.get("ranks", ())):
        if seen["rank"] == fault.rank:
            fault = replace(fault, local_rank=local_rank, pid=seen["pid"])
            break
    return replace(found, fault=first_failure.with_lost(fault, found.lost), life=judgement.culprit.life)
