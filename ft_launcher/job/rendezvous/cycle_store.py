"""A fresh TCPStore server for the ranks of each cycle, and the number of the cycle.

Called by `handler.py` and `foreign.py`; `composition.py` makes the `PortHolder`. Ranks started by `env://`
use the store without a prefix, so that only a server of its own keeps keys of an earlier cycle from being read. The
first node hosts it; the others learn address, port and number through the rendezvous' store.
"""

from __future__ import annotations

import errno
import json
import os
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from rank_monitor.contract.processes import local_address, resolver
from rank_monitor.contract.rounds.barrier import Store
from rank_monitor.contract.wire.foreign import parse_json

# torch's agent keeps its own keys in the same store.
_KEY = "ft_launcher/cycle"
_LIBUV = torch.__version__ >= "2.8"
"""In older releases only the store server without libuv takes a listening socket."""
# So many ports are tried before the search ends with an error; each costs three sockets at most.
_TRIES = 200
# Trainers make stores of their own at MASTER_PORT + 1 and + 2, Megatron Bridge for one.
FREE_AFTER = 2


@dataclass
class CycleStore:
    """The store of a cycle: where it is, the cycle's number, and the server where this node hosts it.

    `ranks_port` is a free port at which rank 0 makes the ranks' store itself; 0: the ranks use this one.
    """

    cycle: int
    host: str
    port: int
    server: TCPStore | None
    ranks_port: int = 0

    @property
    def master_port(self) -> int:
        """MASTER_PORT of the ranks."""
        return self.ranks_port or self.port

    def address(self) -> dict[str, Any]:
        """Returns what the other nodes need to know of it, as JSON values."""
        return {"host": self.host, "port": self.port, "ranks_port": self.ranks_port}

    @classmethod
    def of_another_node(cls, cycle: int, address: Mapping[str, Any]) -> CycleStore:
        """Returns the store that another node hosts at an `address` of its."""
        return cls(cycle, str(address["host"]), int(address["port"]), None, int(address["ranks_port"]))


class PortHolder:
    """Finds ports for stores. A port that the user gave is held by one socket for the whole job.

    Args:
        host: the name by which clients find this host. It is looked up here, and not in each cycle.
        port: the user's; None: any port.
        port_range: where ports may be; None: anywhere.
    """

    def __init__(self, host: str, port: int | None, port_range: tuple[int, int] | None) -> None:
        self._address = local_address.where_to_listen(host)
        self._range = port_range
        self._held: socket.socket | None = None
        if port:
            self._held = _listen(self._address, port)

    def serve(self) -> TCPStore:
        """Starts a new, empty store server. The two ports after its port are free, too."""
        if self._held is not None:
            return self._serve_at(self._held.dup())
        return self._serve_at(self._find())

    def host(self, cycle: int, host: str, shared: bool) -> CycleStore:
        """Hosts the store of a cycle for clients of `host`; where it is not `shared`, rank 0 gets a port for its own.

        Raises:
            RendezvousConnectionError: no port is free.
        """
        server, ranks_port = self.serve(), 0
        if not shared:
            # Free now, as are the next two. Another program may take it before rank 0 does.
            with self._find() as listener:
                ranks_port = int(listener.getsockname()[1])
        return CycleStore(cycle, host, server.port, server, ranks_port)

    def _serve_at(self, listener: socket.socket) -> TCPStore:
        port = listener.getsockname()[1]
        with resolver.towards(local_address.towards(self._address), port) as address:
            return TCPStore(
                # The listening socket is handed over, so that no other program can take the port in between.
                host_name=address,
                port=port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=60),
                master_listen_fd=listener.detach(),
                use_libuv=_LIBUV,
            )

    def serve_round(self) -> tuple[TCPStore, int]:
        """Starts a server for one round of in-process restart, beside the cycle's own; returns it and its port.

        Raises:
            RendezvousConnectionError: no port is free.
        """
        server = self._serve_at(self._find())
        return server, server.port

    def close(self) -> None:
        """Releases a held port."""
        if self._held is not None:
            self._held.close()

    def _find(self) -> socket.socket:
        if self._range is not None:
            low, high = self._range
            # At random: launchers of several jobs on one host look for ports in the same range at once.
            candidates = random.sample(range(low, high + 1), min(_TRIES, high - low + 1))
        else:
            candidates = [0] * _TRIES
        for candidate in candidates:
            try:
                listener = _listen(self._address, candidate)
            except RendezvousConnectionError as error:
                if not _is_taken(error):  # the same at every port: no such address, no permission
                    raise
                continue
            port = listener.getsockname()[1]
            if all(_is_free(self._address, port + offset) for offset in range(1, FREE_AFTER + 1)):
                return listener
            listener.close()
        if self._range is None:
            where = "any port"
        else:
            where = f"ports {self._range[0]} to {self._range[1]}"
        raise RendezvousConnectionError(f"no free port found among {where} (--ft-port-range)")


def shares_store(environ: Mapping[str, str]) -> bool:
    """Whether the ranks use the agents' store, by torch's variable for it."""
    return environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"


def publish(
    store: Store, holder: PortHolder, host: str, run_id: str, at_least: int = 0, shared: bool = True
) -> CycleStore:
    """On the first node: counts the cycle, hosts its store, and publishes where it is.

    Args:
        run_id: the job's; jobs of one store count apart.
        at_least: the number after the last cycle of this node, for a handler that has a new store in each round.
        shared: whether the ranks use this store.
    """
    # Counted in the store, not in this process: a launcher that replaces another goes on with the number.
    cycle = max(_underlying(store).add(f"{_KEY}_count/{run_id}", 1) - 1, at_least)
    of_cycle = holder.host(cycle, host, shared)
    store.set(_KEY, json.dumps({"cycle": cycle, **of_cycle.address()}))
    return of_cycle


def learn(store: Store) -> CycleStore:
    """On the other nodes: waits for what the first node published."""
    found = parse_json(store.get(_KEY))
    return CycleStore.of_another_node(int(found["cycle"]), found)


def _underlying(store: Store) -> Store:
    """Returns the store below the prefixes of a rendezvous round, in which a counter lasts for the whole job."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _listen(address: str, port: int) -> socket.socket:
    """Returns a listening socket.

    Raises:
        RendezvousConnectionError: the port cannot be had; its cause is the system's error.
    """
    try:
        return local_address.listening(address, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            text = f"port {port} at {address} is in use; name another by --master-port"
        else:
            where = local_address.host_and_port(address, port)
            text = f"no server can listen at {where}: {os.strerror(error.errno or 0)}"
        raise RendezvousConnectionError(text) from error


def _is_taken(error: RendezvousConnectionError) -> bool:
    """Whether another port may be free."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE


def _is_free(address: str, port: int) -> bool:
    # The port of a store may be the last there is.
    if port > 65535:
        return False
    try:
        _listen(address, port).close()
    except RendezvousConnectionError:
        return False
    return True
