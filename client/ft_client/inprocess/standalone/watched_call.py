"""One call of a wrapped function as standalone agents know it: the rank, the timeouts, the store, members and nodes.

`restart/coordination.py` makes a `WatchedCall` in the rank, and `agent_handle.py` sends it to the rank's agent. The
agent connects to the store of the call, where the ranks' keys are those of `rank_monitor.contract`. The agents keep the
`CallMembers` in a part of the store that is their own: each adds its own rank, and marks it as finished in the end.
Restarts within the call do not change the members.

**Beats.** A lost machine takes its ranks and their agents with it, and nobody there can report the loss. So each node
has a counter in the store. A node is a booted machine, or the part of it that has a network of its own. One agent of
the node increases the counter (`beat_for_node`); when that agent ends, another one of the node takes over. The agent of
rank 0 reads the counters of all nodes (`NodeWatch`), and reports the ranks of a node whose counter stands still.

Everything here that takes a store blocks while the store does not answer: `rank_calls.py` calls it in threads.
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

from rank_monitor.contract.loss_detector import LossDetector
from rank_monitor.contract.processes import proc, resolver
from rank_monitor.contract.processes.making_store import making_store
from rank_monitor.contract.rounds.barrier import EVER
from rank_monitor.contract.wire import channel

MakeStore = Callable[[], Any]

OVER, FINISHED = b"over", b"finished"
"""Messages between a rank and its agent: the call is over for this rank, and for all ranks."""

_ALL_ENDED = "finished"
"""The key that is set when every member has finished."""

_STORE_TIMEOUT_S = 300.0
"""torch's default timeout of a store."""
_INTERVALS_PER_LOOK = 4
"""How many beats there are to a check whether the call is finished. Both are one operation of the store."""
_OWN = "agents"
"""The prefix of the part of the store that is the agents' own."""
_SLACK_S = 1.0
"""Seconds. A reading of the counters that is later than its interval by more than this was stopped itself: what it
missed counts against no node."""
_AGAIN_S = 0.1
"""Seconds between two attempts to find the agent that beats for this node."""
_TRIES = 10
"""How many attempts there are. Within this second an agent of this user listens, which it does microseconds after it
has bound the name; a process of another user may never listen."""


@dataclass(frozen=True)
class WatchedCall:
    """A call of one rank. Sent as JSON from the rank to its agent.

    Attributes:
        member: the rank at the entry of the call. It stays the same when the ranks are numbered anew.
        world_size: how many ranks entered the call.
        prefix: of the call's keys in the store: the same on all ranks, another for each call.
        host: where the call's `TCPStore` is; empty: the store is made by the user's own factory.
        port: of the store.
        hosts_store: the agent of this rank serves the store there. So it is for one rank of the call, unless somebody
            else serves the store, such as torchrun.
        heartbeat_interval_s: between two beats of a node.
        heartbeat_timeout_s: after which a node without a beat is lost.
        barrier_timeout_s: how long ranks may take to arrive, and to take note of a lost rank.
        rounds_host: the agent of this rank serves a store for each round, under this address; empty: the agent of
            another rank does.
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
            with resolver.towards(self.host, self.port) as address, making_store():
                return TCPStore(address, self.port, is_master=False, timeout=wait, wait_for_workers=False)
        if make_store is None:
            raise RuntimeError("the store of this call can only be made by its own factory, which is not known here")
        with making_store():
            return make_store()

    def keys(self, store: Any) -> Any:
        """Returns the call's part of a store, in which the ranks and the agents have their keys."""
        from torch.distributed import PrefixStore

        with making_store():
            return PrefixStore(self.prefix, store)

    def members(self, store: Any) -> CallMembers:
        """Returns the members of the call in a store. `store`: a connection, without the prefix."""
        return self.members_in(self.keys(store))

    def members_in(self, keys: Any) -> CallMembers:
        """Returns the members of the call in its part of a store, as `keys` returns it."""
        from torch.distributed import PrefixStore

        with making_store():
            return CallMembers(PrefixStore(_OWN, keys), self.world_size)


