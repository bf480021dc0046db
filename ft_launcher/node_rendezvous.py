"""The rendezvous of a job of several nodes, from one node's side: torch's handler over the protocol of `nodes/`.

Asks for this node's place in each cycle, and opens the store of the cycle. Nothing here ends a rank.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from ft_launcher.cycle_store import CycleStore, PortHolder, shares_store
from ft_launcher.nodes.attempt import Candidate, become_coordinator
from ft_launcher.nodes.coordination import Coordination
from ft_launcher.nodes.job_store import JobStore
from ft_launcher.nodes.lease import Lease
from ft_launcher.nodes.link import Cut, Link
from ft_launcher.nodes.messages import Arrive, CycleEnd, Ended, Gone, How, Over, Place, decode
from ft_launcher.nodes.silence import lease_s
from ft_launcher.nodes.terms import Judge, Rules
from rank_monitor.contract import resolver
from rank_monitor.contract.errors import ProtocolError, StoreLost
from rank_monitor.contract.exit_codes import ExitCode

_CONNECT_S = 30.0


class JobOver(RendezvousClosedError):  # type: ignore[misc]
    """There will be no further cycle for this node; `over` says with which exit code, and why."""

    def __init__(self, over: Over) -> None:
        super().__init__(over.reason)
        self.over = over


@dataclass(frozen=True)
class Terms:
    """What a node and a coordinator go by.

    Seconds: the period of beats, when a silent node is lost, and how long the rendezvous may take to close.
    """

    rules: Rules
    judge: Judge
    beat_s: float
    timeout_s: float
    close_s: float = 5.0


class NodeRendezvous(RendezvousHandler):  # type: ignore[misc]
    """torch's rendezvous handler of this node.

    Args:
        backend: the name torch knows this handler by.
        run_id: the job's id.
        open_store: connects to the job's store, or makes it where this node is its host.
        me: who this node is; `seq`, `cycle` and `fault` are filled in here.
        terms: what all go by.
        ports: hosts the store of a cycle when this node has rank 0.
        first_store: the ranks' store of the first cycle, where the user gave its address.
    """

    def __init__(
        self,
        backend: str,
        run_id: str,
        open_store: Callable[[], JobStore],
        me: Arrive,
        terms: Terms,
        ports: PortHolder,
        first_store: CycleStore | None = None,
    ) -> None:
        self._backend, self._run_id, self._ports = backend, run_id, ports
        self._open_store, self._me, self._terms, self._first_store = open_store, me, terms, first_store
        self.lease = Lease(lease_s(terms.timeout_s, terms.beat_s))
        self._link: Link | None = None
        self._closed = False
        self.place: Place | None = None
        self.cycle_store: CycleStore | None = None

    # torch's interface.

    def get_backend(self) -> str:
        """The backend's name."""
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        """Whether an agent hosts the ranks' store. With the static backend it always does, as in torch."""
        return self._first_store is not None or shares_store(os.environ)

    def is_closed(self) -> bool:
        """Whether this node has left."""
        return self._closed

    def set_closed(self) -> None:
        """Nothing: a node that leaves does not end the job for others."""

    def num_nodes_waiting(self) -> int:
        """Nobody: it is the coordinator that ends a cycle which is to grow."""
        return 0

    def get_run_id(self) -> str:
        """The job's id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Leaves, unless the agent has already."""
        self.leave("its launcher ends")
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for this node's place in the next cycle.

        Raises:
            JobOver: there is none, and why.
            RendezvousConnectionError: the store is lost.
        """
        try:
            if self._link is None:
                terms = self._terms
                store = self._open_store()
                self._link = Link(self._me.node, store, self._coordinate, self.lease, terms.beat_s, terms.timeout_s)
                if self._closed:  # by another thread, while this one connected
                    self._link.close(Gone(self._me.node, "its launcher ends"), terms.beat_s)
                    raise JobOver(Over(int(ExitCode.OK), "this node has left"))
            while True:
                place = self._ask_for_place(self._link)
                if (info := self._enter(self._link, place)) is not None:
                    return info
        except StoreLost as lost:
            raise RendezvousConnectionError(f"the rendezvous' store is lost: {lost}") from None

    # The agent's interface.

    @property
    def node(self) -> str:
        """This node's id."""
        return self._me.node

    def descriptors(self) -> set[int]:
        """Readable when the end of a cycle was told."""
        return {self._link.fileno()} if self._link and not self._closed else set()

    @property
    def check_s(self) -> float:
        """How often `cut` is to be asked while ranks run."""
        return self._terms.beat_s / 4

    def cut(self, now: float) -> Cut | None:
        """Whether this node must end its ranks, because others may have gone on without it."""
        return self._link.cut(now) if self._link else None

    def attend(self, attends: bool) -> None:
        """Whether the agent takes the cycle's end from now on as soon as it is told."""
        if self._link is not None:
            self._link.attended = attends

    def wake(self) -> None:
        """This node stood still: the store has its whole time again to answer."""
        if self._link is not None:
            self._link.wake(time.monotonic())

    def trouble(self) -> Exception | None:
        """What went wrong with the store at the last beat; None while it answers."""
        return self._link.trouble() if self._link else None

    def take_end(self) -> CycleEnd | None:
        """The end of the cycle this node is in, once it was told."""
        return self._link.take_end(self.place.cycle) if self._link and self.place else None

    def tell(self, how: How, reason: str, exit_code: int = 0, number: int = 0) -> None:
        """Tells what became of this node's part of the cycle; returns at once. `number`: of the preempting signal."""
        if self._link is not None and self.place is not None:
            self._link.send(Ended(self._me.node, self.place.cycle, how.value, reason, exit_code, number))

    def bring(self, fault: dict[str, Any]) -> None:
        """What happened to this node's ranks in the cycle that ended; it goes with the next arrival."""
        self._me = replace(self._me, fault=fault)

    def leave(self, reason: str, limit_s: float | None = None) -> None:
        """Leaves for good. The store's host stays until the others know the job's end, at most `limit_s`.

        None: as long as the rendezvous may take to close.
        """
        if not self._closed:
            self._closed = True
            self.lease.end()
            if self._link is not None:
                self._link.close(Gone(self._me.node, reason), self._terms.close_s if limit_s is None else limit_s)

    # Becoming a member.

    def _coordinate(self, lost_term: int, store: JobStore) -> Coordination | None:
        terms, hosts = self._terms, store.hosted_here
        rules = replace(terms.rules, hosts=hosts, deputies=0 if hosts else terms.rules.deputies)
        if lost_term == 0 and (other := store.other_job(self._run_id)):
            hint = f"the store holds the job {other!r}, this one is {self._run_id!r}: is --rdzv-id right?"
            rules = replace(rules, hint=hint)
        me = Candidate(self._me.node, rules, terms.judge, terms.beat_s, terms.timeout_s)
        return become_coordinator(me, store, lost_term)

    def _ask_for_place(self, link: Link) -> Place:
        cycle = self.place.cycle if self.place else self._me.cycle
        self._me = replace(self._me, seq=self._me.seq + 1, cycle=cycle)
        self._rename_if_deposed(link)
        link.ask(self._me)
        while (text := link.answer(self._me.seq, self._terms.beat_s)) is None:
            self._must_be_linked(link)
            if self._rename_if_deposed(link):
                link.ask(self._me)
        self._me = replace(self._me, fault={})
        try:
            answer = decode(text)
        except ProtocolError as error:
            raise RendezvousConnectionError(f"the coordinator's answer cannot be read: {error}") from None
        if isinstance(answer, Over):
            raise JobOver(answer)
        assert isinstance(answer, Place)
        self.place = answer
        link.entered(answer, self._terms.rules.deputies, self._is_hosted_by_user(answer))
        return answer

    def _rename_if_deposed(self, link: Link) -> bool:
        """Whoever took over from this node knows it as gone, and its messages as those of a dead one."""
        if deposed := link.was_deposed():
            self._me = replace(self._me, node=f"{self._me.node}+", seq=self._me.seq + 1)
        return deposed

    def _must_be_linked(self, link: Link) -> None:
        """To be called while waiting.

        Raises:
            RendezvousConnectionError: this node is cut off.
            JobOver: this node has left.
        """
        if (cut := link.cut(time.monotonic())) is not None:
            raise RendezvousConnectionError(cut.reason)
        if self._closed:
            raise JobOver(Over(int(ExitCode.OK), "this node has left"))

    def _is_hosted_by_user(self, place: Place) -> bool:
        """Whether the cycle's store is the one whose address all have from their command line."""
        return place.cycle == 0 and self._first_store is not None

    def _host_of_cycle(self, link: Link, cycle: int) -> bytes:
        """Where rank 0 hosts the cycle's store; empty: the cycle ended first."""
        while self.take_end() is None:
            if (text := link.host_of_cycle(cycle, self._terms.beat_s)) is not None:
                return text
            self._must_be_linked(link)
        return b""

    def _enter(self, link: Link, place: Place) -> RendezvousInfo | None:
        """Opens the cycle's store, hosted by rank 0; None: the cycle ended before."""
        if self._is_hosted_by_user(place):
            self.cycle_store = self._first_store
            return self._info(place, link.another_store())
        if place.rank == 0:
            # Static: the user's own name for the first node, which the other nodes can reach.
            host = self._first_store.host if self._first_store is not None else self._me.address
            server = self._ports.serve()
            ranks_port = 0 if self.use_agent_store else self._ports.for_rank_0()
            self.cycle_store = CycleStore(place.cycle, host, server.port, server, ranks_port)
            link.announce(place.cycle, json.dumps({"host": host, "port": server.port, "ranks_port": ranks_port}))
            return self._info(place, server)
        if not (text := self._host_of_cycle(link, place.cycle)):
            return None
        found = json.loads(text)
        self.cycle_store = CycleStore(
            place.cycle, str(found["host"]), int(found["port"]), None, int(found["ranks_port"])
        )
        limit = timedelta(seconds=max(_CONNECT_S, self._terms.timeout_s))
        try:
            host, port = self.cycle_store.host, self.cycle_store.port
            with resolver.bounded_towards(host):
                client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        except (RuntimeError, OSError) as error:
            where = f"{self.cycle_store.host}:{self.cycle_store.port}"
            self.tell(How.FAILED, f"the store of the cycle at {where} cannot be reached ({str(error).splitlines()[0]})")
            return None
        return self._info(place, client)

    def _info(self, place: Place, store: Store) -> RendezvousInfo:
        assert self.cycle_store is not None
        where = RendezvousStoreInfo(self.cycle_store.host, self.cycle_store.port)
        return RendezvousInfo(PrefixStore("ft_launcher_agents", store), place.rank, place.nodes, where)
