"""The membership of a node that decides by itself: the only node of a job, or one of several under a rendezvous that is
not ours, where each agent decides about its own ranks, as torch's does.

Made by the node agent. Does not weigh faults: `decide/policy/` says what follows, and this file carries it out.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Set
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.multiprocessing import SignalException

from ft_launcher.agent import fault_finding
from ft_launcher.agent.cycle.cycle import CyclePhase, EndedElsewhere, Event
from ft_launcher.agent.ending_signal import EndingSignal
from ft_launcher.agent.membership import JobEnd, Membership, NoFurtherCycle
from ft_launcher.agent.own_health import check_node
from ft_launcher.agent.ranks import Ranks
from ft_launcher.agent.results import Results
from ft_launcher.decide.policy.restart_policy import Action, Question, after_request, answer, inputs_of
from ft_launcher.job.coordinator.node_messages import CycleEnd, EndReason
from ft_launcher.job.rendezvous import cycle_store
from ft_launcher.job.rendezvous.blocking_call import BlockingCall
from ft_launcher.job.rendezvous.cycle_store import CycleStore
from ft_launcher.record.ledger.account import Category
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.restart_history import History

logger = logging.getLogger(__name__)


class SingleNode(Membership):
    """The part of a node that decides by itself.

    Args:
        ranks: of this node.
        results: torch's results of them.
        ending: the signal that ends the launcher.
        exit_barrier: torch's, which waits for the other agents of a job that has succeeded.
    """

    needs_agents_store = True
    """For torch's barrier at the end of the job."""

    def __init__(self, ranks: Ranks, results: Results, ending: EndingSignal, exit_barrier: Callable[[], None]) -> None:
        self._ranks = ranks
        self._parts = ranks.parts
        self._group: WorkerGroup = ranks.group
        self._results = results
        self._ending = ending
        self._exit_barrier = exit_barrier
        self._rendezvous: Any = self._group.spec.rdzv_handler
        self._history = History()
        self._next_poll = 0.0
        self._question: BlockingCall[int] | None = None
        """To the rendezvous, how many nodes wait to join; None: it is not asked now."""

    # As a source of events.

    def descriptors(self) -> set[int]:
        """Readable when the rendezvous has answered."""
        if self._question is not None:
            return {self._question.fileno()}
        return set()

    def next_check(self) -> float | None:
        """When to ask the rendezvous for new members (monotonic seconds); None: it is asked now, or none can come."""
        if self._parts.several_nodes and self._question is None:
            return self._next_poll
        return None

    def attend(self, ready: Set[int]) -> list[Event]:
        """Asks torch's rendezvous whether nodes wait to join, and takes its answer once there is one. Does not block.

        The question is an operation on the rendezvous' store, which may take as long as the network does, or for ever.
        """
        if not self._parts.several_nodes:
            return []
        is_joined = False
        try:
            if self._question is not None:
                is_joined = self._answered(self._question)
            elif time.monotonic() >= self._next_poll:
                self._plan_poll()
                self._question = BlockingCall(self._rendezvous.num_nodes_waiting, "ft_waiting_nodes")
        except Exception as error:  # the training is healthy: a store that does not answer ends nothing
            self._parts.recorder.store_silent(error)
        if is_joined:
            return [EndedElsewhere(CycleEnd(self._ranks.cycle, EndReason.GREW, "other nodes wait to take part"))]
        return []

    def _answered(self, question: BlockingCall[int]) -> bool:
        """Takes the answer if there is one; returns whether nodes wait to join."""
        if not question.is_done:
            return False
        self._plan_poll()
        self._drop_question()
        return question.result() > 0

    def _plan_poll(self) -> None:
        self._next_poll = time.monotonic() + float(self._group.spec.monitor_interval)

    def _drop_question(self) -> None:
        """Leaves a question behind, whose answer says nothing any more: another cycle forms, or the job ends."""
        if self._question is not None:
            self._question.close()
            self._question = None

    # Forming a cycle.

    def form(self, assign_ranks: Callable[[], None]) -> CycleStore:
        """Checks this node, has torch assign the ranks, and makes or finds the cycle's store."""
        unfit = check_node(self._parts, self._ranks.cycle, self._ending)
        if unfit:
            reason = f"this node is unhealthy: {unfit}"
            raise NoFurtherCycle(JobEnd(int(ExitCode.NODE_UNHEALTHY), reason, self._results.stopped()))
        # The handler takes one call at a time: it forms the cycle once it has answered what it was asked before.
        self._drop_question()
        self._ending.call(assign_ranks)
        store = self._ending.call(self._open_store)
        self._parts.times.formed(0.0)
        return store

    def _open_store(self) -> CycleStore:
        group, former = self._group, self._ranks.store
        if group.group_rank != 0:
            return cycle_store.learn(group.store)
        run_id, shared = self._rendezvous.get_run_id(), self._rendezvous.use_agent_store
        at_least = 0 if former is None else former.cycle + 1
        return cycle_store.publish(group.store, self._parts.ports, group.master_addr, run_id, at_least, shared)

    def names(self) -> tuple[list[str], list[str]]:
        """Returns this host's name where it is the only one; torch's handlers tell no names."""
        if self._parts.several_nodes:
            return [], []
        return [socket.gethostname()], []

    # After its end.

    def after(self, phase: CyclePhase) -> JobEnd | None:
        """Ends the ranks, decides what follows, and waits for a backoff."""
        match phase:
            case CyclePhase.SUCCEEDED:
                return self._after_success()
            case CyclePhase.FAILED | CyclePhase.ASKED:
                return self._after_failure()
            case CyclePhase.REGROUP:
                self._parts.times.membership_changes()
                self._parts.recorder.reform(self._ranks.cycle)
                self._ranks.stop()
                return None
            case CyclePhase.SIGNALLED:
                raise self._ending.end_ranks()
        raise AssertionError(f"{phase}: no other node goes on without this one, and no lease runs out")

    def _after_success(self) -> JobEnd:
        result = self._results.succeeded()
        self._parts.recorder.cycle_ended(self._ranks.cycle, "succeeded")
        if self._group.group_world_size > 1:
            try:
                self._ending.call(self._exit_barrier)
            except SignalException as error:
                logger.warning("%s; the training is complete, so this is not a failure", error)
        self._results.linger()
        return JobEnd(int(ExitCode.OK), "", result)

    def _after_failure(self) -> JobEnd | None:
        """Stops the ranks, attributes the fault, and carries out the decision."""
        ranks = self._ranks
        if ranks.have_agreed:
            self._ending.await_agreed_exits()
            if self._ending.number is not None:
                raise self._ending.end_ranks()
        if ranks.request is not None:
            fault_finding.stop_and_attribute(ranks, hung=False)
            return self._after_request(*ranks.request)
        if ranks.have_agreed or self._parts.several_nodes:
            seen = fault_finding.look(ranks)
        else:
            seen = fault_finding.await_cause(ranks, self._ending.signals.fileno())
        found = fault_finding.stop_and_attribute(ranks, seen.hangs)
        fault, life = found.fault, found.life
        assert fault is not None, "a cycle failed without a failed rank"
        spec, restart, now = self._group.spec, self._parts.settings.restart, time.monotonic()
        question = Question(restart, spec.max_restarts, self._history, life)
        decision, self._history = answer(fault, question, now)
        self._parts.recorder.failed(ranks.cycle, fault, decision, life, inputs_of(fault, question, now))
        if decision.action is not Action.RESTART:
            return JobEnd(decision.exit_code, decision.reason, self._results.failed(fault))
        ranks.forgive_learned_limit(fault.limit if fault.learned_limit else "")
        # A signal must end the launcher at once during a backoff.
        self._parts.times.begins(Category.BACKOFF)
        number = self._ending.wait(decision.wait_s)
        if number is not None:
            raise self._ending.error_without_ranks(number)
        return None

    def _after_request(self, rank: int, request: Any) -> JobEnd | None:
        """Carries out a rank's request after the ranks have ended."""
        question, now = (
            Question(self._parts.settings.restart, self._group.spec.max_restarts, self._history),
            time.monotonic(),
        )
        decision = after_request(request, rank, question, now)
        asked = question.to_record(now)
        asked["request"] = {"rank": rank, "action": request.action, "description": request.description}
        self._parts.recorder.asked(self._ranks.cycle, request, decision, asked)
        if decision.action is Action.RESTART:
            return None
        return JobEnd(decision.exit_code, decision.reason, self._results.stopped())

    def leave(self, job_end: JobEnd | None) -> None:
        """Forgets a question that has no answer yet. torch's launcher closes the rendezvous."""
        self._drop_question()