class CallMembers:
    """The members of a call: on which node each is, which have finished, and the beats of the nodes.

        came/M      how often member M was added      came     how many members were added
        ended/M     how often M was marked finished   ended    how many members have finished
        nodes       a line "M NODE" for each member   finished is there once all members have finished
        beat/NODE   the counter of a node             token    of this call

    Counts, since an agent and the agent that takes its place may both write, and the store's `add` says who was first.

    Args:
        store: the part of the call's store that is the agents' own.
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
        """Returns whether all members have been added."""
        return int(self._store.add("came", 0)) >= self._world_size

    def end(self, member: int) -> None:
        """Marks a member as finished: its call is over, or its process has ended. A second call does no harm."""
        if self._store.add(f"ended/{member}", 1) == 1 and self._store.add("ended", 1) >= self._world_size:
            self._store.set(_ALL_ENDED, "")

    def has_ended(self, member: int) -> bool:
        """Returns whether a member has finished."""
        return int(self._store.add(f"ended/{member}", 0)) > 0

    def is_finished(self) -> bool:
        """Returns whether all members have finished."""
        return bool(self._store.check([_ALL_ENDED]))

    def wait_finished(self, timeout: datetime.timedelta = EVER) -> None:
        """Blocks until all members have finished.

        Raises:
            RuntimeError: they have not within `timeout`, or the store is lost.
        """
        self._store.wait([_ALL_ENDED], timeout)

    def members(self) -> dict[str, list[int]]:
        """Returns a mapping: node -> the members on it that have been added so far."""
        found: defaultdict[str, list[int]] = defaultdict(list)
        if self._store.check(["nodes"]):
            for line in self._store.get("nodes").decode().splitlines():
                member, _, node = line.partition(" ")
                found[node].append(int(member))
        return dict(found)

    def token(self) -> str:
        """Returns a random text that is the same for all members of this call."""
        return bytes(self._store.compare_set("token", "", secrets.token_hex(8))).decode()

    def until_finished(self, interval_s: float) -> Iterator[None]:
        """Yields now, and again after each interval, until all members have finished. Sleeps in between.

        Whether they have is checked at every fourth interval only, since each check is an operation of the store.
        """
        for number in itertools.count():
            if number % _INTERVALS_PER_LOOK == 0 and self.is_finished():
                return
            yield
            time.sleep(interval_s)

    def beat(self, node: str, amount: int = 1) -> int:
        """Increases the counter of a node, by 0 to read it. Returns its value."""
        return int(self._store.add(f"beat/{node}", amount))


def this_node() -> str:
    """Returns a unique name of this node: of this boot of the machine, and of the network that this process is in."""
    boot = proc.boot_id().decode().strip()
    with contextlib.suppress(OSError):
        if boot:
            return f"{boot}-{Path('/proc/self/ns/net').stat().st_ino}"
    return socket.gethostname()  # A sandbox may show neither.


def beat_for_node(
    member: int, open_members: Callable[[], CallMembers], interval_s: float, say: Callable[[str], None]
) -> None:
    """Adds a member to a call, then beats or waits for its turn to beat, until the call is finished. Blocks.

    Called by each agent in a thread, once for each call. The agents of a node take turns by an abstract Unix socket:
    the agent that listens at the name beats. The others are connected to it, and the kernel reports when it is gone;
    then one of them can bind the name. Any user of the machine can take such a name. So only a listener of this user is
    waited for; where another user has the name, each agent beats, which costs operations of the store and harms nobody.

    Args:
        member: to be added.
        open_members: returns the call's members over a new connection. A connection is kept only while this agent
            beats, so the store has one for each node, and not for each rank.
        interval_s: seconds between two beats.
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
            say("another user has the name by which standalone agents of this node take turns: each of them beats")
        call_members = open_members()
        for _ in call_members.until_finished(interval_s):
            call_members.beat(node)


class NodeWatch:
    """Watches the beats of a call's nodes, on the agent of rank 0.

    No clock of another node is read: a counter that does not change for `timeout_s`, by the clock here, is a lost node.

    Args:
        open_members: returns the call's `CallMembers` over a new connection.
        timeout_s: after how many seconds without a beat a node is lost.
        interval_s: seconds between two readings of the counters.
        lost: called with the members of a lost node that have not finished, in the thread of `run`.
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
        """Watches until the call is finished. Blocks; called in a thread of its own.

        Raises:
            RuntimeError: the store is lost.
        """
        call_members = self._open_members()
        for _ in call_members.until_finished(self._interval_s):
            self._look(call_members)

    def _look(self, call_members: CallMembers) -> None:
        """Reads all counters once, and reports the nodes that are lost by now."""
        if not self._is_complete:
            self._is_complete = call_members.all_joined()
            self._nodes = call_members.members()
        counters = {node: call_members.beat(node, 0) for node in self._nodes}
        now = time.monotonic()
        # A node is watched from its first beat on. One that was lost is watched again when it beats again.
        self._detector.watch([node for node, beats in counters.items() if beats != self._lost_at.get(node, 0)], now)
        for node in self._detector.read(counters, now):
            self._lost_at[node] = counters[node]
            members = [member for member in self._nodes[node] if not call_members.has_ended(member)]
            if members:
                self._say(f"node {node} with ranks {members} was silent for {self._timeout_s:g} s")
                self._lost(members)


def _listens(own: socket.socket, name: str) -> bool:
    """Tries to listen at the name; returns whether `own` does now: it is this agent's turn to beat."""
    try:
        own.bind(name)
    except OSError:
        return False
    own.listen(socket.SOMAXCONN)
    return True


def _has_waited_for_the_end_of(name: str) -> bool:
    """Blocks until the agent that listens at the name is gone. Returns False after 0.1 s if no process of this user
    listens there."""
    with socket.socket(socket.AF_UNIX) as end:
        try:
            end.setblocking(False)  # A `connect` to a stranger whose queue is full would block.
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
