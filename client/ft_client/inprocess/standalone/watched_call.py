"""One call of a wrapped function as its companion knows it: the rank, the timeouts, and the address of its store.

`restart/coordination.py` makes it, and `companion.py` sends it to the companion. It connects to that store; the keys in
it are those of `rank_monitor.contract`.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ft_client.inprocess.timeouts import Timeouts
from rank_monitor.contract.processes import resolver
from rank_monitor.contract.wire.json_record import read_record

MakeStore = Callable[[], Any]

OVER, FINISHED = b"over", b"finished"
"""Messages between rank and companion: the call is over for this rank, and for all ranks."""

# torch's default timeout of a store.
_STORE_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class WatchedCall:
    """A call of one rank, `member` at entry.

    `prefix`: of the call's keys in the store, the same on all ranks, another for each call. `host`, `port`: where its
    `TCPStore` is; the host is empty where the store is made by the user's own factory. `hosts_store`: the companion
    serves it there, of one rank only, and not where somebody else serves it. `iterations_host`: the companion serves a
    store for each iteration, under this address; empty: that of another rank does.
    """

    member: int
    world_size: int
    prefix: str
    host: str
    port: int
    hosts_store: bool
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    barrier_timeout_s: float
    iterations_host: str = ""

    @classmethod
    def of(
        cls,
        member: int,
        world_size: int,
        prefix: str,
        address: tuple[str, int] | None,
        hosts_store: bool,
        timeouts: Timeouts,
        iterations_host: str = "",
    ) -> WatchedCall:
        """A call with the wrapper's durations; a store without an address is not hosted."""
        host, port = address or ("", 0)
        return cls(
            member=member,
            world_size=world_size,
            prefix=prefix,
            host=host,
            port=port,
            hosts_store=hosts_store and bool(host),
            heartbeat_interval_s=timeouts.heartbeat_interval.total_seconds(),
            heartbeat_timeout_s=timeouts.heartbeat_timeout.total_seconds(),
            barrier_timeout_s=timeouts.barrier_timeout.total_seconds(),
            iterations_host=iterations_host,
        )

    def to_json(self) -> bytes:
        """One JSON object."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> WatchedCall:
        """Reads the call that `to_json` wrote.

        Raises:
            ProtocolError: `data` is not such a call.
        """
        return read_record(cls, data)

    def connect(self, make_store: MakeStore | None, limit_s: float = math.inf) -> Any:
        """Returns a new connection to the store, without the prefix. Blocks until the store is served.

        Args:
            make_store: of the user's own factory.
            limit_s: for how long; never longer than 300 s.

        Raises:
            RuntimeError: it was not served in time, or there is no way to it from this process.
        """
        from torch.distributed import TCPStore

        if self.host:
            wait = datetime.timedelta(seconds=min(limit_s, _STORE_TIMEOUT_S))
            with resolver.bounded_towards(self.host):
                return TCPStore(self.host, self.port, is_master=False, timeout=wait, wait_for_workers=False)
        if make_store is None:
            raise RuntimeError("the store of this call can only be made by its own factory, which is not known here")
        return make_store()

    def keys(self, store: Any, *names: str) -> Any:
        """The call's part of a store, or a part of that."""
        from torch.distributed import PrefixStore

        prefix = "/".join(name for name in (self.prefix, *names) if name)
        if prefix:
            return PrefixStore(prefix, store)
        return store
