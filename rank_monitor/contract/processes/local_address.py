"""Says where a server of this host listens, so that clients find it by a given name: over IPv4, or over IPv6 where
there is nothing else.

Launcher and client open the stores of ranks by it. IPv4 comes first where a name has addresses of both kinds: torch's
clients try both, and a program that knows IPv4 only finds the server too. A loopback interface may have `::1` alone.
"""

from __future__ import annotations

import errno
import functools
import socket
from collections.abc import Iterable

# Loopback addresses, and the addresses of all interfaces by version of IP.
_IPV4, _IPV6 = "127.0.0.1", "::1"
_LOCAL = "localhost"
_LAST_PORT = 65535
_ASIDE = range(20000, 27000)
"""Ports that Linux gives to nobody by itself (net.ipv4.ip_local_port_range: from 32768 on), and below those on which
common services listen: MongoDB (27017), NCCL's RAS (28028), torch's rendezvous and MASTER_PORT (29400, 29500),
Kubernetes' services (30000 to 32767)."""
_EVERYWHERE = {4: "0.0.0.0", 6: "::"}


@functools.cache
def loopback() -> str:
    """Returns the address by which processes of this host reach each other: 127.0.0.1, or ::1 where that is all."""
    if not _can_be_bound(_IPV4) and _can_be_bound(_IPV6):
        return _IPV6
    return _IPV4


def where_to_listen(host: str) -> str:
    """Returns the address to listen at for clients that know this host as `host`.

    The result is a loopback address if `host` is one, else the address of all interfaces. A name is looked up, once in
    a process.
    """
    # Imported here: a forked rank, which has this module from its zygote, would find `ipaddress` imported.
    import ipaddress

    if host == _LOCAL:
        return loopback()
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return _EVERYWHERE[_version_of(host)]
    if address.is_loopback:
        return host
    return _EVERYWHERE[address.version]


def towards(address: str) -> str:
    """Returns the address by which a client on this host reaches a server that listens at `address`."""
    match address:
        case "0.0.0.0":
            return _IPV4
        case "::":
            return _IPV6
    return address


def listening(address: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address and port; port 0 stands for a free one.

    At `::`, connections over IPv4 are accepted too. The backlog is the longest that the system allows: all ranks of a
    large job connect within a moment.

    Raises:
        OSError: the port is in use, or the address is none of this host.
    """
    family = _family(address)
    return socket.create_server(
        (address, port), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=address == _EVERYWHERE[6]
    )


def candidates(tries: int) -> list[int]:
    """Returns ports to try where any port will do, each but the last `tries` of them 0, which stands for a free one.

    The kernel gives port 0 and outgoing connections ports of one range. After tens of thousands of connections that
    have just ended, nearly each second port of that range is in use for a minute (TIME_WAIT), or each. So ports follow
    that are outside of that range unless the system was told otherwise, at random: several launchers look at once.
    """
    import random  # here: a forked rank, which has this module from its zygote, would find `random` imported

    return [0] * tries + random.sample(_ASIDE, tries)


def listening_before_free_ports(address: str, candidates: Iterable[int], free_after: int) -> socket.socket:
    """Returns a socket that listens at the first of these ports whose next `free_after` ports are free, too.

    The next ports are only tried, and not held: another process may take one before its user does.

    Args:
        address: to listen at.
        candidates: the ports to try, in order. Port 0 is a free one, another each time. Where any will do: as the
            function `candidates` returns them.
        free_after: how many ports after it must be free.

    Raises:
        OSError: with EADDRINUSE: no candidate fits. With another number: the address cannot be listened at.
    """
    for candidate in candidates:
        try:
            listener = listening(address, candidate)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        port = listener.getsockname()[1]
        if all(_is_free(address, port + offset) for offset in range(1, free_after + 1)):
            return listener
        listener.close()
    raise OSError(errno.EADDRINUSE, f"no free port at {address}")


def host_and_port(host: str, port: int) -> str:
    """Returns `host:port`; an address of IPv6 is put in brackets."""
    if ":" in host:
        return f"[{host}]:{port}"
    return f"{host}:{port}"


@functools.lru_cache(maxsize=16)
def _version_of(name: str) -> int:
    """Returns the version of IP of a name's addresses: 4 where the name has both, or cannot be found here.

    A name is looked up once in a process: no restart waits for a resolver.
    """
    try:
        families = {entry[0] for entry in socket.getaddrinfo(name, None)}
    except (OSError, UnicodeError):
        return 4
    if families == {socket.AF_INET6}:
        return 6
    return 4


def _can_be_bound(address: str) -> bool:
    """Returns whether this host has an address: binding a socket to any port of it works."""
    try:
        with socket.socket(_family(address), socket.SOCK_DGRAM) as tried:
            tried.bind((address, 0))
    except OSError:
        return False
    return True


def _is_free(address: str, port: int) -> bool:
    """Returns whether a port could be listened at just now. False beyond the last port that there is."""
    if port > _LAST_PORT:
        return False
    try:
        listening(address, port).close()
    except OSError:
        return False
    return True


def _family(address: str) -> socket.AddressFamily:
    """Returns the family of an address: a colon is in every address of IPv6, and in none of IPv4."""
    if ":" in address:
        return socket.AF_INET6
    return socket.AF_INET
