"""The record of a cycle's end: what this node found of it, kept until the decision is there, and written with that.

The membership calls it, and brings the fault to the coordinator between `keep` and `record`.
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
        found: of the cycle that has ended, until the coordinator has said what follows.
        asked: the request of a rank of this node that ended the cycle; None: something else did.
        cycle: its number.
    """

    def __init__(self, ranks: Ranks, rendezvous: NodeRendezvous) -> None:
        self.found = NodeFindings()
        self.asked: RankRequest | None = None
        self.cycle = 0
        self._ranks = ranks
        self._nodes = rendezvous

    def keep(self, found: NodeFindings, asked: RankRequest | None = None) -> None:
        """Keeps what was found of the cycle that has ended, for the coordinator and for our own record.

        Args:
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
        if self._nodes.is_local:  # the fault was found by all that they say
            views = {}
        self._nodes.bring(report, views)

    def record(self, judgement: PolicyJudgement | None, reason: str, over: JobOver | None = None) -> None:
        """Records why the cycle ended, with the coordinator's decision, and forgets what was found of it.

        The fault of this node, or the request of its rank, is recorded in full where the decision is about it.
        Otherwise the headline of the other node's fault is recorded, or the reason for the new formation.

        Args:
            reason: for the new formation, or for the end of the job.
            over: the job is over for this node.
        """
        found, asked = self.found, self.asked
        self.found, self.asked = NodeFindings(), None
        recorder = self._ranks.parts.recorder
        ended = None
        if self._ranks.were_started:
            ended = self.cycle
        # Of several faults of one cycle the coordinator decided about one; only its node records all of it.
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
    """Returns `found` with the rank of this node that held up those of all nodes, if the coordinator found one."""
    if judgement.culprit is None:
        return found
    fault = judgement.culprit.fault
    for local_rank, seen in enumerate(found.views.get("ranks", ())):
        if seen["rank"] == fault.rank:
            fault = replace(fault, local_rank=local_rank, pid=seen["pid"])
            break
    return replace(found, fault=first_failure.with_lost(fault, found.lost), life=judgement.culprit.life)
