"""One call of a wrapped function as companions know it: the rank, the timeouts, the store, and members and nodes there.

`restart/coordination.py` makes a `WatchedCall`, and `companion.py` sends it to the companion. It connects to the store
of the call, whose keys are those of `rank_monitor.contract`. In a part of it that is their own the companions keep the
`CallMembers`, each for its own rank. Restarts within the call do not change them.

A node is a booted machine, or the part of it that has a network of its own. One companion of it beats, and when that
ends another takes over; the companion of rank 0 watches all beats.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import math
import os
import secrets
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rank_monitor.contract.agent_order import MAKES_STORE
from rank_monitor.contract.loss_detector import LossDetector
from rank_monitor.contract.processes import proc, resolver
from rank_monitor.contract.rounds.barrier import EVER
from rank_monitor.contract.wire import channel

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
# A reading of beats that is later than its interval by more than this was stopped itself: what it missed counts for no
# node.
_SLACK_S = 1.0
_AGAIN_S = 0.1
_TRIES = 10
"""Within this second a companion of ours listens, which it does microseconds after it has bound the name; a process of
another user may never listen."""


@dataclass(frozen=True)
class WatchedCall:
    """A call of one rank, `member` at entry.

    `prefix`: of the call's keys in the store, the same on all ranks, another for each call. `host`, `port`: where its
    `TCPStore` is; the host is empty where the store is made by the user's own factory. `hosts_store`: the companion
    serves it there, of one rank only, and not where somebody else serves it. `rounds_host`: the companion serves a
    store for each round, under this address; empty: that of another rank does.
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
    rounds_host: str = ""

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
            with resolver.towards(self.host, self.port) as address, MAKES_STORE:
                return TCPStore(address, self.port, is_master=False, timeout=wait, wait_for_workers=False)
        if make_store is None:
            raise RuntimeError("the store of this call can only be made by its own factory, which is not known here")
        with MAKES_STORE:
            return make_store()

    def keys(self, store: Any) -> Any:
        """The call's part of a store."""
        from torch.distributed import PrefixStore

        with MAKES_STORE:
            return PrefixStore(self.prefix, store)

    def members(self, store: Any) -> CallMembers:
        """The members of the call in a store."""
        return self.members_in(self.keys(store))

    def members_in(self, keys: Any) -> CallMembers:
        """The members of the call in its part of a store."""
        from torch.distributed import PrefixStore

        with MAKES_STORE:
            return CallMembers(PrefixStore(_OWN, keys), self.world_size)


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


def this_node() -> str:
    """A unique name of this node."""
    boot = proc.boot_id().decode().strip()
    with contextlib.suppress(OSError):
        if boot:
            return f"{boot}-{Path('/proc/self/ns/net').stat().st_ino}"
    return socket.gethostname()  # in a sandbox that shows neither


def beat_for_node(
    member: int, open_members: Callable[[], CallMembers], interval_s: float, say: Callable[[str], None]
) -> None:
    """Adds a member to a call, then beats or waits for its turn, until the call is finished. Blocks.

    The one that listens at an abstract Unix socket beats; the others are connected to it, and the kernel reports that
    it is gone. Any user of the machine can take such a name, so only a listener of this user is waited for: where
    another has the name, each companion beats, which costs operations on the store and harms nobody.

    Args:
        open_members: the call's members over a new connection; one is kept only while this companion beats.
        interval_s: between two beats.
        say: called with a line for the log.

    Raises:
        RuntimeError: the store is lost.
    """
    node, call_members = this_node(), open_members()
    call_members.join(member, node)
    name, failed = f"\0ft-beat-{call_members.token()}", 0
    del call_members
    with socket.socket(socket.AF_UNIX) as own:
        while failed < _TRIES and not _listens(own, name):
            failed += 1
            if _has_waited_for_the_end_of(name):
                failed = 0
        if failed == _TRIES:
            say("another user has the name by which companions of this node take turns: each of them beats")
        call_members = open_members()
        for _ in call_members.until_finished(interval_s):
            call_members.beat(node)


class NodeWatch:
    """Watches the beats of a call's nodes.

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
        self._open_members, self._interval_s, self._lost, self._say = open_members, interval_s, lost, say
        self._timeout_s = timeout_s
        self._detector = LossDetector(timeout_s, interval_s + _SLACK_S)
        self._lost_at: dict[str, int] = {}
        self._nodes: dict[str, list[int]] = {}
        self._is_complete = False

    def run(self) -> None:
        """Runs until the call is finished.

        Raises:
            RuntimeError: the store is lost.
        """
        call_members = self._open_members()
        for _ in call_members.until_finished(self._interval_s):
            self._look(call_members)

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


def _listens(own: socket.socket, name: str) -> bool:
    try:
        own.bind(name)
    except OSError:
        return False
    own.listen(socket.SOMAXCONN)
    return True


def _has_waited_for_the_end_of(name: str) -> bool:
    """Blocks until the companion with this name is gone. Returns False after 0.1 s if this user has none."""
    with socket.socket(socket.AF_UNIX) as end:
        try:
            end.setblocking(False)  # connect() to a stranger whose queue is full would block
            end.connect(name)
            is_ours = channel.peer(end).uid == os.geteuid()
        except OSError:
            is_ours = False
        if not is_ours:
            time.sleep(_AGAIN_S)
            return False
        end.setblocking(True)
        with contextlib.suppress(ConnectionError):
            end.recv(1)
        return True
