"""The stores of a job without a launcher, hosted by standalone agents so that any rank may die.

Used by `companion.py` and `rank_calls.py`. The ranks agree on each round in one store; the rank itself opens its
socket, so that a port that is taken is an error when the wrapper is entered, and hands it to its standalone agent.
Further stores are for the groups of each round: `serve_anywhere` is for a rank for which nobody else serves them.
Under a launcher none of this runs.
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
from rank_monitor.contract.agent_order import MAKES_STORE
from rank_monitor.contract.processes import local_address, proc, resolver
from rank_monitor.contract.processes.descriptor import socket_copy

# TCP_ESTABLISHED of the kernel, as in the first byte of TCP_INFO.
_ESTABLISHED = 1
# Trainers use the ports after the store's for groups of their own.
_FREE_AFTER = 2
# Attempts to find three free ports in a row. The kernel picks the first of them at random.
_TRIES = 100


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
    with MAKES_STORE:
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
    listener = local_address.listening_before_free_ports(address, [0] * _TRIES, _FREE_AFTER)
    port = listener.getsockname()[1]
    return serve(listener), port


def own_address(towards: tuple[str, int] | None) -> str:
    """The address that this host uses to reach another; nothing is sent. `towards` None: all ranks are on this host.

    On that host itself its name may resolve to loopback, which other hosts cannot use: then the name is returned.
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
    """Whether another process is connected to the server that this process has at a port."""
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
    """Returns when nobody needs the store at `port` any more: all are through, or no other process is connected to it.

    Args:
        interval_s: how often the connections are looked at.
        join_timeout_s: how long members that have not come yet are waited for.
    """
    give_up_at = time.monotonic() + join_timeout_s
    while not call_members.is_finished():
        if not is_used(port) and (time.monotonic() > give_up_at or call_members.all_joined()):
            return
        with contextlib.suppress(RuntimeError):
            call_members.wait_finished(datetime.timedelta(seconds=interval_s))


def _ends(descriptor: int) -> tuple[tuple[str, int], tuple[str, int]]:
    """Address and port of both ends of a connection that stands.

    Raises:
        OSError: the descriptor is not of one.
    """
    with socket_copy(descriptor) as connection:
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED:
            raise OSError(errno.ENOTCONN, "it is being ended")
        here, there = connection.getsockname(), connection.getpeername()
    return (_plain(here[0]), here[1]), (_plain(there[0]), there[1])


def _plain(address: str) -> str:
    """An address as IPv4 has it, where IPv6 only wraps that."""
    return address.removeprefix("::ffff:")
