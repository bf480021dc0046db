"""The standalone agent: the agent of one rank that no launcher started. Its monitor, its stores, reports of lost ranks.

The client makes a process for it (`ft_client.inprocess.standalone`), whose main thread makes the agent and calls
`watch`. `watch` returns when the rank's process has ended; then the client has the loss reported to the other ranks
(`StandaloneCall.report_loss`, `wait_for_notice`).

A node agent does the same for the ranks of a node, by the same parts: `NodeMonitors`, `StoreThreads`,
`RankLossNotifier`, `PortHolder`. What a job without a launcher needs in the place of a coordinator, the members of a
call and the beats of their nodes, is the client's.

Whatever waits in a store has a thread of `StoreThreads` with a connection of its own: `ft_rounds` (serves the stores of
rounds), `ft_departureN` (reports a lost rank), `ft_all_ended`. Such a thread touches nothing of the agent but an
`EventQueue` and the servers of its own call.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ft_launcher.agent.in_process.rank_loss import RankLossNotifier
from ft_launcher.agent.in_process.recovery_steps import LossNotified, NotifyLoss
from ft_launcher.agent.in_process.store_threads import EventQueue, Keys, StoreThreads
from ft_launcher.node.monitors.single_monitor import SingleMonitor
from ft_launcher.node.ranks.runtime import Runtime
from rank_monitor.contract.agent_order import AgentOrder
from rank_monitor.contract.processes.spawn import Template
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.restart_phase import RestartPhase
from rank_monitor.contract.rounds.round_stores import serve_rounds
from rank_monitor.contract.settings.config import MonitorSettings

_NO_ANSWER = "the store of this call does not answer as it should"
"""How a line of the log begins where a thread has ended by an error of the store."""


class RankConnection(Protocol):
    """What the rank sends to its agent about its calls."""

    def descriptors(self) -> set[int]:
        """Readable when `poll` has something to do."""

    def poll(self) -> None:
        """Handles what the rank has sent. Does not block."""


class StandaloneCall:
    """One call of the rank: what runs in the call's store. Made by the client when the rank has sent the call.

    All methods are called on the main thread, except `report_loss`: the client's watch of the nodes calls it in its own
    thread. Rounds and losses have `StoreThreads` of their own, since a server of rounds may wait longer for its
    connection than a report of a loss.

    Args:
        prefix: of the call's keys.
        connect: returns a new connection to the store; its argument says for how many seconds it may wait.
        connect_s: for how long a report of a lost rank waits for the connection.
        limit_s: how long the other ranks may take to take note of a lost one.
        say: called with a line for the log.
    """

    def __init__(
        self, prefix: str, connect: Callable[[float], Any], connect_s: float, limit_s: float, say: Callable[[str], None]
    ) -> None:
        self._prefix, self._limit_s, self._say = prefix, limit_s, say
        self._notice_s = connect_s + limit_s
        self._round_threads = StoreThreads(partial(connect, float("inf")))
        self._loss_threads = StoreThreads(partial(connect, connect_s))
        # Processes that a rank without a launcher leaves are its user's, and are not ended.
        self._loss_notifier = RankLossNotifier(self._loss_threads, stop_s=None)
        self._servers: dict[int, object] = {}

    def descriptors(self) -> set[int]:
        """Readable when `poll` has something to do."""
        return {self._loss_notifier.notified.fileno()}

    def poll(self) -> None:
        """Logs which reports of losses have ended. Does not block."""
        for loss in self._loss_notifier.notified.drain():
            self._note(loss)

    def serve_rounds(self, host: str) -> None:
        """Serves a store for each round under the address `host`, in a thread, until the call is done. Returns at
        once."""
        from ft_launcher.job.rendezvous.cycle_store import PortHolder

        ports = PortHolder(host, None, None)

        def serve(keys: Keys) -> None:
            serve_rounds(keys, ports.serve_round, host, self._servers)

        self._round_threads.start("ft_rounds", self._prefix, serve, self._note_problem)

    def report_loss(self, member: int, interruption: str) -> None:
        """Reports to the other ranks that a member is gone, in a thread. Returns at once."""
        order = NotifyLoss(member, member, self._prefix, self._limit_s, joins=False)
        self._loss_notifier.notify(order, member, interruption)

    def wait_for_notice(self, wait_for_all: Callable[[Keys], None]) -> None:
        """Blocks until a report of a loss has ended, or `wait_for_all` has: it waits until all members have ended.

        An error that ends `wait_for_all` says nothing about the others, which may wait for the report. The report then
        has the time that it may take to connect and to be taken note of. It can take longer only where it never ends:
        its connection was made, and the store's host has stopped since.
        """
        ended: EventQueue[str] = EventQueue()
        self._loss_threads.start("ft_all_ended", self._prefix, wait_for_all, ended.put)
        readable({*self.descriptors(), ended.fileno()}, None)
        for problem in ended.drain():
            self._note_problem(problem)
            if problem:
                readable(self.descriptors(), self._notice_s)
        self.poll()
        ended.close()

    def end(self) -> None:
        """Called when the next call begins. No thread is ended: other ranks may still be in this call."""
        self._loss_notifier.notified.close()

    def _note(self, loss: LossNotified) -> None:
        """Logs how the report of a loss has ended."""
        if loss.problem:
            self._note_problem(loss.problem)
        else:
            self._say(f"the others know that rank {loss.local_rank} is gone")

    def _note_problem(self, problem: str) -> None:
        """Logs the error that ended a thread; empty: there was none. Nothing else follows: the ranks have limits of
        their own."""
        if problem:
            self._say(f"{_NO_ANSWER}: {problem}")


class StandaloneAgent:
    """Watches one rank until it ends.

    Args:
        order: the rank, and where the agent's processes are.
        template: forks the monitor; it has the tag and the folder of `order`.
        say: called with a line for the log.

    Attributes:
        call: the present one; None before the first.
        served: the ports at which this process serves the store of a call.
    """

    def __init__(self, order: AgentOrder, template: Template, say: Callable[[str], None]) -> None:
        self.call: StandaloneCall | None = None
        self.served: dict[int, object] = {}
        self._order, self._say = order, say
        self._runtime = Runtime(order.tag, Path(order.folder), template)
        self._monitor: SingleMonitor | None = None

    def serve(self, host: str, listener: socket.socket) -> None:
        """Serves the store of calls at a listening socket, for clients that know this host as `host`."""
        from ft_launcher.job.rendezvous.cycle_store import PortHolder

        port = listener.getsockname()[1]
        self.served[port] = PortHolder(host, None, None).serve_at(listener)
        self._say(f"the store is served at port {port}")

    def begin(self, call: StandaloneCall) -> None:
        """Begins with the next call of the rank: the earlier call ends, and no phase of the new one is known yet."""
        if self.call is not None:
            self.call.end()
        if self._monitor is not None:
            self._monitor.phase = RestartPhase.NONE
        self.call = call

    def watch(self, connection: RankConnection) -> tuple[RestartPhase, str]:
        """Starts the monitor, and watches the rank until its process ends. Blocks.

        Args:
            connection: polled for the calls of the rank.

        Returns:
            The last phase that the rank's wrapper reported, and why the monitor condemned the rank; empty: it did not.
        """
        order, listener = self._order, socket.socket(fileno=self._order.listener)
        monitor = SingleMonitor(self._runtime, listener, order.local_rank, MonitorSettings(), self._say)
        self._monitor = monitor
        try:
            monitor.begin(order.member, order.rank_pid, order.started_ns, order.reconnect)
            while not readable([order.rank], 0.0):
                awaited = {order.rank} | connection.descriptors()
                if self.call is not None:
                    awaited |= self.call.descriptors()
                monitor.wait(awaited)
                connection.poll()
                monitor.handle()
                if self.call is not None:
                    self.call.poll()
            monitor.receive_last_messages()
            connection.poll()
        finally:
            monitor.close()
        return monitor.phase, monitor.condemned
