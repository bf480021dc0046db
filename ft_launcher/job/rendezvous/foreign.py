"""A rendezvous handler that is not ours, as a node of ours uses it: torch's `etcd` and `etcd-v2`, or another package's.

Such a handler forms the group of nodes and knows nothing of what ends a cycle. So each agent decides about its own
ranks, as torch's does: the coordinator of the node is in its own process (`LocalLink`), and its "job" has one node. The
numbers of cycles and the address of the ranks' store go through the store of the handler.

What differs from `NodeRendezvous`, for the agent: a request of a rank that concerns other nodes is refused; torch's
agents number the ranks and wait for each other at the end; and the handler is asked from time to time whether nodes
wait, since it does not report them by itself.
"""

from __future__ import annotations

import time
from collections.abc import Set

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo

from ft_launcher.job.coordinator.node_messages import Ended, EndReason, JoinRequest
from ft_launcher.job.link.attempt import NodeSettings
from ft_launcher.job.link.coordinator_link import CoordinatorLink
from ft_launcher.job.rendezvous import cycle_store
from ft_launcher.job.rendezvous.blocking_call import BlockingCall
from ft_launcher.job.rendezvous.cycle_store import PortHolder
from ft_launcher.job.rendezvous.handler import NodeRendezvous


class ForeignRendezvous(NodeRendezvous):
    """One node under a handler that is not ours.

    Args:
        handler: the one that is not ours, guarded (`guarded_handler.py`).
        me: this node, as its own coordinator knows it.
        settings: the rules of a job of one node.
        ports: hosts the store of a cycle if this node has rank 0.
        poll_s: how often the handler is asked for nodes that wait to join (seconds); `--monitor-interval`.
    """

    is_alone = False
    """There may be other nodes, which the coordinator of this node does not know."""
    follows_requests = False
    """A request of a rank may concern other nodes, and nobody would notify them."""
    numbers_ranks = False

    def __init__(
        self, handler: RendezvousHandler, me: JoinRequest, settings: NodeSettings, ports: PortHolder, poll_s: float
    ) -> None:
        super().__init__(
            handler.get_backend(), handler.get_run_id(), open_store=None, me=me, settings=settings, ports=ports
        )
        self._handler = handler
        self._poll_s = poll_s
        self._next_poll = 0.0
        self._question: BlockingCall[int] | None = None
        """The question to the handler, how many nodes wait to join; None: it is not asked now."""
        self._last_error: Exception | None = None
        """The error of the last question; None: it was answered, or is not yet."""

    # torch's interface.

    @property
    def use_agent_store(self) -> bool:
        """Whether an agent hosts the ranks' store."""
        return bool(self._handler.use_agent_store)

    def is_closed(self) -> bool:
        """Whether the rendezvous is closed."""
        return bool(self._handler.is_closed())

    def set_closed(self) -> None:
        """Closes the rendezvous for all nodes."""
        self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        """Returns how many nodes wait to join. Blocks as long as the handler's store does."""
        return int(self._handler.num_nodes_waiting())

    def shutdown(self) -> bool:
        """Closes the rendezvous at the end of the job; returns whether that was done."""
        self.leave("its launcher ends")
        return bool(self._handler.shutdown())

    def next_rendezvous(self) -> RendezvousInfo:
        """Has the handler form the next cycle, and makes or finds the cycle's store. Blocks as long as other nodes do.

        Our own coordinator, of this node alone, has answered before: the agent asked it (`ask`, `answered`).
        """
        self._is_granted = False
        info = self._handler.next_rendezvous()
        if info.rank != 0:
            self.cycle_store = cycle_store.learn(info.store)
            return info
        at_least = 0
        if self.cycle_store is not None:
            at_least = self.cycle_store.cycle + 1
        master = info.bootstrap_store_info.master_addr
        run_id, shared = self.get_run_id(), self.use_agent_store
        self.cycle_store = cycle_store.publish(info.store, self._ports, master, run_id, at_least, shared)
        return info

    # The agent's interface.

    def ask(self, link: CoordinatorLink) -> None:
        """As in the base class. The handler takes one call at a time: a question without an answer is left behind."""
        self._drop_question()
        super().ask(link)

    def names(self) -> tuple[list[str], list[str]]:
        """Returns nothing: such handlers know no names."""
        return [], []

    def descriptors(self) -> set[int]:
        """Returns the descriptors that are readable when the handler has answered: one while it is asked, else none."""
        if self._question is None:
            return set()
        return {self._question.fileno()}

    def next_check(self) -> float | None:
        """Returns when to ask the handler for new members (monotonic seconds); None: it is asked now."""
        if self._question is None:
            return self._next_poll
        return None

    def poll(self, ready: Set[int]) -> None:
        """Asks the handler whether nodes wait to join, and ends the cycle once they do. Does not block.

        The question is an operation on the handler's store, which may take as long as the network does, or for ever.
        """
        self._last_error = None
        try:
            if self._question is not None:
                if self._question.is_done:
                    self._plan_poll()
                    self._process_answer(self._question)
            elif time.monotonic() >= self._next_poll:
                self._plan_poll()
                self._question = BlockingCall(self._handler.num_nodes_waiting, name="ft_waiting_nodes")
        except Exception as error:  # the training is healthy: a store that does not answer ends nothing
            self._last_error = error

    def trouble(self) -> Exception | None:
        """Returns the error of the last question; None: it was answered, or is not yet."""
        return self._last_error

    def leave(self, reason: str, limit_s: float | None = None, number: int = 0) -> None:
        """Leaves behind a question that has no answer yet. `shutdown`, which our launcher calls, closes the handler."""
        self._drop_question()
        super().leave(reason, limit_s, number)

    def _process_answer(self, question: BlockingCall[int]) -> None:
        """Ends the cycle where nodes wait to join: reports to this node's coordinator that the cycle is to grow.

        Raises what the question raised.
        """
        self._drop_question()
        if question.result() > 0 and self.place is not None:
            self.link.send(Ended(self.node, self.place.cycle, EndReason.GREW, "other nodes wait to take part"))

    def _plan_poll(self) -> None:
        self._next_poll = time.monotonic() + self._poll_s

    def _drop_question(self) -> None:
        """Leaves a question behind, whose answer says nothing any more: another cycle forms, or the job ends."""
        if self._question is not None:
            self._question.close()
            self._question = None
