"""The store that a standalone agent hosts lives on when rank 0 is killed, and ends when nobody needs it any more."""

from __future__ import annotations

import fcntl
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore

from ft_client.inprocess import gloo_connections
from ft_client.inprocess.standalone import store_host
from ft_client.inprocess.standalone.watched_call import CallMembers
from rank_monitor.contract.rounds.barrier import Entry
from rank_monitor.contract.rounds.round import Round
from tests.client.inprocess.conftest import WAIT, connection
from tests.client.inprocess.nursery import Nursery, RankOfTest
from tests.patience import until


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def host(ranks: Nursery, port: int, world_size: int = 2) -> RankOfTest:
    rank = ranks.rank()
    rank.do("start", member=0, world_size=world_size, address=["127.0.0.1", port], hosts_store=True)
    return rank


def test_rank_0_is_killed_and_the_store_goes_on(ranks: Nursery, port: int) -> None:
    """While another is connected, although it never says that it is through."""
    rank = host(ranks, port)
    store = connection(port)
    CallMembers(PrefixStore("agents", store), 2).join(1, "other-node")
    rank.kill()
    iteration = Round(store, 0)
    store.wait([iteration.outcome], WAIT)
    iteration.account(Entry(1, 1, 2))
    store.wait([iteration.closed], WAIT)
    until(lambda: list(ranks.processes().values()) == ["ft_companion"], "only the store's host is left")
    store.set("still", "there")
    assert store.get("still") == b"there"
    del store, iteration
    ranks.nothing_left()
    until(lambda: is_free(port), "the port is free")


def test_it_ends_when_all_are_through(ranks: Nursery, port: int) -> None:
    """Although another is still connected."""
    rank = host(ranks, port)
    store = connection(port)
    rank.do("close")
    rank.leave()
    until(lambda: list(ranks.processes().values()) == ["ft_companion"], "only the store's host is left")
    CallMembers(PrefixStore("agents", store), 2).end(1)
    ranks.nothing_left()


def test_closing_waits_for_the_others(ranks: Nursery, port: int) -> None:
    rank = host(ranks, port)
    rank.say("close", others_s=60.0)
    call_members = CallMembers(PrefixStore("agents", connection(port)), 2)
    until(lambda: call_members.has_ended(0), "it closes")
    assert not call_members.is_finished()
    call_members.end(1)
    assert rank.answer() is None
    rank.leave()


def test_a_second_call_finds_the_store_served(ranks: Nursery, port: int) -> None:
    rank = host(ranks, port, world_size=1)
    rank.do("close", others_s=60.0)
    rank.do("start", member=0, world_size=1, address=["127.0.0.1", port], hosts_store=True, prefix="second")
    assert not Round(connection(port, "second"), 0).records()
    rank.do("close", others_s=60.0)
    rank.leave()


def test_a_port_that_is_taken_is_named(ranks: Nursery) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        rank = ranks.rank()
        error = rank.refuses("start", member=0, world_size=1, address=["127.0.0.1", port], hosts_store=True)
        assert f"127.0.0.1:{port}: the port is in use" in error
        rank.leave()


@pytest.mark.parametrize(
    ("host", "where"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("127.0.0.2", "127.0.0.2")]
)
def test_a_loopback_address_is_served_there_only(host: str, where: str) -> None:
    with store_host.listen(host, 0) as listener:
        assert listener.getsockname()[0] == where


def test_own_connections_are_no_use(server: Any) -> None:
    assert not store_host.is_used(server.port)
    own = connection(server.port)
    assert not store_host.is_used(server.port)
    del own


def test_a_connection_of_another_process_is_use(server: Any) -> None:
    ask = f"import socket, sys; c = socket.create_connection(('127.0.0.1', {server.port})); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", ask], stdin=subprocess.PIPE) as other:
        until(lambda: store_host.is_used(server.port), "the other's connection is seen")
        assert other.stdin is not None
        other.stdin.close()
    until(lambda: not store_host.is_used(server.port), "it has ended")


@pytest.mark.parametrize("look", [store_host.is_used, lambda _: gloo_connections.cut_store(1)])
def test_a_look_at_the_connections_leaves_locks_of_files(
    server: Any, tmp_path: Path, look: Callable[[int], object]
) -> None:
    """The kernel ends all of a process's POSIX locks on a file when the process closes any descriptor of it."""
    path = tmp_path / "lock"
    ask = f"import fcntl; fcntl.lockf(open({str(path)!r}, 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with path.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert not look(server.port)
        other = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
    assert "BlockingIOError" in other.stderr
