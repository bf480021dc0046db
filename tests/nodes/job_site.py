"""What the nodes of a job stand in: their network or this machine, the store, the lines to it, clocks of their own.

Knows where things are and how one gets there; knows no launcher.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from tests.faults.job import HERE, Place
from tests.nodes.clock import Clock
from tests.nodes.netns import Network
from tests.nodes.slow_proxy import Line, SlowProxy
from tests.nodes.store_host import StoreHost
from tests.ports import free_port

STORE = "store"
NODE = "NODE_OF_TEST"
"""What the processes of a node find its name in: the machine has one name for all of them."""
_PORT = 29400


def node_name(number: int) -> str:
    """The name of a node in its network."""
    return f"n{number}"


class Site:
    """Nodes by number, made when they are first asked for.

    Args:
        folder: where clocks are kept.
        network: None puts all nodes on this machine.
        line: how agents that are not on the store's node reach it; None: as the network is.
        store_apart: the store has a node of its own, and no agent hosts it; else node 0 hosts it.
        own_clocks: the nodes whose wall clock can be stepped.
    """

    def __init__(
        self,
        folder: Path,
        network: Network | None,
        line: Line | None = None,
        store_apart: bool = False,
        own_clocks: Collection[int] = (),
    ) -> None:
        self.network, self._line = network, line
        self.port = _PORT if network else free_port()
        self.proxies: dict[int, SlowProxy] = {}
        """The line between a node and the store."""
        self.clocks = {number: Clock(folder, node_name(number)) for number in own_clocks}
        self._store = self._start_store() if store_apart else None

    def place(self, number: int) -> Place:
        """Where a node's processes run."""
        clock = self.clocks[number].environ if number in self.clocks else {}
        environ: Mapping[str, str] = {NODE: node_name(number), **clock}
        if self.network is None:
            return Place(environ=environ)
        name = node_name(number)
        if name not in self.network.nodes:
            self.network.add(name)
        return Place(self._start_on(name), self.network.proc_net(name), environ)

    def rendezvous(self, number: int) -> tuple[str, str]:
        """The launcher's flags that lead a node to the store."""
        # Agents that a test starts together join the same first cycle, also on a machine so busy that they come seconds
        # apart. Where all that may come are there, nobody waits for the last call.
        host, port, conf = self._host(), self.port, "join_timeout=60,last_call_timeout=5"
        hosts = self._store is None and number == 0
        if self._line is not None and not hosts:
            if number in self.proxies:
                self.proxies[number].close()
            self.proxies[number] = SlowProxy(self._start_on(node_name(number)), host, port, self._line)
            host, port = "127.0.0.1", self.proxies[number].port
        if self.network is None or self._line is not None or self._store is not None:  # on one host both would do
            conf = f"{conf},is_host={int(hosts)}"
        return f"--rdzv-endpoint={host}:{port}", f"--rdzv-conf={conf}"

    def lose_store(self) -> None:
        """The node that has the store alone dies; on this machine its process, whose connections are closed."""
        assert self._store is not None
        if self.network is not None:
            self.network.cut(STORE)
        self._store.kill()

    def close(self) -> None:
        """Ends the lines and the store."""
        for proxy in self.proxies.values():
            proxy.close()
        self.proxies.clear()
        if self._store is not None:
            self._store.kill()
            self._store = None

    def _host(self) -> str:
        if self.network is None:
            return "127.0.0.1"
        return STORE if self._store is not None else node_name(0)

    def _start_on(self, name: str) -> Callable[..., subprocess.Popen[bytes]]:
        network = self.network
        return HERE.start if network is None else lambda argv, **popen: network.run(name, argv, **popen)

    def _start_store(self) -> StoreHost:
        if self.network is None:
            return StoreHost(self.port, None)
        self.network.add(STORE)
        return StoreHost(self.port, self.network.holder(STORE))
