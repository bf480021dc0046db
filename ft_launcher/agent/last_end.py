"""What this node found of the cycle that ended last, until the coordinator has said what follows.

Made by `many_nodes.py`: a node alone decides by itself, and records at once. Nothing is looked for here
(`failed_cycle.py` does), and nothing is decided.
"""

from __future__ import annotations

from dataclasses import replace

from ft_launcher.agent.failed_cycle import NodeFindings
from ft_launcher.agent.ranks import Ranks
from ft_launcher.nodes.node_messages import JobOver, RankAssigned
from ft_launcher.policy.job_policy import decision_of, fault_record, guilty_in, headline_in, inputs_in
from ft_launcher.record.contained import contained
from ft_launcher.rendezvous.handler import NodeRendezvous
from rank_monitor.contract.exit_codes import ExitCode


class LastEnd:
    """The end of one cycle after the other.

    Args:
        ranks: of this node.
        rendezvous: brings what was found to the coordinator, with the next arrival.

    Attributes:
        found: of the cycle that has ended, until the coordinator has said what follows.
        cycle: its number.
    """

    def __init__(self, ranks: Ranks, rendezvous: NodeRendezvous) -> None:
        self.found = NodeFindings()
        self.cycle = 0
        self._is_recorded = False
        self._ranks = ranks
        self._nodes = rendezvous

    def keep(self, found: NodeFindings) -> None:
        """Keeps what was found of the cycle that has ended, for the coordinator and for our own record."""
        self._keep(found, is_recorded=False)
        fault = {}
        if found.fault is not None:
            fault = fault_record(found.fault, found.life, self._ranks.parts.recorder.headline(found.fault))
        self._nodes.bring(fault, found.views)

    def keep_recorded(self, found: NodeFindings) -> None:
        """Keeps what was found of a cycle whose end is recorded already: a rank of this node asked for it."""
        self._keep(found, is_recorded=True)

    def _keep(self, found: NodeFindings, is_recorded: bool) -> None:
        self.found, self.cycle, self._is_recorded = found, self._ranks.cycle, is_recorded

    def record(self, answer: RankAssigned | JobOver) -> None:
        """Records why the cycle ended, with the coordinator's decision, and forgets what was found of it.

        The fault of this node is recorded in full where the decision is about it. Otherwise the headline of the other
        node's fault is recorded, or the reason for the new formation.
        """
        found, self.found = self.found, NodeFindings()
        decision, recorder = decision_of(answer.decision), self._ranks.parts.recorder
        ended = None
        if self._ranks.were_started and not self._is_recorded:
            ended = self.cycle
        self._is_recorded = False
        # Of several faults of one cycle the coordinator decided about one; only its node records all of it.
        is_ours = answer.fault_of == self._nodes.node
        if is_ours:
            found = self._with_guilty_rank(answer, found)
        if found.fault is not None and decision is not None and is_ours:
            recorder.failed(self.cycle, found.fault, decision, found.life, inputs_in(answer.decision))
        elif ended is not None and decision is not None:
            recorder.failed_elsewhere(ended, headline_in(answer.decision), decision)
        elif isinstance(answer, JobOver):
            if answer.exit_code != ExitCode.OK:
                recorder.job_over(ended, answer.reason, answer.exit_code)
        elif ended is not None:
            recorder.reform(ended, answer.reason)

    def _with_guilty_rank(self, answer: RankAssigned | JobOver, found: NodeFindings) -> NodeFindings:
        """Returns `found` with the rank of this node that held up those of all nodes, if the coordinator found one."""
        guilty = None
        with contained("which rank held up the others cannot be read"):
            guilty = guilty_in(answer.decision)
        if guilty is None:
            return found
        fault, life = guilty
        for local_rank, seen in enumerate(found.views.get("ranks", ())):
            if seen["rank"] == fault.rank:
                fault = replace(fault, local_rank=local_rank, pid=seen["pid"])
                break
        return replace(found, fault=fault, life=life)
