"""Where a server listens for clients of a name."""

from __future__ import annotations

import socket

import pytest

from rank_monitor.contract.processes import local_address

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
