"""The restart policy of a job: corrects the reported fault by what all nodes saw, then decides about it. Pure.

The policy also decides about requests of ranks, which need no correction.

The coordinator calls the policy once for each failed cycle, for all nodes. The report that it got is what one node
found among its own ranks: after a hang mostly a rank that only waited. So before `restart_policy.py` decides, the
policy looks for the culprit among the ranks of all nodes (`decide/attribution/all_nodes.py`). Decision, budget and the
choice of a node to replace are then about the culprit and its node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ft_launcher.decide.attribution import Fault, FaultClass, FaultKind, all_nodes, collective, first_failure, rank_view
from ft_launcher.decide.attribution.fault import HangKind
from ft_launcher.decide.policy.case import (
    MAX_HEADLINE,
    Case,
    FaultReport,
    NodeViews,
    PolicyAnswer,
    PolicyJudgement,
    RequestCase,
)
from ft_launcher.decide.policy.restart_policy import (
    Question,
    after_request,
    answer,
    inputs_of,
    inputs_of_request,
    is_suspect,
)
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.restart_history import History
from rank_monitor.contract.settings.config import RestartSettings


@dataclass(frozen=True)
class JobPolicy:
    """The restart policy of a job. A coordinator calls the object (`case.Policy`) for each fault and each request.

    Made in each launcher when the rendezvous is made (`job/rendezvous/backends.py`): any node may become the
    coordinator. The object keeps nothing between two calls: the history comes with the case, and goes back with the
    answer.

    Attributes:
        settings: the options of the restart policy.
        max_restarts: `--max-restarts`.
    """

    settings: RestartSettings
    max_restarts: int

    def __call__(self, case: Case | RequestCase, now: float) -> PolicyAnswer:
        """Returns what follows a fault, or a request of a rank. `now`: monotonic seconds.

        Raises:
            ProtocolError: the history in the case, which another coordinator wrote, cannot be read.
        """
        if isinstance(case, RequestCase):
            return self._about_request(case, now)
        # 1. The fault: of the culprit among all nodes, else of a rank that had returned too early, else as reported.
        fault, life, headline = case.report.fault, case.report.life, case.report.headline[:MAX_HEADLINE]
        faulty_node, by_views = "", 0
        of_all_nodes = _culprit_of_all_nodes(fault, case.views)
        if of_all_nodes is not None:
            fault, faulty_node = of_all_nodes
            by_views = len(case.views.ranks)
            headline = f"rank {fault.rank} on {case.views.names.get(faulty_node, faulty_node)} {fault.what}"[
                :MAX_HEADLINE
            ]
        with_returned = first_failure.with_returned(fault, case.views.returned)
        returned: Mapping[int, float] = {}
        if with_returned is not fault:
            fault, returned = with_returned, case.views.returned
        # 2. The decision about that fault, by the history of the whole job.
        before = History.from_record(case.history, now - case.age_s)
        has_suspect_result = fault.exit_code == ExitCode.RESUME_TO_DISAMBIGUATE
        question = Question(self.settings, self.max_restarts, before, life, case.other_hardware)
        decision, history = answer(fault, question, now)
        # 3. What all nodes need of it.
        culprit, suspect_result, relaxed_limit = None, None, ""
        if of_all_nodes is not None or returned:
            culprit = FaultReport(fault, life)
        if has_suspect_result and not decision.set_aside_from:
            # From an older state the ranks compute other steps, and the result in doubt is not among them.
            suspect_result = fault.doubt
        if fault.learned_limit:
            relaxed_limit = fault.limit
        judgement = PolicyJudgement(
            decision,
            headline=headline,
            inputs=inputs_of(fault, question, now, by_views, returned),
            culprit=culprit,
            relaxed_limit=relaxed_limit,
            suspect_result=suspect_result,
        )
        relocates = is_suspect(fault)
        return PolicyAnswer(
            decision.reason,
            decision.exit_code,
            judgement,
            history.to_record(now),
            decision.wait_s,
            relocates,
            faulty_node,
        )

    def _about_request(self, case: RequestCase, now: float) -> PolicyAnswer:
        """Returns what follows a request of a rank. It needs no correction, and charges nothing."""
        rank, request = case.asked.rank, case.asked.request
        question = Question(self.settings, self.max_restarts, History.from_record(case.history, now - case.age_s))
        decision = after_request(request, rank, question, now)
        judgement = PolicyJudgement(decision, inputs=inputs_of_request(request, rank, question, now))
        return PolicyAnswer(decision.reason, decision.exit_code, judgement, question.history.to_record(now))


def _with_cause(fault: Fault, cause: str) -> str:
    """Returns `Fault.what` with the cause that all nodes found together, in the place of the cause of one node."""
    if fault.kind is FaultKind.HANG:
        return first_failure.of_cause(cause, fault.exceeded)
    return f"{fault.what}; {cause}"


def _culprit_of_all_nodes(fault: Fault, seen: NodeViews) -> tuple[Fault, str] | None:
    """Returns the fault of the rank that holds up the ranks of all nodes, and the node of that rank.

    Returns None, so that the reported fault stands, in these cases:

    - `fault` is no hang, or fewer than two nodes have sent views.
    - The views cannot be read, or name nobody.
    - The views name running ranks, but the rank of `fault` waited for nobody: it exceeded its own limit outside of a
      collective, which explains the end of the cycle by itself.

    Args:
        fault: as one node reported it.
        seen: the views of all nodes that sent some.
    """
    hangs = fault.kind is FaultKind.HANG or fault.fault_class is FaultClass.HANG
    if not (hangs and len(seen.ranks) > 1):
        return None
    try:
        nodes = {
            node: all_nodes.of_records(seen.names.get(node, node), records, seen.nccl.get(node))
            for node, records in seen.ranks.items()
        }
        finding = all_nodes.find_culprits(list(nodes.values()), seen.is_complete)
    except Exception:  # other nodes wrote the views: a view that cannot be read must not prevent the restart
        return None
    views = [view for node in nodes.values() for view in node.views]
    node_of = {view.rank: name for name, node in nodes.items() for view in node.views}
    if finding.kind is HangKind.TRANSPORT and not finding.culprits and fault.collateral:
        if fault.rank not in node_of:  # no node saw it
            return None
        # All ranks are in one collective. That the limit of this rank passed first says nothing, so the hint is about
        # what all nodes saw together.
        found = replace(fault, finding=finding.kind.value, waiting=len(finding.waiting), hint=finding.text)
        return replace(found, others=rank_view.others(views, fault.rank)), node_of[fault.rank]
    # A culprit that is stopped or has ended (GONE) also explains why another rank exceeded its limit outside of any
    # collective. Any other finding is believed only where the reported rank waited for others.
    is_certain = fault.collateral or finding.kind is HangKind.GONE
    if fault.rank not in finding.culprits and not (finding.culprits and is_certain):
        return None
    found = replace(fault, finding=finding.kind.value, blamed=finding.culprits, waiting=len(finding.waiting))
    if fault.rank in finding.culprits:
        view = next(view for view in views if view.rank == fault.rank)
        # The reported rank is the culprit. Its own node saw only some of the ranks that wait for it, so the text is
        # made anew by what all nodes saw.
        found = replace(found, what=_with_cause(fault, f"it {collective.sentence(finding, view.scene)}"))
        if fault.collateral:  # the hint of its own node takes it for a rank that waits for others
            found = replace(found, hint="", collateral=False)
        return replace(found, others=rank_view.others(views, fault.rank)), node_of[fault.rank]
    view = next(view for view in views if view.rank == finding.culprits[0])
    found = replace(
        found,
        kind=FaultKind.HANG,
        fault_class=FaultClass.HANG,
        rank=view.rank,
        local_rank=0,
        pid=0,
        what=first_failure.of_cause(f"it {collective.sentence(finding, view.scene)}"),
        exceeded="",
        where="",
        hint="",
        detail=tuple(view.scene.frames[:4]),
        others=rank_view.others(views, view.rank),
        iteration=view.iteration,
        limit="",
        learned_limit=False,
        collateral=False,
        failed=finding.culprits,
    )
    return found, node_of[view.rank]
