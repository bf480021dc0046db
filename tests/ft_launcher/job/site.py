"""Nodes as threads of this process, over a real TCPStore that one of them hosts, or none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

from ft_launcher.job.coordinator.coordinator import Coordinator
from ft_launcher.job.coordinator.formation import Rules, Size
from ft_launcher.job.coordinator.node_messages import CycleEnd
from ft_launcher.job.link.attempt import NodeSettings, enter_current
from ft_launcher.job.link.node_link import NodeLink
from ft_launcher.job.rendezvous.cycle_store import PortHolder
from ft_launcher.job.rendezvous.handler import NodeRendezvous
from ft_launcher.job.store.job_store import JobStore
from ft_launcher.job.store.store_connection import open_job_store
from rank_monitor.contract.processes import resolver
from tests.ft_launcher.job.nodes_of_a_test import judge, node
from tests.patience import patient, until

PATIENT_S = patient(60.0)
BEAT_S, TIMEOUT_S = 0.1, 3.0

resolver.bound_process()  # as in a launcher: the store's server looks up who connects, and answers nobody meanwhile


class Site:
    """A job's store and its nodes by name. `hosted`: the first node is the store's host."""

    def __init__(self, minimum: int, maximum: int, hosted: bool, pool: ThreadPoolExecutor) -> None:
        self.close_s = 5.0
        """`close_timeout` of the nodes that are made from now on (seconds)."""
        self.rules = Rules(Size(minimum, maximum), last_call_s=0.5, join_s=PATIENT_S)
        self.server: TCPStore | None = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.nodes: dict[str, NodeRendezvous] = {}
        self._hosted, self._pool = hosted, pool
        self.port = self.server.port

        class SilencingStore(JobStore):
            """Beats of some nodes come to nothing."""

            silent: ClassVar[set[str]] = set()

            def beat(self, key: str) -> int:
                return 0 if key in self.silent else super().beat(key)

        self.store_kind = SilencingStore

    def begin(self, name: str, **fields: Any) -> Future[RendezvousInfo]:
        """A new node comes; `fields` are those of its arrival."""
        hosts = self._hosted and not self.nodes
        settings = NodeSettings(self.rules, judge, BEAT_S, TIMEOUT_S, close_s=self.close_s)

        def open_store() -> JobStore:
            return self._connected(hosts)

        ports = PortHolder("127.0.0.1", None, None)
        self.nodes[name] = NodeRendezvous("ft-nodes", "job", open_store, node(name, seq=0, **fields), settings, ports)
        return self.join(name)

    def _connected(self, hosts: bool) -> JobStore:
        parameters = RendezvousParameters("c10d", f"127.0.0.1:{self.port}", "job", 1, 2, is_host="0")
        found = open_job_store("c10d", parameters)  # which holds this process for the host
        return self.store_kind(found.backend, found.raw, found.connect, found.run_id, hosts)

    def store(self) -> JobStore:
        """A connection to the keys of the nodes, once one of them has begun."""
        store = self._connected(hosts=False)
        assert enter_current(store)
        return store

    def join(self, name: str) -> Future[RendezvousInfo]:
        """A node asks for its place in the next cycle."""
        return self._pool.submit(self.nodes[name].next_rendezvous)

    def form(self, names: str, begin: bool = False) -> dict[str, int]:
        """They all come; their ranks."""
        futures = {name: self.begin(name) if begin else self.join(name) for name in names}
        return {name: future.result(PATIENT_S).rank for name, future in futures.items()}

    def end(self, names: str) -> set[tuple[int, str, int | None]]:
        """What these are told of the end of their cycle."""
        ends: list[CycleEnd] = [until(self.nodes[name].pop_end) for name in names]
        return {(end.cycle, end.reason, end.exit_code) for end in ends}

    def link(self, name: str) -> NodeLink:
        """The node's link to the others."""
        link = self.nodes[name].node_link
        assert link is not None, "this node has had no place yet"
        return link

    def fall_silent(self, name: str) -> None:
        """The node dies without a word."""
        link = self.link(name)
        self.store_kind.silent.add(name)
        link._watches = False
        if link.coordination is not None:
            link.coordination.close()

    def until_known(self, count: int) -> None:
        """Waits until the coordinator knows so many nodes."""
        machine = self.machine()
        until(lambda: len(machine.nodes) == count)

    def machine(self) -> Coordinator:
        """The coordinator's machine."""
        link = self.link(self.coordinator())
        assert link.coordination is not None
        return link.coordination._machine

    def coordinator(self) -> str:
        """Who coordinates."""

        def found() -> str | None:
            links = {name: one.node_link for name, one in self.nodes.items() if one.node_link is not None}
            return next((name for name, link in links.items() if link.coordination and link.coordination.at_work), None)

        return until(found)


@contextmanager
def site(minimum: int, maximum: int, hosted: bool) -> Iterator[Site]:
    """A site, whose nodes leave at the end. torch's stores look up names, which takes seconds where nothing answers."""
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    with ThreadPoolExecutor(16) as pool:
        made = Site(minimum, maximum, hosted, pool)
        try:
            yield made
        finally:
            for one in reversed(made.nodes.values()):
                one.leave("the test is over", 0.2)
            made.server = None
