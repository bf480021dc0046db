"""Where a server listens for clients of a name."""

from __future__ import annotations

import socket
import sys

import pytest

from rank_monitor.contract.processes import local_address
from tests.nodes.conftest import require
from tests.program import clean_environment, run

BOTH = [(socket.AF_INET6,), (socket.AF_INET,)]


@pytest.mark.parametrize(
    ("host", "families", "address"),
    [
        ("localhost", None, "127.0.0.1"),
        ("127.0.0.1", None, "127.0.0.1"),
        ("127.0.1.1", None, "127.0.1.1"),
        ("::1", None, "::1"),
        ("10.0.0.7", None, "0.0.0.0"),
        ("fd00::5", None, "::"),
        ("0.0.0.0", None, "0.0.0.0"),
        ("host-of-both", BOTH, "0.0.0.0"),
        ("host-of-4", BOTH[1:], "0.0.0.0"),
        ("host-of-6", BOTH[:1], "::"),
        ("host-of-none", OSError("unknown"), "0.0.0.0"),
    ],
)
def test_where_a_server_listens(
    host: str, families: list[tuple[int]] | OSError | None, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def look_up(name: str, port: None) -> list[tuple[int]]:
        asked.append(name)
        if isinstance(families, OSError):
            raise families
        return families or []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert [local_address.where_to_listen(host) for _ in range(2)] == [address] * 2
    assert asked == [host] * (families is not None), "a name is looked up once, an address never"


@pytest.mark.parametrize(("address", "client"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("127.0.1.1", "127.0.1.1")])
def test_a_client_on_this_host_needs_no_name(address: str, client: str) -> None:
    assert local_address.towards(address) == client


def test_a_port_in_words() -> None:
    assert [local_address.host_and_port(host, 1) for host in ("::1", "a", "127.0.0.1")] == [
        "[::1]:1",
        "a:1",
        "127.0.0.1:1",
    ]


def test_a_server_of_all_addresses_of_ipv6_takes_connections_of_ipv4() -> None:
    with local_address.listening("::", 0) as server, socket.create_connection(("127.0.0.1", server.getsockname()[1])):
        server.accept()[0].close()


SEARCH = """
import errno, fcntl, socket, struct, sys
from pathlib import Path
from rank_monitor.contract.processes import local_address

with socket.socket() as probe:  # as `ip link set lo up`
    fcntl.ioctl(probe, 0x8914, struct.pack("16sh", b"lo", 1))
Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40099")
server = socket.create_server(("127.0.0.1", 39999))
for _ in range(int(sys.argv[1])):
    with socket.create_connection(("127.0.0.1", 39999)):
        accepted, _ = server.accept()
    accepted.close()  # after the client, whose port is in TIME_WAIT now
try:
    local_address.listening_before_free_ports("127.0.0.1", [0] * 100, 2)
except OSError as error:
    assert error.errno == errno.EADDRINUSE, error
else:
    sys.exit("the premise: no three free ports in a row are left in the range")
with local_address.listening_before_free_ports("127.0.0.1", local_address.candidates(100), 2) as found:
    print(found.getsockname()[1])
"""
"""In a network of its own, with a hundred ports in the place of 28,000."""


@pytest.mark.parametrize("connections", [50, 100], ids=["every second port", "every port"])
def test_a_port_is_found_where_connections_that_have_ended_have_the_ports(connections: int) -> None:
    words = ["unshare", "--net", sys.executable, "-c", SEARCH, str(connections)]
    if run(["unshare", "--net", "true"]).returncode:
        require("this user may not make a network")
    found = run(words, check=True, environ=clean_environment()).stdout
    assert 20000 <= int(found) < 27000
