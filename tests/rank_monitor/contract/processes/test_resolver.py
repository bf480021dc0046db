"""Addresses for clients of stores: of a name that is looked up, of an address, of what is not found."""

from __future__ import annotations

import socket

from rank_monitor.contract.processes import resolver


def test_an_address_is_its_own() -> None:
    assert [resolver.address_of(host, 1) for host in ("127.0.0.1", "::1", "10.1.2.3")] == [
        "127.0.0.1",
        "::1",
        "10.1.2.3",
    ]


def test_a_name_gives_the_address_at_which_a_server_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert resolver.address_of("localhost", server.getsockname()[1]) == "127.0.0.1"


def test_a_name_gives_an_address_before_a_server_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert resolver.address_of("localhost", bound.getsockname()[1]) == "127.0.0.1"


def test_a_name_that_is_not_found_stays() -> None:
    with resolver.unasked():
        assert resolver.address_of("no such host", 1) == "no such host"


def test_look_ups_that_ask_nobody_fail_at_once_and_addresses_do_not() -> None:
    with resolver.unasked():
        assert socket.getaddrinfo("127.0.0.1", 1)
        assert socket.getfqdn("no-such-host.invalid") == "no-such-host.invalid"
