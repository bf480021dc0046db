"""The stores of a job without a launcher, hosted by standalone agents so that any rank may die.

The ranks agree on each round in one store. Rank 0 opens its socket (`listen`), so that a port that is taken is an error
when the wrapper is entered, and hands the socket to its standalone agent, which serves the store as long as anybody
needs it (`stay`). No rank hosts the store, since any rank may die.

Further stores are for the groups of each round. The standalone agent of rank 0 serves them. Where that agent is lost,
or does not know the call's store, a rank itself serves one (`serve_anywhere`).

`agent_handle.py` and `restart/` call this in the rank, `rank_calls.py` in the agent's process. Under a launcher the
node's agent hosts all stores, and nothing here runs.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import ipaddress
import socket
import time
from typing import Any

from ft_client.inprocess.standalone.watched_call import CallMembers
from rank_monitor.contract.processes import local_address, proc, resolver
from rank_monitor.contract.processes.descriptor import socket_copy
from rank_monitor.contract.processes.making_store import making_store

_ESTABLISHED = 1
"""TCP_ESTABLISHED of the kernel, as in the first byte of TCP_INFO."""
_FREE_AFTER = 2
"""How many ports after the store's are free, too: trainers use them for groups of their own."""
_TRIES = 100
"""Attempts to find three free ports in a row. The kernel picks the first of them at random."""


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket for a store: at a loopback address if `host` is one, else at all addresses.

    Raises:
        OSError: the port is taken; the text names it.
    """
    try:
        return local_address.listening(local_address.where_to_listen(host), port)
    except OSError as error:
        problem = str(error.strerror)
        if error.errno == errno.EADDRINUSE:
            problem = "the port is in use"
        raise OSError(error.errno, f"the store of the ranks cannot be served at {host}:{port}: {problem}") from None


def serve(listener: socket.socket) -> Any:
    """Starts a `TCPStore` server, which serves as long as the returned object lives. It takes over `listener`."""
    import torch
    from torch.distributed import TCPStore

    here, port = listener.getsockname()[:2]
    with making_store():
        return TCPStore(
            host_name=local_address.towards(here),
            port=port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            use_libuv=torch.__version__ >= "2.8",  # older releases: only the server without it takes a listening socket
        )


def serve_anywhere(host: str) -> tuple[Any, int]:
    """Starts a server at a free port whose next two ports, which trainers use, are free too. Returns it and the port.

    Raises:
        OSError: no such port was found.
    """
    address = local_address.where_to_listen(host)
    listener = local_address.listening_before_free_ports(address, local_address.candidates(_TRIES), _FREE_AFTER)
    port = listener.getsockname()[1]
    return serve(listener), port


def own_address(towards: tuple[str, int] | None) -> str:
    """Returns the address by which this host reaches another, at which the other can reach this one. Sends nothing.

    Where the other host is this one, its name may resolve to loopback, which further hosts cannot use: then the name
    is returned.

    Args:
        towards: host and port of the store of all ranks; None: all ranks are on this host.
    """
    if towards is None:
        return local_address.loopback()
    address = resolver.address_of(*towards)
    family, kind, _, _, where = socket.getaddrinfo(address, towards[1], type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)
        own = str(probe.getsockname()[0])
    if ipaddress.ip_address(own).is_loopback:
        return towards[0]
    return own


def is_used(port: int) -> bool:
    """Returns whether another process is connected to the server that this process has at a port.

    Read from this process' own descriptors: the server accepts connections, and no interface of torch counts them.
    Connections of this process to its own server are left out.
    """
    accepted, own = set(), set()
    for descriptor in proc.own_descriptors():
        with contextlib.suppress(OSError):  # it was closed meanwhile, or is no connection
            here, there = _ends(descriptor)
            if here[1] == port:
                accepted.add(there)
            if there[1] == port:
                own.add(here)
    return bool(accepted - own)


def stay(port: int, call_members: CallMembers, interval_s: float, join_timeout_s: float) -> None:
    """Blocks until nobody needs the store at `port` any more: all members have finished, or no other process is
    connected to the store.

    Called in the agent's process when its rank has ended: the server is in this process, and ends with it.

    Args:
        port: of the server of this process.
        call_members: the members of the call, over a connection of their own.
        interval_s: seconds between two checks of the connections.
        join_timeout_s: for how many seconds members that have not come yet are waited for.
    """
    give_up_at = time.monotonic() + join_timeout_s
    while not call_members.is_finished():
        if not is_used(port) and (time.monotonic() > give_up_at or call_members.all_joined()):
            return
        with contextlib.suppress(RuntimeError):
            call_members.wait_finished(datetime.timedelta(seconds=interval_s))


def _ends(descriptor: int) -> tuple[tuple[str, int], tuple[str, int]]:
    """Returns address and port of both ends of an established TCP connection: of this end, and of the other.

    Raises:
        OSError: the descriptor is not that of an established TCP connection.
    """
    with socket_copy(descriptor) as connection:
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED:
            raise OSError(errno.ENOTCONN, "it is being ended")
        here, there = connection.getsockname(), connection.getpeername()
    return (_plain(here[0]), here[1]), (_plain(there[0]), there[1])


def _plain(address: str) -> str:
    """Returns an address as IPv4 has it, where IPv6 only wraps that: so both ends can be compared."""
    return address.removeprefix("::ffff:")
