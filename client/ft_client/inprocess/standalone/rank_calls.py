"""What the process of a standalone agent does: runs the agent of its rank, and keeps the members of the rank's calls.

`agent_process.py` makes the process and calls `run` in its main thread. The agent
(`ft_launcher.agent.standalone.StandaloneAgent`) watches the rank and its monitor, serves stores and reports lost ranks.
Here is what a launcher's coordinator would know: the calls of the rank, which members have ended, and the beats of
their nodes.

1. The rank sends a call. `RankCalls.poll` receives it, between two waits of `StandaloneAgent.watch`, and `_begin` has
   stores served, starts the beats, and on rank 0 the watch of all nodes' beats.
2. The rank sends that the call is over: the member is marked as finished in the store.
3. The rank's process ends. `watch` returns, and `finish` reports the loss to the other ranks, unless the rank has left
   by itself. Where this process hosts a store, `finish` serves on until nobody needs it.

Threads: the main thread runs `run` and all of `RankCalls` that no thread below is named for. Operations of the store
block, so each of these has a thread with a connection of its own, and none touches `RankCalls` but to read:

- the beats for this node (`beat_for_node`), one thread for each call;
- the watch of the nodes (`NodeWatch.run`), on the agent of rank 0, one for each call;
- the end of a call (`_report_end`), which waits for all members where this process hosts the store;
- threads of the launcher's parts, for rounds and for reports of losses (`ft_launcher/agent/standalone.py`).
"""

from __future__ import annotations

import functools
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ft_client.inprocess.attribution import Interruption
from ft_client.inprocess.standalone import launcher_parts, store_host
from ft_client.inprocess.standalone.watched_call import (
    FINISHED,
    OVER,
    CallMembers,
    MakeStore,
    NodeWatch,
    WatchedCall,
    beat_for_node,
)
from rank_monitor.contract.agent_order import AgentOrder
from rank_monitor.contract.processes import peer_names
from rank_monitor.contract.processes.spawn import Template
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.restart_phase import GONE, RestartPhase
from rank_monitor.contract.wire import channel
from rank_monitor.contract.wire.json_record import read_record

_SPOKEN_FOR = GONE | {RestartPhase.DONE}
"""Phases in which the rank has reported its end to the others itself: there is no loss to report."""
_FIRST_CALL_S = 1.0
"""Seconds for which the rank's first call is awaited. The rank sends it right after the start; without one the monitor
starts all the same."""
_NO_STORE = (RuntimeError, OSError)
"""What an operation raises where the store is lost or cannot be reached: torch's stores the first, sockets of this
process and a factory of the user also the second."""
_NO_ANSWER = "the store of this call does not answer as it should"


def run(order: AgentOrder, make_store: MakeStore | None) -> None:
    """Watches one rank until it has ended and its end was reported. Blocks until then, in the process' main thread.

    Args:
        order: the parameters of the agent.
        make_store: of the user's own factory; None: the calls have stores with an address.
    """
    say = functools.partial(_say, order.member)
    say(f"watches process {order.rank_pid}; this is process {os.getpid()}")
    template = Template.start(order.tag, Path(order.folder))
    import torch.distributed  # Imported here: the template starts meanwhile.

    peer_names.look_up_no_more(torch)
    agent = launcher_parts.StandaloneAgent(order, template, say)
    calls = RankCalls(socket.socket(fileno=order.connection), agent, make_store, say)
    readable({order.rank, *calls.descriptors()}, _FIRST_CALL_S)
    calls.poll()  # The store that is to be served comes before the monitor: ranks wait for the store.
    phase, condemned = agent.watch(calls)
    say("the rank has ended")
    calls.finish(phase in _SPOKEN_FOR, condemned)
    say("ends")


