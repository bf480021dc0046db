"""The end of a cycle that failed on this node: finds the fault, stops the ranks, and records what is known.

Called by the membership, which reports the end to the coordinator. The order matters, since a stop destroys evidence:

1. `await_cause`: a rank that failed because it lost a peer waits a moment for the peer that failed first.
2. `stop_and_attribute`: asks NCCL and the monitors where the ranks are, stops the ranks, receives the last messages,
   and joins all of this into a `CycleEvidence`.
3. `decide/attribution/` finds the fault in that evidence. Nothing here decides, and no rank is started.

The functions run on the agent's thread and block, each within the bound that its docstring names.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ft_launcher.agent.cycle import nccl_ras
from ft_launcher.agent.cycle.evidence import (
    as_decided,
    ended_by_hang_timeout,
    gather,
    iteration_reached,
    log_unusable_texts,
    of_node,
    with_own_locks,
)
from ft_launcher.agent.ranks import Ranks
from ft_launcher.decide.attribution import (
    Fault,
    RankEvidence,
    all_nodes,
    first_failure,
)
from ft_launcher.decide.attribution.cycle_evidence import CycleEvidence
from ft_launcher.decide.attribution.triage import Outlook, outlook
from ft_launcher.decide.policy.ended_cycle import CycleLife
from ft_launcher.record.journal.contained import contained
from rank_monitor.contract.processes.proc import is_stopped
from rank_monitor.contract.processes.wait import readable

_CAUSE_WAIT_S = 3.0
"""Seconds that a restart is delayed at most for a rank that cleans up after its error and has not reported it yet."""
_SUSPECT_S = 1.0
"""Seconds after which a suspicion no longer counts. A monitor suspects a rank 0.1 s before the rank's limit. Ranks of
other nodes exceed their limits at about the same time and are ended, by which this rank may lose a peer."""


@dataclass(frozen=True)
class NodeFindings:
    """What this node found of a cycle that has ended.

    Attributes:
        fault: what failed first; None: no rank of this node failed by itself.
        life: how long the cycle ran and how far it came, where there is a fault.
        views: where the ranks of this node were, in the form of `JoinRequest.views`; empty: nobody looked.
        lost: the ranks of this node whose error says only that another rank is gone.
    """

    fault: Fault | None = None
    life: CycleLife = field(default_factory=CycleLife)
    views: dict[str, Any] = field(default_factory=dict)
    lost: Sequence[int] = ()


def look(ranks: Ranks) -> Outlook:
    """Returns what the ranks show before they are stopped: whether some hang, and whether the cause may still come.

    Called by the membership among several nodes, where no node waits for a cause. Blocks only for files of ranks that
    have ended with an error (`gather`). If texts that ranks wrote cannot be used, they are left out, and this is
    logged.

    `Outlook.stood_still` has two signs. This node has ended a rank by `--ft-hang-timeout`. Or a rank has lost another
    one and stood still at the last check for hangs: the rank that another node ends closes its connections, so a rank
    of this node that waited for it may fail before the coordinator's message about the end arrives here.
    """
    gathered, running, now = _gathered(ranks), ranks.running(), time.monotonic()
    suspected = []
    for rank in gathered:
        # A rank that was about to exceed a limit itself when it lost a peer: the peer was ended for a hang.
        suspected_at = ranks.monitors.report(rank.local_rank).suspected_at
        if suspected_at is not None and now < suspected_at + _SUSPECT_S:
            suspected.append(rank.local_rank)
    try:
        found = outlook(gathered, running, suspected)
    except Exception as error:
        log_unusable_texts(error)
        found = outlook(CycleEvidence(gathered).without_texts().ranks, running, suspected)
    if ranks.request is not None or ranks.parts.settings.monitor.hang_timeout is None:
        return found
    lost_peer, is_own = found.lost_peer, any(ended_by_hang_timeout(rank) for rank in gathered)
    lost_one_that_hung = lost_peer is not None and ranks.monitors.stood_still(lost_peer) is not None
    return replace(found, stood_still=is_own or lost_one_that_hung)


def await_cause(ranks: Ranks, interrupt: int) -> Outlook:
    """Waits until a rank has failed for a reason of its own and has ended, for `_CAUSE_WAIT_S` at most; then as `look`.

    A rank that cleans up after an error, for example in a `finally` that destroys the process group, first closes its
    connections. Its peers fail by that before the rank has reported its error. A stop at this moment would end the rank
    without the report, and the fault would name a peer. Nothing is waited for once a rank has asked for something: its
    request is followed, whatever failed.

    Args:
        ranks: of this node.
        interrupt: a descriptor that is readable when the launcher got a signal, which ends the wait.
    """
    deadline = time.monotonic() + _CAUSE_WAIT_S
    processes = ranks.processes
    found = look(ranks)
    left = _CAUSE_WAIT_S
    while processes.pidfds and found.cause_may_come and left > 0 and ranks.request is None:
        if interrupt in readable([*processes.pidfds.values(), *ranks.monitors.descriptors(), interrupt], left):
            break
        processes.reap_all()
        ranks.receive(is_over=True)
        found = look(ranks)
        left = deadline - time.monotonic()
    return found


def stop_what_is_left(ranks: Ranks) -> NodeFindings:
    """Stops the processes that ranks left when all ranks had returned from the program; returns where the ranks were.

    For a node whose ranks succeeded in a cycle that failed on another node. Blocks as `Ranks.stop`.
    """
    stop_began = time.monotonic()
    ranks.stop()
    views: dict[str, Any] = {}
    with contained("when the ranks returned cannot be passed on to the other nodes"):
        views = all_nodes.to_record(_gathered(ranks), stop_began, False, None)
    return NodeFindings(views=views)


def stop_and_attribute(ranks: Ranks, hung: bool, stood_still: bool = False) -> NodeFindings:
    """Stops the ranks; returns what failed first, and where the ranks were. Records the evidence of a fault.

    Blocks as `Ranks.stop`, and about 2 s more for answers of monitors and NCCL and for files.

    Args:
        ranks: of this node.
        hung: whether some ranks hang or hold up others. The stacks of all ranks are then kept.
        stood_still: whether a hang was ended by `--ft-hang-timeout`: as `look` says here, or as the node says that has
            ended a rank.
    """
    stop_began = time.monotonic()
    recorder, times = ranks.parts.recorder, ranks.parts.times
    known = _stop(ranks, hung, stood_still, stop_began)
    views: dict[str, Any] = {}
    with contained("where the ranks were cannot be passed on to the other nodes"):
        views = all_nodes.to_record(known.ranks, stop_began, hung, known.nccl)
    lost: list[int] = []
    with contained("which ranks lost another cannot be found"):
        lost = first_failure.lost_a_peer(known.ranks)
    fault = first_failure.find_fault(known, on_error=log_unusable_texts)
    if fault is not None or hung:
        recorder.evidence(ranks.cycle, known)
    if fault is None:
        if hung:
            recorder.hang_on_other_node(ranks.cycle, known.ranks)
        return NodeFindings(views=views, lost=lost)
    times.failed(first_failure.began(fault, known.ranks))
    ranks.record_times()
    times.stopped()
    reached = None
    with contained("how far the cycle came cannot be found"):
        reached = iteration_reached(known.ranks, ranks.parts.settings.restart.checkpoint_iteration_file)
    life = CycleLife(stop_began - ranks.processes.started_ns / 1e9, reached)
    with contained("from which state the cycle went on cannot be found"):
        life = _with_state(life, fault, ranks)
    return NodeFindings(fault, life, views, lost)


def _with_state(life: CycleLife, fault: Fault, ranks: Ranks) -> CycleLife:
    """Returns `life` with the state in memory that the cycle went on from, and how far its ranks came. By these the
    restart policy finds out whether that state is bad. Reads small files in a tmpfs."""
    loaded = ranks.state.loaded
    kept = ranks.parts.state_in_memory.state(ranks.processes.started_ns)
    if loaded is None or kept is None:
        return life
    step, saved_step = None, 0
    if fault.rank in kept.ranks:
        step = kept.ranks[fault.rank].step
    # A folder of `ft.memory_folder` may be there from before, newer than what all nodes had in common.
    if kept.saves and (kept.newest or 0) > loaded.step:
        saved_step = kept.newest or 0
    return replace(
        life,
        loaded_step=loaded.step,
        loaded_series=loaded.series,
        step=step,
        last_step=kept.reached or 0,
        saved_step=saved_step,
    )


def _stop(ranks: Ranks, hung: bool, stood_still: bool, stop_began: float) -> CycleEvidence:
    """Stops the ranks; returns all that is known of them. What shows only while they run is asked before the stop.

    Arguments as of `stop_and_attribute`. `stop_began`: monotonic seconds, from which the search for the first failure
    tells deaths by the stop from those before.
    """
    tree = ranks.tree()
    if hung:
        # An answer from before the first rank was ended says more than a later one.
        reports = map(ranks.monitors.report, ranks.monitors.local_ranks)
        ranks.ask_nccl(nccl_ras.hung_for_s(reports, stop_began))
    # The processes are looked for while the monitors answer: both take time on a node with many processes.
    ranks.monitors.snapshots(meanwhile=tree.search, stacks=hung, before_stop=True)
    # Read before the stop continues stopped processes: other ranks waited for one that was under SIGSTOP or a debugger.
    stopped = {rank for rank, pid in ranks.processes.pids().items() if is_stopped(pid)}
    nccl = None
    if hung:
        nccl = ranks.nccl.view()
    stopping = ranks.stop(tree=tree)
    ranks.receive(is_over=True)
    gathered = _gathered(ranks, stopped, stopping.killed)
    if hung:
        gathered = as_decided(gathered, ranks.monitors, stood_still)
        gathered = with_own_locks(gathered, stop_began, time.monotonic() - ranks.processes.started_ns / 1e9)
    evidence = ranks.in_process.of_the_end(gathered)
    if hung:
        ranks.parts.recorder.stacks_of_hang(ranks.cycle, gathered, ranks.monitors.stack_file)
    return CycleEvidence(
        evidence,
        of_node(ranks.oom_kills_before),
        stop_began,
        # With several nodes the rank that all ranks here wait for may be on another node.
        all_ranks=ranks.placement.is_alone,
        # These two faults count only where no rank failed by itself.
        otherwise=ranks.in_process.fault(evidence) or ranks.zombies.fault(evidence),
        suspect_results=ranks.monitors.suspect_results(),
        on_purpose=ranks.parts.injected.during(ranks.cycle),
        nccl=nccl,
    )


def _gathered(ranks: Ranks, stopped: Collection[int] = (), killed: Collection[int] = ()) -> list[RankEvidence]:
    """Returns the evidence of all ranks of the cycle, as far as it has arrived. Asks nobody. Arguments as of
    `gather`."""
    return gather(ranks.placement.ranks, ranks.processes, ranks.monitors, stopped, killed)
