"""The departure of this node from its job: the last word to the other nodes, and what is waited for before it.

The membership has one `Departure`. Its methods are called in the agent's thread. They wait in the store in a thread of
`EndingSignal.call_at_end`, so that a signal ends the launcher also where the store does not answer.
"""

from __future__ import annotations

import logging
import time

from ft_launcher.agent.ending_signal import EndingSignal
from ft_launcher.agent.job_end import JobEnd
from ft_launcher.job.rendezvous.handler import NodeRendezvous
from ft_launcher.node.processes.signals import told_to_end
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.processes.wait import readable

logger = logging.getLogger(__name__)

_THREADS_END_S = 2.0
"""Seconds for the threads of the link to end, beyond the time in which the rendezvous closes (`close_timeout`)."""


class Departure:
    """Leaves the job for this node.

    Args:
        ending: the signal that ends the launcher.
        rendezvous: connects this node to the coordinator.
        exit_barrier_s: how long a node whose ranks are done waits for the others (`--ft-exit-barrier-timeout`).
    """

    def __init__(self, ending: EndingSignal, rendezvous: NodeRendezvous, exit_barrier_s: float) -> None:
        self._ending = ending
        self._nodes = rendezvous
        self._exit_barrier_s = exit_barrier_s

    def after_success(self) -> None:
        """Leaves after the ranks of all nodes are done; processes that these left may run on meanwhile."""
        self._leave("its launcher ends", self._exit_barrier_s, 0)

    def leave(self, job_end: JobEnd | None) -> None:
        """Leaves the job for good: waits for the other nodes to know its end where this one succeeded."""
        limit_s = None
        if job_end is not None and job_end.exit_code == ExitCode.OK:
            limit_s = self._exit_barrier_s
        why = "its launcher ends"
        if job_end is not None and job_end.reason:
            why = job_end.reason
        number = self._ending.preempting
        if number:
            why = told_to_end(number)
        if self._nodes.hosts_store:
            self._await_other_ranks()
        self._leave(why, limit_s, number)
        if self._nodes.lease is not None:
            self._nodes.lease.close()

    def _leave(self, why: str, limit_s: float | None, number: int) -> None:
        """As `NodeRendezvous.leave`. A signal to this launcher shortens it, also where the store does not answer."""
        if self._ending.number is not None:
            limit_s = None

        def leave() -> None:
            self._nodes.leave(why, limit_s, number)

        after_signal_s = self._nodes.close_s + _THREADS_END_S
        if not self._ending.call_at_end(leave, after_signal_s):
            logger.warning(
                "this node ends before it has left the rendezvous, for which a signal leaves %g s: the other nodes may "
                "count it as lost",
                after_signal_s,
            )

    def _await_other_ranks(self) -> None:
        """After a preemption: waits while ranks of other nodes save, which would lose the store that this node hosts.

        For the rest of the time that the ranks of this node had for it, at most. A second signal shortens it.
        """
        ends_at = self._ending.grace_ends_at
        if time.monotonic() >= ends_at:
            return
        last, link = self._nodes.await_ranks(), self._nodes.node_link
        assert link is not None
        while last and (left := ends_at - time.monotonic()) > 0 and link.cut(time.monotonic()) is None:
            readable({self._ending.fileno(), link.stopped.fileno()}, min(left, self._nodes.check_s))
            ends_at = min(ends_at, time.monotonic() + self._ending.time_left())
            if link.stopped.take(last, 0.0) is not None:
                return
