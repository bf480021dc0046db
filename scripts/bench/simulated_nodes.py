"""Many nodes as threads of this process, forming cycles over a store apart: `python -m scripts.bench.simulated_nodes`.

`serve` hosts a store. Else: `KIND PORT NODES FIRST COUNT` with KIND `ours` (our handler), `torch` (torch's dynamic
handler) or `connect` (each node connects once: the floor); it runs nodes FIRST to FIRST + COUNT of NODES. Of ours, node
0 hosts the store as an agent does, brings its fault and has its ranks assigned, as all do. A line `form` on standard
input begins the next cycle, `idle S` counts operations for S seconds; each is answered by a line of JSON. Operations of
a node on its stores are counted where they are called. The limit on descriptors is what the launcher makes of it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from ft_launcher.decide.attribution import Fault, FaultKind
from ft_launcher.decide.policy.case import Case, FaultReport, PolicyAnswer
from ft_launcher.job.coordinator.formation import Rules, Size
from ft_launcher.job.coordinator.node_messages import EndReason, JoinRequest
from ft_launcher.job.link.attempt import NodeSettings
from ft_launcher.job.rendezvous.cycle_store import PortHolder
from ft_launcher.job.rendezvous.handler import NodeRendezvous
from ft_launcher.job.store.job_store import JobStore
from ft_launcher.job.store.store_connection import open_job_store
from ft_launcher.node.processes import descriptor_limit
from rank_monitor.contract.processes.wait import readable

HOST = "127.0.0.1"
PATIENT_S = 600
BEAT_S, TIMEOUT_S = 2.0, 60.0
SWITCH_S = 1.0
"""Threads hand over the interpreter when they wait for the store. Each of those that want it looks for it every 5 ms
otherwise: with hundreds of nodes in a process, which no job has, that takes the whole machine."""
RANKS = 8
FAULT = Fault(
    *(FaultKind.EXCEPTION, 0, 0, 1, 1, "raised an error", "", ""),
    detail=tuple(f"a line {number} of a traceback, as long as they are" for number in range(64)),
)
"""What a node brings of a fault: about 3 KiB, as with the last lines of a rank."""

operations: Counter[str] = Counter()


class Counted:
    """A store whose calls are counted."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not callable(found) or name == "set_timeout":
            return found

        def call(*arguments: Any) -> Any:
            operations[name] += 1
            return found(*arguments)

        return call


class CountedJobStore(JobStore):
    """Our connection, counted."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.backend = Counted(self.backend)

    def enter(self, attempt: str) -> None:
        super().enter(attempt)
        self._store = Counted(self._store)


class OurNode:
    """A node with our handler."""

    def __init__(self, port: int, nodes: int, index: int) -> None:
        hosts = index == 0
        parameters = RendezvousParameters("c10d", f"{HOST}:{port}", "job", nodes, nodes, is_host=str(int(hosts)))

        def connected() -> JobStore:
            store = open_job_store("c10d", parameters)
            return CountedJobStore(store.backend, store.raw, store.connect, store.run_id, hosts)

        rules = Rules(Size(nodes, nodes), join_s=PATIENT_S)
        me = JoinRequest(f"n{index:05d}", 0, f"n{index}", HOST, RANKS, f"{index:05d}")
        settings = NodeSettings(rules, _judge, BEAT_S, TIMEOUT_S)
        self._handler = NodeRendezvous("c10d", "job", connected, me, settings, PortHolder(HOST, None, None))
        self._fails = index == 0

    def leave(self) -> None:
        """Leaves the job."""
        self._handler.leave("the benchmark ends")

    def form(self) -> int:
        """Forms the next cycle, ending the one before; the node's place by the numbers of its ranks."""
        if self._handler.place is not None:
            if self._fails:
                self._handler.report_end(EndReason.FAILED, "a rank failed")
            while self._handler.pop_end() is None:
                readable({self._handler.link.fileno()}, 1.0)
            self._handler.attach(FaultReport(replace(FAULT, collateral=not self._fails)))
        self._handler.next_rendezvous()
        assert self._handler.place is not None
        return self._handler.place.first_rank // RANKS


class TorchNode:
    """A node with torch's dynamic handler."""

    def __init__(self, port: int, nodes: int, index: int) -> None:
        limit = timedelta(seconds=PATIENT_S)
        store = TCPStore(HOST, port, is_master=False, wait_for_workers=False, timeout=limit)
        timeouts = {f"{name}_timeout": PATIENT_S for name in ("join", "last_call", "close", "heartbeat")}
        parameters = RendezvousParameters("c10d", f"{HOST}:{port}", "job", nodes, nodes, HOST, **timeouts)
        self._handler = create_handler(store, C10dRendezvousBackend(Counted(store), "job"), parameters)

    def form(self) -> int:
        """Forms the next round; the rank."""
        return int(self._handler.next_rendezvous().rank)


class ConnectingNode:
    """A node that only connects."""

    def __init__(self, port: int, nodes: int, index: int) -> None:
        self._port, self._index = port, index

    def form(self) -> int:
        """Connects; the number."""
        self._store = TCPStore(HOST, self._port, is_master=False, wait_for_workers=False)
        operations["connect"] += 1
        return self._index


KINDS: dict[str, Callable[[int, int, int], Any]] = {"ours": OurNode, "torch": TorchNode, "connect": ConnectingNode}


def _judge(case: Case, now: float) -> PolicyAnswer:
    return PolicyAnswer("a restart", None, None, case.history)


def serve() -> None:
    """Hosts the store until standard input ends."""
    server = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    print(server.port, flush=True)
    sys.stdin.read()


def simulate(kind: str, port: int, total: int, first: int, count: int) -> None:
    """Runs the nodes, as standard input says."""
    made = KINDS[kind]
    sys.setswitchinterval(SWITCH_S)
    with ThreadPoolExecutor(count) as pool:
        nodes = list(pool.map(lambda index: made(port, total, index), range(first, first + count)))
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            operations.clear()
            if line.startswith("idle"):
                time.sleep(float(line.split()[1]))
                print(json.dumps({"operations": dict(operations), "threads": threading.active_count()}), flush=True)
                continue
            begun = time.monotonic()
            ranks = list(pool.map(lambda node: node.form(), nodes))
            answer = {"begun": begun, "done": time.monotonic(), "ranks": ranks, "operations": dict(operations)}
            print(json.dumps(answer), flush=True)
        os._exit(0)  # the nodes' threads wait on the store


if __name__ == "__main__":
    descriptor_limit.raise_soft()
    if sys.argv[1] == "serve":
        serve()
    else:
        simulate(sys.argv[1], *(int(text) for text in sys.argv[2:]))
