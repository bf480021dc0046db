"""One call of a wrapped function as companions know it: the rank, the timeouts, the store, and the members there.

`restart/coordination.py` makes a `WatchedCall`, and `companion.py` sends it to the companion. It connects to the store
of the call, whose keys are those of `rank_monitor.contract`. In a part of it that is their own the companions keep the
`CallMembers`, each for its own rank. Restarts within the call do not change them.
"""

from __future__ import annotations

import datetime
import itertools
import math
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ft_client.inprocess.arguments import Timeouts
from rank_monitor.contract.iterations.barrier import EVER
from rank_monitor.contract.processes import resolver

MakeStore = Callable[[], Any]

OVER, FINISHED = b"over", b"finished"
"""Messages between rank and companion: the call is over for this rank, and for all ranks."""

_ALL_ENDED = "finished"
"""The key that is set when every member has finished."""

# torch's default timeout of a store.
_STORE_TIMEOUT_S = 300.0
# Each look is an operation of the store, as each beat is.
_INTERVALS_PER_LOOK = 4
# The part of the store that is the companions' own.
_OWN = "companion"


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

    def keys(self, store: Any) -> Any:
        """The call's part of a store."""
        from torch.distributed import PrefixStore

        return PrefixStore(self.prefix, store)

    def members(self, store: Any) -> CallMembers:
        """The members of the call in a store."""
        from torch.distributed import PrefixStore

        return CallMembers(PrefixStore(_OWN, self.keys(store)), self.world_size)


class CallMembers:
    """The members of a call: on which node each is, which have finished, and the beats of the nodes.

    Args:
        store: the part of the call's store that is the companions' own.
        world_size: members of the call.
    """

    def __init__(self, store: Any, world_size: int) -> None:
        self._store, self._world_size = store, world_size

    def join(self, member: int, node: str) -> None:
        """Adds a member on a node (a name without blanks). A second call for the same member does nothing."""
        if self._store.add(f"came/{member}", 1) == 1:
            self._store.append("nodes", f"{member} {node}\n")
            self._store.add("came", 1)

    def all_joined(self) -> bool:
        """Whether all members have been added."""
        return int(self._store.add("came", 0)) >= self._world_size

    def end(self, member: int) -> None:
        """Marks a member as finished: its call is over, or its process has ended. A second call does no harm."""
        if self._store.add(f"ended/{member}", 1) == 1 and self._store.add("ended", 1) >= self._world_size:
            self._store.set(_ALL_ENDED, "")

    def has_ended(self, member: int) -> bool:
        """Whether a member has finished."""
        return int(self._store.add(f"ended/{member}", 0)) > 0

    def is_finished(self) -> bool:
        """Whether all members have finished."""
        return bool(self._store.check([_ALL_ENDED]))

    def wait_finished(self, timeout: datetime.timedelta = EVER) -> None:
        """Blocks until all members have finished.

        Raises:
            RuntimeError: they have not within `timeout`, or the store is lost.
        """
        self._store.wait([_ALL_ENDED], timeout)

    def members(self) -> dict[str, list[int]]:
        """Node -> the members on it that have been added so far."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        if self._store.check(["nodes"]):
            for line in self._store.get("nodes").decode().splitlines():
                member, _, node = line.partition(" ")
                found[node].append(int(member))
        return dict(found)

    def token(self) -> str:
        """A random text that is the same for all members of this call."""
        return bytes(self._store.compare_set("token", "", secrets.token_hex(8))).decode()

    def until_finished(self, interval_s: float) -> Iterator[None]:
        """An iterator that yields now and after each interval until all members have finished.

        That is checked at every fourth interval only, since each check is an operation of the store.
        """
        for number in itertools.count():
            if number % _INTERVALS_PER_LOOK == 0 and self.is_finished():
                return
            yield
            time.sleep(interval_s)

    def beat(self, node: str, amount: int = 1) -> int:
        """Increases the counter of a node. Returns its value."""
        return int(self._store.add(f"beat/{node}", amount))
