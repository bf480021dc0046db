"""A fresh store per cycle: nothing of a former one can be read, whatever port was asked for."""

import socket

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from ft_launcher.job.rendezvous.cycle_store import FREE_AFTER, PortHolder, learn, publish
from tests.ports import free_port

HOST = "127.0.0.1"


def client(port: int) -> TCPStore:
    return TCPStore(HOST, port, is_master=False, wait_for_workers=False)


@pytest.mark.parametrize("fixed", [False, True])
def test_each_cycle_has_an_empty_store_and_the_next_number(fixed: bool) -> None:
    job_store = HashStore()
    holder = PortHolder(HOST, free_port() if fixed else None, None)
    ports = []
    for cycle in range(3):
        round_store = PrefixStore(f"round_{cycle}", job_store)
        published = publish(round_store, holder, HOST, "job")
        learned = learn(round_store)
        assert (published.cycle, learned.cycle, learned.port) == (cycle, cycle, published.port)
        ranks_store = client(learned.port)
        assert not ranks_store.check(["address"])
        ranks_store.set("address", str(cycle))
        ports.append(published.port)
        del ranks_store, published
    assert (len(set(ports)) == 1) == fixed
    holder.close()


def can_be_listened_at(port: int) -> bool:
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True


def test_the_next_two_ports_are_free() -> None:
    """Of one server of several at least: other processes take ports meanwhile."""
    servers = [PortHolder(HOST, None, None).serve() for _ in range(3)]
    offsets = range(1, FREE_AFTER + 1)
    assert any(all(can_be_listened_at(server.port + offset) for offset in offsets) for server in servers)


def test_a_port_range_is_kept() -> None:
    base = free_port()
    server = PortHolder(HOST, None, (base, base + 100)).serve()
    assert base <= server.port <= base + 100


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        with pytest.raises(RendezvousConnectionError, match="in use"):
            PortHolder(HOST, taken.getsockname()[1], None)


def test_a_range_without_a_free_port_is_named() -> None:
    """The store of a round is served for ranks, which read the error; that of a cycle for torch's agent."""
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        holder = PortHolder(HOST, None, (port, port))
        with pytest.raises(OSError, match="no free port found among ports"):
            holder.serve_round()
        with pytest.raises(RendezvousConnectionError, match="no free port found among ports"):
            holder.serve()
