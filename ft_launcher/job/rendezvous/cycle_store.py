"""A fresh TCPStore server for the ranks of each cycle, and the number of the cycle.

Called by `handler.py` and `foreign.py`; `rendezvous_choice.py` makes the `PortHolder`. Ranks started by `env://` use
the store without a prefix, so only a server of its own for each cycle keeps the keys of an earlier cycle from being
read: a rank would connect to an address of a process that is dead. The node of rank 0 hosts the server. The other nodes
receive its address, with our handler as a message (`NodeLink.announce`), with another handler through the store of that
handler (`publish`, `learn`).

MASTER_PORT of the ranks is the port of that server where the ranks use the agents' store, as torch does by default.
Where they do not (TORCH_DISABLE_SHARE_RDZV_TCP_STORE), rank 0 makes the ranks' store at another port, found here.
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

from rank_monitor.contract.processes import local_address, resolver
from rank_monitor.contract.processes.making_store import making_store
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
    """The store of a cycle: where it is, and the server where this node hosts it.

    Attributes:
        cycle: the cycle's number, from 0 on.
        host: the name or address at which clients find the host.
        port: the port of the server.
        server: the server, which lives as long as this reference; None: another node hosts it.
        ranks_port: a free port at which rank 0 makes the ranks' store itself; 0: the ranks use this one.
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
        """Returns what the other nodes need to know of this store, as JSON values."""
        return {"host": self.host, "port": self.port, "ranks_port": self.ranks_port}

    @classmethod
    def of_another_node(cls, cycle: int, address: Mapping[str, Any]) -> CycleStore:
        """Returns the store that another node hosts. `address`: what `CycleStore.address` returned there."""
        return cls(
            cycle, str(address["host"]), int(address["port"]), server=None, ranks_port=int(address["ranks_port"])
        )


class PortHolder:
    """Finds ports for stores. A port that the user gave is held by one socket for the whole job.

    Otherwise another program could take that port between two cycles, and the job would end.

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
        """Starts a new, empty store server. The two ports after its port are free, too, unless the user gave the port.

        Raises:
            RendezvousConnectionError: no port is free.
        """
        if self._held is not None:
            return self.serve_at(self._held.dup())
        return self.serve_at(self._find_or_refuse())

    def host(self, cycle: int, host: str, shared: bool) -> CycleStore:
        """Hosts the store of a cycle.

        Args:
            cycle: the cycle's number.
            host: the name or address at which clients find this host.
            shared: whether the ranks use this store; if not, a port is found at which rank 0 can make one.

        Raises:
            RendezvousConnectionError: no port is free.
        """
        server, ranks_port = self.serve(), 0
        if not shared:
            # Free now, as are the next two. Another program may take it before rank 0 does.
            with self._find_or_refuse() as listener:
                ranks_port = int(listener.getsockname()[1])
        return CycleStore(cycle, host, server.port, server, ranks_port)

    def serve_at(self, listener: socket.socket) -> TCPStore:
        """Starts a server at a listening socket, which the server closes at its end."""
        port = listener.getsockname()[1]
        with resolver.towards(local_address.towards(self._address), port) as address, making_store():
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
            OSError: no port is free.
        """
        server = self.serve_at(self._find())
        return server, server.port

    def close(self) -> None:
        """Releases a held port."""
        if self._held is not None:
            self._held.close()

    def _find_or_refuse(self) -> socket.socket:
        """As `_find`, with the error that torch's agent expects of a rendezvous."""
        try:
            return self._find()
        except OSError as error:
            raise _refusal(str(error.strerror)) from error

    def _find(self) -> socket.socket:
        """Returns a socket that listens at a free port, whose next two ports are free, too.

        Raises:
            OSError: there is none.
        """
        if self._range is not None:
            low, high = self._range
            # At random: launchers of several jobs on one host look for ports in the same range at once.
            ports = random.sample(range(low, high + 1), min(_TRIES, high - low + 1))
            where = f"ports {low} to {high}"
        else:
            ports = local_address.candidates(_TRIES)
            where = "any port"
        try:
            return local_address.listening_before_free_ports(self._address, ports, FREE_AFTER)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                text = f"no free port found among {where} (--ft-port-range)"
            else:  # the same at every port: no such address, no permission
                text = _no_server(self._address, ports[0], error)
            raise OSError(error.errno, text) from error


def shares_store(environ: Mapping[str, str]) -> bool:
    """Whether the ranks use the agents' store, by torch's variable for it."""
    return environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"


def publish(
    store: Store, holder: PortHolder, host: str, run_id: str, at_least: int = 0, shared: bool = True
) -> CycleStore:
    """On the first node: counts the cycle, hosts its store, and publishes where it is.

    Args:
        store: the store that the handler gave for this round.
        holder: starts the server.
        host: the name or address at which clients find this host.
        run_id: the job's id; jobs of one store count apart.
        at_least: the number after the last cycle of this node, for a handler that has a new store in each round.
        shared: whether the ranks use this store.
    """
    # Counted in the store, not in this process: a launcher that replaces another goes on with the number.
    cycle = max(_underlying(store).add(f"{_KEY}_count/{run_id}", 1) - 1, at_least)
    of_cycle = holder.host(cycle, host, shared)
    store.set(_KEY, json.dumps({"cycle": cycle, **of_cycle.address()}))
    return of_cycle


def learn(store: Store) -> CycleStore:
    """On the other nodes: waits for what the first node published, up to the timeout of `store`.

    Raises:
        RuntimeError: the first node has published nothing in that time.
    """
    found = parse_json(store.get(_KEY))
    return CycleStore.of_another_node(int(found["cycle"]), found)


def _underlying(store: Store) -> Store:
    """Returns the store below the prefixes of a rendezvous round, in which a counter lasts for the whole job."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _listen(address: str, port: int) -> socket.socket:
    """Returns a socket that listens at the port that the user gave.

    Raises:
        RendezvousConnectionError: the port cannot be had; its cause is the system's error.
    """
    try:
        return local_address.listening(address, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            text = f"port {port} at {address} is in use; name another by --master-port"
        else:
            text = _no_server(address, port, error)
        raise _refusal(text) from error


def _no_server(address: str, port: int, error: OSError) -> str:
    """Says in one line where no server can listen, and why."""
    where = local_address.host_and_port(address, port)
    return f"no server can listen at {where}: {os.strerror(error.errno or 0)}"


def _refusal(text: str) -> Exception:
    """Returns the error that torch's agent expects of a rendezvous."""
    # Imported here: the agent of one rank without a launcher serves stores too, and has no rendezvous.
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    refusal: Exception = RendezvousConnectionError(text)
    return refusal
