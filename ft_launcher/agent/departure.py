"""The departure of this node from its job: the last word to the other nodes, and what is waited for before it.

The membership has one `Departure`. Its methods are called on the agent's thread:

- `after_success`, when the ranks of all nodes are done, before this node waits for background processes.
- `leave`, at the very end of every job, when ranks, monitors and zygote have ended. After a success it finds that the
  node has left already, and returns at once.

Both block: the node that hosts the job's store must stay until the other nodes know how the job ended. What waits in
the store runs in a thread of `EndingSignal.call_at_end`, so that a signal ends the launcher also where the store does
not answer. A node that does not leave properly is counted as lost by the others, which costs them a node timeout.
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
        """Leaves after the ranks of all nodes are done. Background processes of the ranks may still run.

        Called before the wait for these, so that no other node waits for them, too.
        """
        self._leave("its launcher ends", self._exit_barrier_s, 0)

    def leave(self, job_end: JobEnd | None) -> None:
        """Leaves the job for good, at the very end of the launcher.

        A node that succeeded waits for the others up to `--ft-exit-barrier-timeout`, any other one only as long as the
        rendezvous takes to close (`close_timeout`). A node that was preempted and hosts a store first waits for ranks
        of other nodes that still save.

        Args:
            job_end: how the job ended; its reason is passed on to the other nodes. None: an exception ended the agent.
        """
        limit_s = None
        if job_end is not None and job_end.exit_code == ExitCode.OK:
            limit_s = self._exit_barrier_s
        reason = "its launcher ends"
        if job_end is not None and job_end.reason:
            reason = job_end.reason
        number = self._ending.preempting
        if number:
            reason = told_to_end(number)
        if self._nodes.hosts_store:
            self._await_other_ranks()
        self._leave(reason, limit_s, number)
        if self._nodes.lease is not None:
            self._nodes.lease.close()

    def _leave(self, reason: str, limit_s: float | None, number: int) -> None:
        """Leaves as `NodeRendezvous.leave`, whose arguments these are. Blocks until that is done.

        After a signal to this launcher it blocks for `close_timeout` and `_THREADS_END_S` at most, and a line of the
        log says so where that was not enough.
        """
        if self._ending.number is not None:
            limit_s = None

        def leave() -> None:
            self._nodes.leave(reason, limit_s, number)

        after_signal_s = self._nodes.close_s + _THREADS_END_S
        if not self._ending.call_at_end(leave, after_signal_s):
            logger.warning(
                "this node ends before it has left the rendezvous, for which a signal leaves %g s: the other nodes may "
                "count it as lost",
                after_signal_s,
            )

    def _await_other_ranks(self) -> None:
        """Waits after a preemption while ranks of other nodes save, since they need the store that this node hosts.

        Blocks at most for the rest of the time that the ranks of this node had to save (`--ft-preemption-grace`). A
        second signal shortens the wait. Returns at once where there was no preemption.
        """
        ends_at = self._ending.grace_ends_at
        if time.monotonic() >= ends_at:
            return
        last, link = self._nodes.await_ranks(), self._nodes.node_link
        assert link is not None
        while last and (left := ends_at - time.monotonic()) > 0 and link.cut(time.monotonic()) is None:
            readable({self._ending.fileno(), link.stopped.fileno()}, min(left, self._nodes.check_s))
            ends_at = min(ends_at, time.monotonic() + self._ending.time_left())
            if link.stopped.pop(last, 0.0) is not None:
                return
