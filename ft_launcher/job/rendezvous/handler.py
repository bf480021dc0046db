"""One node's side of the rendezvous: torch's handler interface, and what our agent needs, over the protocol of `job/`.

`backends.py` makes the handler. torch's agent calls `next_rendezvous`, as of any handler; `agent/membership.py` and its
neighbours call the rest. Asks for this node's place in each cycle and opens the cycle's store. Must not end a rank, nor
know why a cycle failed: it passes on what the agent found.

From the end of one cycle to the next:

    1. The agent sets the fault of its ranks (`attach`), if they had one.
    2. `next_rendezvous` sends an arrival with that fault, and waits for the coordinator's answer: a place, or the end
       of the job (`NoPlace`). A node that is its own coordinator asks before (`ask`, `answered`), so that the agent can
       wait for a backoff in its own thread.
    3. The node of rank 0 makes the store of the cycle, and publishes its address. The others wait for the address, and
       connect once: a store that cannot be reached ends the cycle before a rank is started.
    4. Where the cycle ended meanwhile, all begins again with 2, in the same call.

Threads: the agent calls what may block (`next_rendezvous`, `await_place`, `leave`) in a thread that a signal to the
launcher leaves behind (`agent/ending_signal.py`), and all else in its own thread. The threads of `NodeLink` call
`waiting` and `on_question`.

The place in a cycle is asked for at one of two moments, and `_is_granted` joins the two:

- A node that is its own coordinator calls `ask` and `answered`, before its health is checked. `answered` sets
  `_is_granted`. Later torch's agent calls `next_rendezvous`, which finds the place and does not ask again.
- One of several nodes does not call `ask`. Its health is checked first; then torch's agent calls `next_rendezvous`,
  which asks and waits for the answer (`await_place`). Only after a request of a rank that ends this launcher does
  `Joining` call `await_place` before the check.

In both cases `next_rendezvous` resets `_is_granted` when it enters the cycle: the next cycle is asked for anew.
`agent/joining.py` lists all steps, torch's and ours.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Set
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from ft_launcher.decide.policy.case import FaultReport, RankRequest
from ft_launcher.job.coordinator.beat_schedule import lease_s
from ft_launcher.job.coordinator.node_messages import (
    CycleEnd,
    Ended,
    EndReason,
    JobOver,
    JoinRequest,
    Left,
    Members,
    RankAssigned,
)
from ft_launcher.job.link.attempt import NodeSettings
from ft_launcher.job.link.coordinator_link import CoordinatorLink
from ft_launcher.job.link.lease import Lease
from ft_launcher.job.link.local_link import LocalLink
from ft_launcher.job.link.node_link import NodeLink
from ft_launcher.job.link.questions import Questions, Topic
from ft_launcher.job.rendezvous.cycle_store import CycleStore, PortHolder
from ft_launcher.job.store.job_store import JobStore
from rank_monitor.contract.copy_records import CopyOffer
from rank_monitor.contract.errors import ProtocolError, StoreLost, one_line
from rank_monitor.contract.exit_codes import ExitCode
from rank_monitor.contract.processes import resolver
from rank_monitor.contract.processes.making_store import making_store
from rank_monitor.contract.wire.foreign import parse_json

# Seconds at least to connect to the cycle's store, whatever the node timeout: a busy host may need many for a new
# connection. A host that cannot be reached ends the cycle, not the job.
_CONNECT_S = 30.0


class NoPlace(RendezvousClosedError):  # type: ignore[misc]
    """No further cycle follows for this node; `over` has the exit code and the reason.

    To torch's agent it is a rendezvous that was closed.
    """

    def __init__(self, over: JobOver) -> None:
        super().__init__(over.reason)
        self.over = over


class NodeRendezvous(RendezvousHandler):  # type: ignore[misc]
    """torch's rendezvous handler of this node.

    Args:
        backend: the name torch knows this handler by.
        run_id: the job's id (`--rdzv-id`).
        open_store: connects to the job's store, or makes it where this node is its host. Called at the first formation,
            since it may block for minutes. None: the job has no other node and needs no store; the coordinator is in
            this process.
        me: who this node is; `seq`, `cycle` and `report` are filled in here.
        settings: the rules and times of the job.
        ports: hosts the store of a cycle if this node has rank 0.
        first_store: the ranks' store of the first cycle, where the user gave its address (static backend).
        shares: whether an agent hosts the ranks' store. With the static backend it always does, as in torch.

    Attributes:
        place: this node's last place; None: it has had none.
        cycle_store: the store of the current or last cycle; None: no cycle has begun.
        waiting: called with True when this node waits for a place while others run, with False when it has one. Must
            not block.
        copies: returns what the next request for a place says of copies of states in memory. May block for a second.
        on_question: called when another node asks something (`job/link/questions.py`), with the topic and the number of
            the question. Must not block.
    """

    follows_requests = True
    """Whether what a rank asks for can be passed on to the other nodes."""
    numbers_ranks = True
    """Whether the coordinator numbers the ranks of all nodes. If not, torch's agents do so among each other, and wait
    for each other at the end, in a store that the handler gives them."""

    def __init__(
        self,
        backend: str,
        run_id: str,
        open_store: Callable[[], JobStore] | None,
        me: JoinRequest,
        settings: NodeSettings,
        ports: PortHolder,
        first_store: CycleStore | None = None,
        shares: bool = True,
    ) -> None:
        self._backend = backend
        self._run_id = run_id
        self._closed = False
        self._ports = ports
        self._open_store, self._me, self._settings, self._first_store = open_store, me, settings, first_store
        self._shares = shares
        self.is_local = open_store is None
        """Whether the coordinator is in this process, for this node alone."""
        self.lease: Lease | None = None
        """How long the ranks may run after the last answered beat; None: the job has no other nodes."""
        self._link: CoordinatorLink | None = None
        if self.is_local:
            self._link = LocalLink(me.node, settings)
        else:
            self.lease = Lease(lease_s(settings.timeout_s, settings.beat_s))
        self.waiting: Callable[[bool], None] = lambda is_waiting: None
        self.copies: Callable[[], CopyOffer | None] = lambda: None
        self.on_question: Callable[[Topic, int], None] = lambda topic, number: None
        self.place: RankAssigned | None = None
        self._is_joining = False
        self._is_granted = False
        """Whether `place` is the answer to `ask`, and its cycle was not entered yet."""
        self.cycle_store: CycleStore | None = None
        self._end: CycleEnd | None = None
        """An end that `has_ended` has found."""

    # torch's interface.

    def get_backend(self) -> str:
        """The backend's name."""
        return self._backend

    def get_run_id(self) -> str:
        """The job's id."""
        return self._run_id

    def is_closed(self) -> bool:
        """Whether this node has left."""
        return self._closed

    def set_closed(self) -> None:
        """Does nothing: a node that leaves does not end the job for the others."""

    def num_nodes_waiting(self) -> int:
        """Returns 0: the coordinator ends a cycle that is to grow, not the agents; and one node has no others."""
        return 0

    @property
    def use_agent_store(self) -> bool:
        """Whether an agent hosts the ranks' store."""
        return self._shares

    def shutdown(self) -> bool:
        """Leaves the job, unless the agent has done so already."""
        self.leave("its launcher ends")
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for this node's place in the next cycle, and opens the cycle's store. Called by torch's agent.

        Returns:
            What torch's agent needs to know of the cycle: node rank, number of nodes, and the store's address.

        Raises:
            NoPlace: there is no further cycle for this node.
            RendezvousConnectionError: the store is lost, or this node is cut off from it.
        """
        try:
            link = self._link or self._connect()
            while True:
                place = self.await_place(link)
                self._is_granted = False
                info = self._enter(link, place)
                if info is not None:
                    return info
        except StoreLost as lost:
            raise RendezvousConnectionError(f"the rendezvous' store is lost: {lost}") from None

    def _connect(self) -> NodeLink:
        """Opens the job's store and links this node to the others, before its first arrival. Blocks."""
        assert self._open_store is not None and self.lease is not None
        link = NodeLink(self._me.node, self._open_store(), self._settings, self.lease)
        link.questions.on_question = self.on_question
        link.questions.on_waiting = lambda: self.waiting(True)
        self._link = link
        # A signal may have ended the agent while this thread connected. Then `leave`, in another thread, found no link
        # to close, and this thread was left behind: so the link is closed here.
        if self._closed:
            link.close(Left(self._me.node, "its launcher ends"), self._settings.beat_s)
            raise NoPlace(JobOver(int(ExitCode.OK), "this node has left"))
        return link

    # The agent's interface.

    @property
    def is_alone(self) -> bool:
        """Whether the job has no other node, ever. Not the same as `is_local`: a node under a handler that is not ours
        is its own coordinator among several nodes, so `ForeignRendezvous` sets this to False."""
        return self.is_local

    def names(self) -> tuple[list[str], list[str]]:
        """Returns the host names of the cycle's nodes, by rank, and of waiting nodes; the node of rank 0 knows them."""
        assert self.place is not None
        return self.place.active, self.place.standby

    def descriptors(self) -> set[int]:
        """Returns the descriptors that are readable when the end of a cycle may have arrived: one, or none."""
        descriptor = self.link.fileno()
        if descriptor is None:
            return set()
        return {descriptor}

    def next_check(self) -> float | None:
        """Returns when `poll` and `NodeLink.cut` must be called (monotonic seconds); None: there are no other nodes.

        This node must know that it is cut off before others count it as lost.
        """
        if self.is_local:
            return None
        return time.monotonic() + self.check_s

    def poll(self, ready: Set[int]) -> None:
        """Does what is due while a cycle runs: nothing, since the link has threads."""

    def trouble(self) -> Exception | None:
        """Returns the last error of the store; None while it answers."""
        return self.link.trouble()

    @property
    def node(self) -> str:
        """This node's id."""
        return self._me.node

    @property
    def link(self) -> CoordinatorLink:
        """This node's link to the coordinator. There is one from the first place on; its `fileno` is readable when
        `pop_end` has an end to return."""
        assert self._link is not None, "this node has had no place yet"
        return self._link

    @property
    def node_link(self) -> NodeLink | None:
        """This node's link to other nodes; None: there are none, or this node has had no place yet."""
        if isinstance(self._link, NodeLink):
            return self._link
        return None

    @property
    def local_link(self) -> LocalLink | None:
        """The link to the coordinator in this process; None: there are other nodes."""
        if isinstance(self._link, LocalLink):
            return self._link
        return None

    @property
    def hosts_store(self) -> bool:
        """Whether this node hosts the job's store, or that of the current cycle, for other nodes."""
        if self.is_local:
            return False
        hosts_cycle = self.cycle_store is not None and self.cycle_store.server is not None
        return hosts_cycle or (self._link is not None and self._link.hosts_store)

    @property
    def current_place(self) -> RankAssigned | None:
        """This node's place; None: it has none yet, or waits for its next one, and another node may have this one."""
        if self._is_joining:
            return None
        return self.place

    @property
    def questions(self) -> Questions | None:
        """Asks the other nodes; None: this node is not linked to them."""
        link = self.node_link
        if link is None or self._closed:
            return None
        return link.questions

    def members(self) -> Members | None:
        """Returns the nodes of the current or last cycle; None: this node is not the coordinator, or there was none."""
        coordination = self.node_link.coordination if self.node_link is not None else None
        if coordination is None or not coordination.at_work:
            return None
        return coordination.members

    @property
    def close_s(self) -> float:
        """How long `leave` takes at most where it has no other limit (seconds)."""
        return self._settings.close_s

    @property
    def check_s(self) -> float:
        """How often `NodeLink.cut` must be called while ranks run (seconds)."""
        # A node must give up before others count it as lost; `beat_schedule.py` reckons with this quarter.
        return self._settings.beat_s / 4

    def pop_end(self) -> CycleEnd | None:
        """Returns the end of this node's cycle if it has arrived. Does not block."""
        if self.has_ended():
            end, self._end = self._end, None
            return end
        return None

    def has_ended(self) -> bool:
        """Returns whether `pop_end` has an end to return. Does not block."""
        if self._link is None or self.place is None:
            return False
        if self._end is None or self._end.cycle != self.place.cycle:
            self._end = self._link.pop_end(self.place.cycle)
        return self._end is not None

    def report_end(self, end_reason: EndReason, reason: str, asked: RankRequest | None = None, number: int = 0) -> None:
        """Reports how the cycle ended on this node; returns at once.

        After a failure it is called before the ranks are stopped, so that all nodes stop theirs together.

        Args:
            end_reason: how it ended.
            reason: why, in words, for the other nodes.
            asked: what a rank of this node asks for; None: none does.
            number: of the signal that preempts this node; 0: none does.
        """
        if self._link is not None and self.place is not None:
            self._link.send(Ended(self._me.node, self.place.cycle, end_reason, reason, asked, number))

    def ranks_ended(self) -> None:
        """Reports, after a preemption, that the ranks of this node have ended. Returns at once.

        The hosts of the ranks' stores wait for this: ranks that still save would lose the store.
        """
        if self.node_link is not None and self.place is not None:
            self.node_link.ranks_ended(self.place)

    def await_ranks(self) -> str:
        """Begins to wait until the ranks of the cycle have ended on the other nodes, too. Returns at once.

        Returns:
            The key whose value the queue `NodeLink.stopped` receives last; empty: nothing is to be waited for.
        """
        link = self.node_link
        if link is None or self._closed or self.place is None or self.place.nodes == 1:
            return ""
        return link.await_ranks(self.place)

    def attach(self, report: FaultReport | None, views: dict[str, Any] | None = None) -> None:
        """Sets the fault of this node's ranks in the last cycle, which the next arrival carries.

        Args:
            report: the fault; None: none of them failed by itself.
            views: what the node saw of them, as `JoinRequest` has it.
        """
        self._me = replace(self._me, report=report, views=views or {})

    def leave(self, reason: str, limit_s: float | None = None, number: int = 0) -> None:
        """Leaves the job for good. The coordinator's node waits until the others know the job's end.

        Called on every way out of the launcher, also by torch (`shutdown`); the first call counts. Blocks in the store
        beyond the limit where the store does not answer: the agent calls it in a thread.

        Args:
            reason: why, for the other nodes.
            limit_s: of that wait, in seconds; None: `close_s`.
            number: of the signal that preempts this node; 0: none does.
        """
        if not self._closed:
            self._closed = True
            if self.lease is not None:
                self.lease.end()
            if limit_s is None:
                limit_s = self.close_s
            if self._link is not None:
                self._link.close(Left(self._me.node, reason, number), limit_s)

    # Becoming a member.

    def answered(self, limit_s: float = 0.0) -> RankAssigned | None:
        """Waits up to `limit_s` seconds for the answer to `ask`; returns this node's place, None if none arrived.

        Raises:
            NoPlace: there is no further cycle for this node.
            RendezvousConnectionError: what arrived cannot be read.
        """
        link = self.link
        try:
            answer = link.answer(self._me.seq, limit_s)
        except ProtocolError as error:
            raise RendezvousConnectionError(f"the coordinator's answer cannot be read: {error}") from None
        if answer is None:
            return None
        # The coordinator has the fault now; a later arrival must not bring it again.
        self._me = replace(self._me, report=None, views={})
        if isinstance(answer, JobOver):
            raise NoPlace(answer)
        self.place, self._is_joining, self._is_granted = answer, False, True
        link.entered(answer, hosted_by_user=self._is_hosted_by_user(answer))
        self.waiting(False)
        return answer

    def ask(self, link: CoordinatorLink) -> None:
        """Asks the coordinator for a place in the next cycle: sends this node's next arrival, with the fault of its
        ranks and the number of the cycle that it left. Returns at once.

        A node that is its own coordinator asks before the rendezvous of torch's agent; `await_place` then does not.
        """
        self._is_joining = True
        if self.place:
            cycle = self.place.cycle
        else:
            cycle = self._me.cycle
        self._me = replace(self._me, seq=self._me.seq + 1, cycle=cycle, copies=self.copies())
        self._rename_if_superseded(link)
        link.ask(self._me)

    def await_place(self, link: CoordinatorLink) -> RankAssigned:
        """Waits until the coordinator has given this node a place, and returns it. `next_rendezvous` then does not ask.

        There is no limit: a spare may wait for days. Once in each beat it checks whether this node is cut off. Where
        this node was the coordinator and another has taken over, it sends its arrival again, under another id.

        Raises:
            NoPlace: there is no further cycle for this node.
            RendezvousConnectionError: this node is cut off.
        """
        if not self._is_granted:
            self.ask(link)
            while self.answered(self._settings.beat_s) is None:
                self._must_be_linked(link)
                if self._rename_if_superseded(link):
                    link.ask(self._me)
        assert self.place is not None
        return self.place

    def _rename_if_superseded(self, link: CoordinatorLink) -> bool:
        """Takes a new id if another coordinator took over from this node; returns whether it did.

        The new coordinator ignores messages under the old id: they may still be in the inbox, from the time before.
        """
        superseded = link.was_superseded()
        if superseded:
            self._me = replace(self._me, node=f"{self._me.node}+", seq=self._me.seq + 1)
        return superseded

    def _must_be_linked(self, link: CoordinatorLink) -> None:
        """Checks that this node is still a member. Call it while waiting.

        Raises:
            RendezvousConnectionError: this node is cut off.
            NoPlace: this node has left.
        """
        cut = link.cut(time.monotonic())
        if cut is not None:
            raise RendezvousConnectionError(cut.reason)
        if self._closed:
            raise NoPlace(JobOver(int(ExitCode.OK), "this node has left"))

    def _is_hosted_by_user(self, place: RankAssigned) -> bool:
        """Whether the cycle's store is at the address that all nodes have from their command lines."""
        return place.cycle == 0 and self._first_store is not None

    def _host_of_cycle(self, link: CoordinatorLink, cycle: int) -> bytes:
        """Waits for the address of the cycle's store; empty: the cycle ended first."""
        while self.pop_end() is None:
            text = link.host_of_cycle(cycle, self._settings.beat_s)
            if text is not None:
                return text
            self._must_be_linked(link)
        return b""

    def _enter(self, link: CoordinatorLink, place: RankAssigned) -> RendezvousInfo | None:
        """Opens the cycle's store, which the node of rank 0 hosts.

        Returns None if the cycle ended first, or if the store cannot be reached: that has then been reported, and
        another cycle follows.
        """
        if self._is_hosted_by_user(place):
            self.cycle_store = self._first_store
            return self._info(place)
        if place.rank == 0:
            # Static: the user's own name for the first node, which the other nodes can reach.
            if self._first_store is not None:
                host = self._first_store.host
            else:
                host = self._me.address
            self.cycle_store = self._ports.host(place.cycle, host, self.use_agent_store)
            # After the server listens: the others connect at once.
            link.announce(place.cycle, json.dumps(self.cycle_store.address()))
            return self._info(place)
        text = self._host_of_cycle(link, place.cycle)
        if not text:
            return None
        self.cycle_store = CycleStore.of_another_node(place.cycle, parse_json(text))
        try:
            self._reach(self.cycle_store)
        except (RuntimeError, OSError) as error:
            where = f"{self.cycle_store.host}:{self.cycle_store.port}"
            self.report_end(
                EndReason.FAILED, f"the store of the cycle at {where} cannot be reached ({one_line(error)})"
            )
            return None
        return self._info(place)

    def _reach(self, store: CycleStore) -> None:
        """Connects to a cycle's store, and leaves it again: if no rank can reach it, no rank need be started.

        Raises:
            RuntimeError, OSError: it cannot be reached.
        """
        # Not less than the node timeout: until then the host may only be slow, and not lost.
        limit = timedelta(seconds=max(_CONNECT_S, self._settings.timeout_s))
        with resolver.towards(store.host, store.port) as address, making_store():
            TCPStore(address, store.port, is_master=False, wait_for_workers=False, timeout=limit)

    def _info(self, place: RankAssigned) -> RendezvousInfo:
        """Returns what torch's agent needs: a store in its own memory, since the coordinator numbers the ranks."""
        assert self.cycle_store is not None
        where = RendezvousStoreInfo(self.cycle_store.host, self.cycle_store.port)
        return RendezvousInfo(HashStore(), place.rank, place.nodes, where)
