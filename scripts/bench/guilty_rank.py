"""P15: how long the coordinator takes to find the culprit among simulated ranks of many nodes, from what the nodes
sent."""

from __future__ import annotations

import json
import time

from ft_launcher.decide.attribution import Fault, FaultClass, FaultKind, rank_view
from ft_launcher.decide.attribution.rank_view import GroupState, RankView
from ft_launcher.decide.attribution.scene import Scene
from ft_launcher.decide.policy.case import Case, FaultReport, NodeViews
from ft_launcher.decide.policy.ended_cycle import CycleLife
from ft_launcher.decide.policy.job_policy import JobPolicy
from rank_monitor.contract.settings.config import RestartSettings

from .job import JobFailed
from .launchers import Launcher
from .scenario import Outcome

PER_NODE = 8
STEP = 18231
RUNS = 5
_CALLED_BY = [f"model/layer_{number}.py:{100 + number} in forward" for number in range(6)]
WAITS = ["torch/distributed/distributed_c10d.py:3252 in all_reduce", *_CALLED_BY]
LOADS = ["torch/utils/data/dataloader.py:1284 in _try_get_data", *_CALLED_BY]


def found(_launcher: Launcher, ranks: int, outcome: Outcome) -> None:
    """P15: one rank does not come to an all-reduce of its data parallel group; its node waits for it, and all for them.

    The time is from the texts of the nodes to the decision.
    """
    culprit = ranks // 5
    sent = {
        f"n{first // PER_NODE}": _text_of(range(first, first + PER_NODE), culprit)
        for first in range(0, ranks, PER_NODE)
    }
    hang = Fault(FaultKind.HANG, 0, 0, 1, -9, "hangs", "", "", fault_class=FaultClass.HANG, collateral=True)
    report = FaultReport(hang, CycleLife(60.0), "rank 0 hangs")
    policy = JobPolicy(RestartSettings(), 3)
    for _ in range(RUNS):
        began, began_cpu = time.perf_counter(), time.process_time()
        seen = {node: json.loads(text) for node, text in sent.items()}
        answer = policy(Case(report, {}, 0.0, False, NodeViews(seen, {}, True)), 0.0)
        outcome.add("named_s", time.perf_counter() - began)
        outcome.add("named_cpu_s", time.process_time() - began_cpu)
        outcome.add("sent_by_rank_bytes", sum(map(len, sent.values())) / ranks)
        if answer.faulty_node != f"n{culprit // PER_NODE}":
            raise JobFailed(f"named {answer.judgement}")


def _text_of(ranks: range, culprit: int) -> str:
    return json.dumps([rank_view.to_record(_view(rank, culprit)) for rank in ranks])


def _view(rank: int, culprit: int) -> RankView:
    """Each step reduces over the ranks of the node (tensor parallel), then over those with one local rank."""
    node, local_rank = divmod(rank, PER_NODE)
    is_late, same_node, same_group = rank == culprit, node == culprit // PER_NODE, local_rank == culprit % PER_NODE
    tensor, data = GroupState(STEP, STEP, "all_reduce"), GroupState(STEP - 1, STEP - 1, "all_reduce")
    if same_group and not is_late:
        data = GroupState(STEP, STEP - 1, "all_reduce", "[[4096, 4096]] ['BFloat16']", "dp")
    elif not is_late:  # these wait at the next step: for a rank of their node that waits in its data parallel group
        tensor = GroupState(STEP + 1, STEP, "all_reduce", "[[4096, 4096]] ['BFloat16']", "tp")
        data = GroupState(STEP, STEP, "all_reduce")
    if is_late or (same_node and same_group):
        frames = LOADS
    else:
        frames = WAITS
    groups = {f"tp{node}": tensor, f"dp{local_rank}": data}
    return RankView(Scene(rank, frames, {"state": "S (sleeping)", "wchan": "poll_schedule_timeout"}), groups, {}, STEP)
