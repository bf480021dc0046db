"""The way of this node into the next cycle: the decision about the last one, the check of its health, its place.

The membership has one `Joining` and calls it between two cycles, in the agent's thread. What may block runs in a thread
of `EndingSignal.call`, so that a signal to the launcher ends the wait. Starts no rank and ends none.

What follows a fault is the coordinator's decision, which arrives with the place. One decision is made here: a node that
is unhealthy makes no request for a place, so it decides itself that its launcher leaves (`_unhealthy`). Both methods
can end the launcher: by `NoPlace`, which `Membership.form` passes on as `NoFurtherCycle`, or by `NoFurtherCycle`.

torch's agent calls our hooks, and our hooks call torch's methods. So the formation of a cycle changes sides several
times. The steps, each with its owner:

1. ours: `NodeAgent._run_cycles` calls torch's `_initialize_workers`.
2. torch: `_initialize_workers` calls the hook `_rendezvous`.
3. ours: `NodeAgent._rendezvous` calls `Membership.form`, with torch's own `_rendezvous` as `assign_ranks`.
4. ours: `await_decision`. A node that is its own coordinator asks for its place here, and waits for a backoff.
5. ours: `try_to_join` checks the health of the node, and calls `assign_ranks` in a thread of `EndingSignal.call`.
6. torch, in this thread: `_rendezvous` calls `next_rendezvous` of the handler.
7. ours, in this thread: `NodeRendezvous.next_rendezvous`. One of several nodes asks for its place here. A node that has
   its place from step 4 does not ask again. The cycle's store is opened. Under a handler that is not ours,
   `ForeignRendezvous.next_rendezvous` has that handler form the group.
8. torch, in this thread: `_rendezvous` calls the hook `_assign_worker_ranks`, in which `NodeAgent` numbers the ranks by
   the place.
9. ours: `form` records the decision, where `await_decision` has not, and returns the cycle's store.
10. torch: `_initialize_workers` calls the hook `_start_workers`.

Where the store cannot be made, the other nodes are told, and steps 5 to 8 are repeated for the next formation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from ft_launcher.agent.ending_signal import EndingSignal
from ft_launcher.agent.job_end import JobEnd, NoFurtherCycle
from ft_launcher.agent.last_end import LastEnd
from ft_launcher.agent.own_health import check_node
from ft_launcher.agent.ranks import Ranks
from ft_launcher.agent.results import Results
from ft_launcher.decide.policy.restart_policy import REQUESTS, Action, Decision, asked_by, asks_for_restart
from ft_launcher.job.coordinator.node_messages import EndReason, JobOver
from ft_launcher.job.rendezvous.handler import NodeRendezvous, NoPlace
from ft_launcher.record.ledger.account import Category
from rank_monitor.contract.errors import StoreLost, one_line
from rank_monitor.contract.exit_codes import ExitCode

logger = logging.getLogger(__name__)


class Joining:
    """Takes this node from the end of one cycle to its place in the next.

    Args:
        ranks: of this node.
        results: torch's results of them.
        ending: the signal that ends the launcher.
        rendezvous: connects this node to the coordinator.
        last_end: what was found of the last cycle, to be recorded with the decision.
    """

    def __init__(
        self, ranks: Ranks, results: Results, ending: EndingSignal, rendezvous: NodeRendezvous, last_end: LastEnd
    ) -> None:
        self._ranks = ranks
        self._parts = ranks.parts
        self._results = results
        self._ending = ending
        self._nodes = rendezvous
        self._last_end = last_end

    def await_decision(self) -> float:
        """On a node that is its own coordinator: records what follows the last cycle, and waits for a backoff.

        No other node waits, so the decision is on the console before this node's health is checked. Among several nodes
        an unhealthy one must not have a place: there the arrival that brings the fault comes after the check. So this
        waits for nothing there, except after a request that ends this launcher (`_await_dismissal`).

        Returns:
            The seconds of the backoff; 0 also among several nodes.

        Raises:
            NoPlace: the job is over.
            SignalException: the launcher got a signal.
        """
        link = self._nodes.local_link
        if link is None:
            self._await_dismissal()
            return 0.0
        self._nodes.ask(link)
        place = self._nodes.answered()
        if place is not None:
            self._last_end.record(place.judgement, place.reason)
            return 0.0
        judgement = link.judgement
        assert judgement is not None, "a coordinator of one node answers at once, unless the policy waits"
        self._last_end.record(judgement, judgement.decision.reason)
        self._parts.times.begins(Category.BACKOFF)
        while self._nodes.answered() is None:
            due = link.next_deadline()
            assert due is not None
            # A signal must end the launcher at once during a backoff.
            number = self._ending.wait(due - time.monotonic())
            if number is not None:
                raise self._ending.error_without_ranks(number)
        return judgement.decision.wait_s

    def _await_dismissal(self) -> None:
        """Among several nodes, after a request that ends this launcher: waits for the coordinator's answer.

        No place follows for this node, so its health need not be checked before. A node that is cut off from the
        coordinator ends all the same, as its rank has asked.

        Raises:
            NoPlace: there was such a request.
            SignalException: the launcher got a signal.
        """
        asked = self._last_end.asked
        if asked is None or asks_for_restart(asked.request):
            return
        try:
            self._ending.call(lambda: self._nodes.await_place(self._nodes.link))
        except (RendezvousConnectionError, StoreLost) as error:
            logger.warning("the other nodes may not know what a rank has asked for: %s", one_line(error))
            code = REQUESTS[asked.request.action][1]
            assert code is not None, "the launcher ends"
            raise NoPlace(JobOver(int(code), asked_by(asked.rank, asked.request))) from None

    def try_to_join(self, assign_ranks: Callable[[], None]) -> bool:
        """Checks this node, waits for a place in the next cycle, and enters that cycle. Blocks, perhaps for ever: a
        spare waits until a node is lost.

        Args:
            assign_ranks: has torch's agent call the rendezvous, and numbers the ranks.

        Returns:
            Whether the cycle was entered. False: its store could not be made, and another formation follows.

        Raises:
            NoFurtherCycle: this node is unhealthy.
            NoPlace: the job is over for this node, or its store is lost.
            SignalException: the launcher got a signal.
            RendezvousConnectionError: the store of the job was never reached; or it is not ours.
        """
        unfit = check_node(self._parts, self._ranks.cycle, self._ending)
        if unfit:
            raise NoFurtherCycle(self._unhealthy(unfit))
        try:
            self._ending.call(assign_ranks)
        except (DistStoreError, DistNetworkError) as error:
            if self._nodes.is_local:
                raise
            # Another node may host the store of the cycle, and be gone: the coordinator forms another cycle, unless it
            # has ended this one already.
            if self._nodes.pop_end() is None:
                self._nodes.report_end(EndReason.FAILED, f"the store of the cycle cannot be made: {one_line(error)}")
            return False
        except RendezvousConnectionError as error:
            # Before its first place this node may never have reached the job's store: then no host was lost, and the
            # error is the user's to see.
            if self._nodes.place is None or self._nodes.is_local:
                raise
            raise NoPlace(JobOver(int(ExitCode.STORE_HOST_LOST), str(error))) from None
        return True

    def _unhealthy(self, reading: str) -> JobEnd:
        """Returns the end of the job for a node that is unhealthy. Records a fault that it has still to report, with
        the decision that this launcher leaves.

        Args:
            reading: the reading that is wrong, in words.
        """
        found = self._last_end.found
        code, reason = int(ExitCode.NODE_UNHEALTHY), f"this node is unhealthy: {reading}"
        # The fault would have gone to the coordinator with the request for a place, which this node does not make any
        # more. So no other node records the fault.
        if found.fault is not None:
            decision = Decision(Action.LEAVE, reason, exit_code=code)
            self._parts.recorder.failed(self._ranks.cycle, found.fault, decision, found.life)
        return JobEnd(code, reason, self._results.stopped())
