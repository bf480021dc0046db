"""The stores of a standalone job, hosted by companions so that any rank may die, and the detection of lost nodes.

Used by `companion_process.py`; a rank opens the socket of the coordination's store itself, so that a port that is taken
is an error at entry. The companion serves it, and a store server for each iteration. Under a launcher none of this
runs.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ft_client.inprocess.standalone.watched_call import CallMembers
from rank_monitor.contract.loss_detector import LossDetector
from rank_monitor.contract.processes import proc
from rank_monitor.contract.processes.descriptor import socket_copy

# TCP_ESTABLISHED of the kernel, as in the first byte of TCP_INFO.
_ESTABLISHED = 1
# A reading that is later than its interval by more than this was stopped itself: what it missed counts for no node.
_SLACK_S = 1.0
# Trainers use the ports after the store's for groups of their own.
_FREE_AFTER = 2
# All addresses, by the version of IP.
_EVERYWHERE = {4: (socket.AF_INET, "0.0.0.0"), 6: (socket.AF_INET6, "::")}
# Attempts to find three free ports in a row. The kernel picks the first of them at random.
_TRIES = 100


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket for a store: at a loopback address if `host` is one, else at all addresses.

    Raises:
        OSError: the port is taken; the text names it.
    """
    try:
        if host == "localhost":
            host = "127.0.0.1"
        numbers = ipaddress.ip_address(host)
    except ValueError:
        numbers = ipaddress.ip_address("0.0.0.0")
    family, where = _EVERYWHERE[numbers.version]
    if numbers.is_loopback:
        where = str(numbers)
    try:
        return socket.create_server((where, port), family=family, backlog=socket.SOMAXCONN)
    except OSError as error:
        problem = str(error.strerror)
        if error.errno == errno.EADDRINUSE:
            problem = "the port is in use"
        raise OSError(error.errno, f"the store of the ranks cannot be served at {host}:{port}: {problem}") from None


def serve(listener: socket.socket, host: str) -> Any:
    """Starts a `TCPStore` server, which serves as long as the returned object lives. It takes over `listener`."""
    import torch
    from torch.distributed import TCPStore

    return TCPStore(
        host_name=host,
        port=listener.getsockname()[1],
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
    for _ in range(_TRIES):
        listener = listen(host, 0)
        port = listener.getsockname()[1]
        if all(_is_free(host, port + offset) for offset in range(1, _FREE_AFTER + 1)):
            return serve(listener, host), port
        listener.close()
    raise OSError(f"no free port at {host}")


def own_address(towards: tuple[str, int] | None) -> str:
    """The address that this host uses to reach another; nothing is sent. `towards` None: all ranks are on this host.

    On that host itself its name may resolve to loopback, which other hosts cannot use: then the name is returned.
    """
    if towards is None:
        return "127.0.0.1"
    family, kind, _, _, where = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0]
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


class NodeWatch(threading.Thread):
    """A thread that watches the beats of a call's nodes, until the call is finished or the store lost.

    Args:
        open_members: returns the call's `CallMembers` over a new connection.
        timeout_s, interval_s: when a silent node is lost, and how often the counters are read.
        lost: called with the members of a lost node that have not finished.
        say: called with a line for the log.
    """

    def __init__(
        self,
        open_members: Callable[[], CallMembers],
        timeout_s: float,
        interval_s: float,
        lost: Callable[[list[int]], None],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(name="node watch", daemon=True)
        self._open_members, self._interval_s, self._lost, self._say = open_members, interval_s, lost, say
        self._timeout_s = timeout_s
        self._detector = LossDetector(timeout_s, interval_s + _SLACK_S)
        self._lost_at: dict[str, int] = {}
        self._nodes: dict[str, list[int]] = {}
        self._is_complete = False

    def run(self) -> None:
        """Ends with a line in the log when the store is lost."""
        try:
            call_members = self._open_members()
            for _ in call_members.until_finished(self._interval_s):
                self._look(call_members)
        except RuntimeError as lost:
            self._say(f"nodes are not watched any more: {lost}")

    def _look(self, call_members: CallMembers) -> None:
        if not self._is_complete:
            self._is_complete = call_members.all_joined()
            self._nodes = call_members.members()
        counters = {node: call_members.beat(node, 0) for node in self._nodes}
        now = time.monotonic()
        # A node is watched from its first beat on; one that was lost, when it beats again.
        self._detector.watch([node for node, beats in counters.items() if beats != self._lost_at.get(node, 0)], now)
        for node in self._detector.read(counters, now):
            self._lost_at[node] = counters[node]
            members = [member for member in self._nodes[node] if not call_members.has_ended(member)]
            if members:
                self._say(f"node {node} with ranks {members} was silent for {self._timeout_s:g} s")
                self._lost(members)


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


def _is_free(host: str, port: int) -> bool:
    try:
        listen(host, port).close()
    except (OSError, OverflowError):
        return False
    return True


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