class RankCalls:
    """The calls of one rank, as the rank sends them. `StandaloneAgent.watch` polls it (`RankConnection`).

    Args:
        connection: to the rank.
        agent: of the rank.
        make_store: of the user's own factory.
        say: called with a line for the log.
    """

    def __init__(
        self,
        connection: socket.socket,
        agent: launcher_parts.StandaloneAgent,
        make_store: MakeStore | None,
        say: Callable[[str], None],
    ) -> None:
        self._connection: socket.socket | None = connection
        self._connection.setblocking(False)
        self._agent, self._make_store, self._say = agent, make_store, say
        self._call: WatchedCall | None = None
        self._is_over = False
        self._ending: threading.Thread | None = None

    def descriptors(self) -> set[int]:
        """Readable when `poll` has something to do."""
        if self._connection is None:
            return set()
        return {self._connection.fileno()}

    def poll(self) -> None:
        """Handles what the rank has sent. Does not block."""
        while self._connection is not None:
            received = _receive(self._connection)
            if received is None:
                return
            data, descriptors = received
            listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
            if not data:
                self._connection.close()
                self._connection = None
            elif data == OVER:
                self._end_call()
            else:
                self._begin(read_record(WatchedCall, data), listeners)

    def finish(self, has_left: bool, condemned: str) -> None:
        """Reports the end of the rank's process, and serves on what the others need. Blocks until nobody needs it.

        Called once, when the rank's process has ended.

        Args:
            has_left: the rank has reported its end to the others itself.
            condemned: why its monitor ended the rank; empty: the monitor did not.
        """
        if has_left:
            self._end_call()
        call, agents_call = self._call, self._agent.call
        if call is None or agents_call is None:
            return
        self._report_loss(call, agents_call, condemned)
        if call.port in self._agent.served:
            self._say("the store is served as long as the others need it")
            store_host.stay(call.port, self._members_of(call), call.heartbeat_interval_s, call.barrier_timeout_s)
        elif call.rounds_host:
            self._say("the stores of rounds are served until the others are through")
            with suppress(*_NO_STORE):  # The store of the call is another process', and ends with that.
                self._members_of(call, call.heartbeat_timeout_s).wait_finished()

    def _begin(self, call: WatchedCall, listeners: list[socket.socket]) -> None:
        """Begins a call that the rank has sent: stores first, then the beats, and on rank 0 the watch of all nodes.

        Args:
            call: what the rank has sent.
            listeners: the sockets at which the call's store is to be served here; empty: it is served elsewhere, or
                here already.
        """
        self._call, self._is_over = call, False
        for listener in listeners:
            self._agent.serve(call.host, listener)
        connect = functools.partial(call.connect, self._make_store)
        agents_call = launcher_parts.StandaloneCall(
            call.prefix, connect, call.heartbeat_timeout_s, call.barrier_timeout_s, self._say
        )
        self._agent.begin(agents_call)
        if call.rounds_host:
            agents_call.serve_rounds(call.rounds_host)
        members_of = functools.partial(self._members_of, call)
        self._in_thread(
            lambda: beat_for_node(call.member, members_of, call.heartbeat_interval_s, self._say),
            failed="this agent does not beat for its node any more",
        )
        if call.member == 0:
            give_up = functools.partial(self._give_up, call, agents_call)
            watch = NodeWatch(members_of, call.heartbeat_timeout_s, call.heartbeat_interval_s, give_up, self._say)
            self._in_thread(watch.run, failed="nodes are not watched any more")

    def _end_call(self) -> None:
        """Ends the call for this rank, which has reported its end to the others itself. Does not block."""
        call = self._call
        if call is None or self._is_over:
            return
        self._is_over = True
        self._ending = self._in_thread(lambda: self._report_end(call))

    def _report_end(self, call: WatchedCall) -> None:
        """Marks the member as finished. The host of the store then waits for all, and tells its rank, which waits for
        that in `AgentHandle.close`. Runs in a thread."""
        call_members = self._members_of(call)
        call_members.end(call.member)
        if call.hosts_store:
            call_members.wait_finished()
            connection = self._connection  # The main thread may close it and set it to None meanwhile.
            if connection is not None:
                with suppress(OSError):  # The rank has ended, and waits for nothing any more.
                    channel.send(connection, FINISHED)

    def _report_loss(self, call: WatchedCall, agents_call: launcher_parts.StandaloneCall, condemned: str) -> None:
        """Reports that the rank is gone. Blocks until the others have taken note of the loss, or have all ended.

        Does nothing after the end of the call but wait until that is written: the process ends soon.

        Args:
            call: the rank's last call.
            agents_call: the same call, as the agent has it.
            condemned: why the monitor ended the rank; empty: it did not.
        """
        if self._is_over:
            if self._ending is not None and not call.hosts_store:
                self._ending.join(call.heartbeat_timeout_s)
            return
        reason = Interruption.TERMINATED
        if condemned:
            reason = Interruption.HARD_TIMEOUT
        self._say(f"the rank did not leave by itself: {condemned or reason.name}")
        # First, and whatever becomes of the next step: the others wait for the report, over a connection of its own.
        agents_call.report_loss(call.member, reason.name)
        try:
            self._members_of(call, call.heartbeat_timeout_s).end(call.member)
        except _NO_STORE as lost:
            self._say(f"{_NO_ANSWER}: {lost}")
        agents_call.wait_for_notice(lambda keys: call.members_in(keys).wait_finished())

    def _give_up(self, call: WatchedCall, agents_call: launcher_parts.StandaloneCall, members: list[int]) -> None:
        """Reports the members of a silent node as lost. Called by `NodeWatch`, in its thread.

        Each report has a thread, since it waits until the other ranks have taken note, which they do only when all
        members of the node have been reported.
        """
        call_members = self._members_of(call, call.heartbeat_timeout_s)
        for member in members:
            call_members.end(member)
            agents_call.report_loss(member, Interruption.UNRESPONSIVE.name)

    def _members_of(self, call: WatchedCall, limit_s: float = math.inf) -> CallMembers:
        """Returns the members of a call, over a new connection to its store, which is awaited for `limit_s` seconds."""
        return call.members(call.connect(self._make_store, limit_s))

    def _in_thread(self, task: Callable[[], None], failed: str = _NO_ANSWER) -> threading.Thread:
        """Runs a task in a thread, and returns the thread. Where the store is lost, a line of the log says `failed`."""

        def run_task() -> None:
            try:
                task()
            except _NO_STORE as lost:
                self._say(f"{failed}: {lost}")

        thread = threading.Thread(target=run_task, daemon=True)
        thread.start()
        return thread


def _say(member: int, text: str) -> None:
    """Writes a line to the log of the agent, which its standard error is. A full disk must not end the agent."""
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} agent of rank {member}: {text}\n"
    with suppress(OSError):
        os.write(2, line.encode())


def _receive(connection: socket.socket) -> tuple[bytes, list[int]] | None:
    """Returns a message of the rank with the descriptors that came with it. Does not block.

    None: no message is there. Empty bytes: the rank has ended, or closed the connection.
    """
    try:
        return channel.receive(connection, max_descriptors=1)
    except OSError:
        return b"", []
