"""The stores in which the ranks of a wrapper agree on rounds: torch's stores, with a barrier. Their names are public.

Users name one of the classes as the wrapper's `store_factory`; `restart/coordination.py` makes two connections for each
call, since a wait blocks a connection for all other threads. Every rank is a client: another process hosts the store,
and is not known here.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

from torch import distributed

from rank_monitor.contract.processes import resolver
from rank_monitor.contract.rounds.barrier import Arrivals, Entry


class BarrierError(Exception):
    """A barrier was not passed."""


class BarrierTimeout(BarrierError):
    """The other ranks did not arrive in time."""


class BarrierOverflow(BarrierError):
    """More ranks arrived than were expected."""


class StoreMixin:
    """Makes a subclass of torch's `Store` fit to be a `store_factory` of the wrapper. Inherit from both:

        class MyStore(StoreMixin, torch.distributed.TCPStore): ...

    A store that has no `clone()` is created a second time, with the same arguments, for the thread that waits on it.
    The wrapper itself does not call `barrier`; the name is NVIDIA's, and callbacks of users may call it.
    """

    def barrier(self, rank: int, group_name: str, rendezvous_count: int, timeout: datetime.timedelta) -> None:
        """Blocks until `rendezvous_count` ranks have entered the barrier of this name. Each rank enters it once.

        Args:
            rank: this rank.
            group_name: the barrier's name: another one for each barrier, since its keys stay in the store.
            rendezvous_count: how many ranks enter.
            timeout: how long to wait for them.

        Raises:
            BarrierTimeout: fewer ranks have entered in time; the text names them.
            BarrierOverflow: more ranks have entered.
        """
        store: Any = self
        arrivals, released = Arrivals(store, f"barrier/{group_name}"), f"barrier/{group_name}/released"
        counted = arrivals.sign(Entry(rank))
        if counted > rendezvous_count:
            raise BarrierOverflow(f"barrier {group_name!r}: {counted} ranks came, {rendezvous_count} were expected")
        if counted == rendezvous_count:
            store.set(released, "")
        try:
            store.wait([released], timeout)
        except RuntimeError:  # what every store raises when time is up; a lost store raises again in `entries`
            present = sorted(entry.entry_rank for entry in arrivals.entries())
            raise BarrierTimeout(
                f"barrier {group_name!r}: after {timeout.total_seconds():g} s only ranks {present} of "
                f"{rendezvous_count} have come"
            ) from None


class TCPStore(StoreMixin, distributed.TCPStore):  # type: ignore[misc]
    """A connection to the store at an address. The wrapper's default `store_factory`.

    Blocks until the server answers, for at most `timeout`.

    Args:
        host_name: None: MASTER_ADDR of the environment.
        port: None: MASTER_PORT of the environment.
        world_size: None: WORLD_SIZE of the environment.
        timeout: for the connection, and for reads.
        wait_for_workers: a server waits until all have connected.
        multi_tenant: several servers at one port of a process are one.
        use_libuv: which of torch's servers.
        is_master: host the server. The wrapper has it hosted apart from the ranks, so that each may die.

    Raises:
        ValueError: an address is neither given nor in the environment.
        torch.distributed.DistNetworkError: nobody listens there within `timeout`.
    """

    def __init__(
        self,
        host_name: str | None = None,
        port: int | None = None,
        world_size: int | None = None,
        timeout: datetime.timedelta = datetime.timedelta(seconds=300),
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        use_libuv: bool = True,
        is_master: bool = False,
    ) -> None:
        host, port = address(host_name, port)
        if world_size is None:
            world_size = int(os.environ.get("WORLD_SIZE", "1"))
        with resolver.towards(host, port) as found:
            super().__init__(
                host_name=found,
                port=port,
                world_size=world_size,
                is_master=is_master,
                timeout=timeout,
                wait_for_workers=wait_for_workers and is_master,
                multi_tenant=multi_tenant,
                use_libuv=use_libuv,
            )


class FileStore(StoreMixin, distributed.FileStore):  # type: ignore[misc]
    """A store in a file that all ranks see, for ranks that share a file system and no address.

    Args:
        file_name: the file; it must not be of an earlier job.
        world_size: how many processes use it; -1: not known.
    """


class PrefixStore(StoreMixin, distributed.PrefixStore):  # type: ignore[misc]
    """A part of another store: every key begins with a prefix.

    Args:
        prefix: of the keys.
        store: the other.
    """


def address(host_name: str | None, port: int | None) -> tuple[str, int]:
    """Returns host and port of a `TCPStore` with these arguments; what is None comes from the environment.

    Raises:
        ValueError: host or port is neither given nor in the environment, or the port is no number from 1 to 65535.
    """
    if host_name is None:
        host_name = os.environ.get("MASTER_ADDR")
    if port is None:
        text = os.environ.get("MASTER_PORT")
    else:
        text = str(port)
    if not host_name or not text or not text.isdigit() or not 0 < int(text) < 65536:
        raise ValueError(
            f"no store at host_name={host_name!r}, port={text!r}: give both in store_kwargs, or set MASTER_ADDR and "
            "MASTER_PORT in the environment"
        )
    return host_name, int(text)
