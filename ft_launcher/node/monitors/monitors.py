"""The monitors of a node: one per local rank for the whole job, notified of each cycle, replaced when lost.

`agent/ranks.py` makes `NodeMonitors` once for a job, before the first rank starts; `single_monitor.py` makes one for a
rank without a launcher. In each cycle:

1. `begin_rank` tells each monitor its new rank: a monitor outlives the ranks that it watches.
2. `handle`, at each wake-up of the cycle loop, receives messages, replaces lost monitors, and returns what the launcher
   must act on or record. The rest is kept in a `RankReport` for each rank.
3. `snapshots`, when a rank has failed or hangs, asks where the ranks are, and waits for the answers.
4. `end_cycle`, when a stop has sent its first signal: a rank that is being ended must not be judged.

This object owns the listening sockets that the ranks connect to, and not the monitors. So a rank can connect at any
moment, also while its monitor is being replaced: the connection waits in the socket's queue.

A monitor is lost when it has died, or when it has been stopped for a second while its rank runs. The new one is sent
what the old one judged by (`_Slot.judges_by`, the last time ledger), and the rank's client connects again.

All methods are called on the agent's thread. Only `snapshots`, `close` and the start of a monitor block, each within a
limit. Nothing here decides about ranks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ft_launcher.node.monitors.rank_report import RankReport, Replaced, has_left_its_wait
from ft_launcher.node.ranks.runtime import Runtime
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.processes.proc import is_stopped
from rank_monitor.contract.processes.spawn import Monitor
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire import channel, codec
from rank_monitor.contract.wire.codec import Received
from rank_monitor.contract.wire.complaints import Complaints
from rank_monitor.contract.wire.launcher_messages import (
    Bye,
    Connected,
    CycleStart,
    Fenced,
    HangOverdue,
    LogOverdue,
    LogStep,
    Snapshot,
    SnapshotRequest,
    StandsStill,
    StopJudging,
    Suspected,
    Times,
    TimesRequest,
)
from rank_monitor.contract.wire.messages import (
    FROM_RANK_TO_LAUNCHER,
    LimitsSet,
    Message,
    RankException,
    RestartReport,
    ResultInDoubt,
)

logger = logging.getLogger(__name__)

STOPPED_GRACE_S = 1.0
"""Seconds: a monitor that is stopped and continued soon, with its rank or by a debugger, is not replaced."""
_SNAPSHOT_WAIT_S, _STACKS_WAIT_S = 0.2, 1.0
"""Seconds. A restart is delayed by this at most when a monitor does not answer; a rank needs longer for its stacks."""
_STANDSTILL_SHARE = 4
"""`stood_still` counts for a quarter of `hang_timeout` after the check for hangs that noted it: the next check is due
after an eighth, and would have noted it again."""
_DECISION_S = 5.0
"""Seconds for which `stood_still` counts beyond that quarter, from the check to the end of the cycle: all nodes answer
first, and the end is written to the job's store."""


@dataclass
class _Slot:
    """The state of one local rank.

    Attributes:
        listener: where the rank connects to its monitor. It stays open when the monitor is replaced.
        monitor: the present monitor.
        start: the process that the monitor judges; None: between two cycles, when it judges nothing.
        attached: whether the rank's client has its watch on, as the monitor reported last.
        judges_by: the last message of each kind by which a monitor judges. A monitor that takes the place of this one
            needs them.
        stopped_since: when the monitor was stopped (monotonic seconds); None: it runs.
        report: what the monitor reported about the present process of the rank, also after the end of the cycle.
    """

    listener: socket.socket
    monitor: Monitor
    start: CycleStart | None = None
    attached: bool = False
    judges_by: dict[type[Message], Message] = field(default_factory=dict)
    stopped_since: float | None = None
    report: RankReport = field(default_factory=RankReport)


class NodeMonitors:
    """All monitors of this node.

    Args:
        runtime: the node's runtime folder and template.
        settings: limits for every rank.
        nprocs: ranks of this node.
        lease: descriptor of a timer; when it runs out the monitors end the ranks, whatever this process does.
        listeners: where the ranks connect, if these sockets exist already; None: they are made here.
        first_number: the first monitor's, by which logs and `ps` name it.

    Raises:
        OSError: no monitor can be started, or a socket cannot be made.
    """

    def __init__(
        self,
        runtime: Runtime,
        settings: MonitorSettings,
        nprocs: int,
        lease: int | None = None,
        listeners: Sequence[socket.socket] | None = None,
        first_number: int = 0,
    ) -> None:
        self._runtime = runtime
        self._settings = settings
        self._lease = lease
        self._first_number = first_number
        self._sequence = 0
        self._reading_token = 0
        self._slots: list[_Slot] = []
        self._not_passed_on: list[tuple[int, Message | Replaced]] = []
        self._complaints = Complaints(logger.warning)
        if listeners is None:
            listeners = [channel.listen(self.socket_path(local_rank)) for local_rank in range(nprocs)]
        for local_rank, listener in enumerate(listeners):
            self._slots.append(_Slot(listener, self._fork(listener, local_rank)))

    def _fork(self, listener: socket.socket, local_rank: int) -> Monitor:
        """Starts a monitor for a local rank. Blocks for 5 s at most, as `Template.fork_monitor`."""
        number = self._first_number + local_rank
        return self._runtime.template.fork_monitor(listener, self._settings, number, self._lease)

    def socket_path(self, local_rank: int) -> Path:
        """Returns the path of the socket that a rank connects to. The rank has it in its environment."""
        # Short names: a socket's address has 108 bytes at most.
        return self._runtime.folder / f"m{local_rank}"

    def stack_file(self, local_rank: int) -> Path:
        """Returns the file that a rank writes its stacks to when its monitor asks for them."""
        return self._runtime.folder / f"stacks{local_rank}"

    def recorder_socket(self, local_rank: int) -> str:
        """Returns the path of the socket on which a rank gives torch's flight recorder; empty where the recorder is not
        asked for (`--ft-flight-recorder off`)."""
        if self._settings.flight_recorder != "off":
            return str(self._runtime.folder / f"f{local_rank}")
        return ""

    @property
    def local_ranks(self) -> range:
        """The local ranks of this node."""
        return range(len(self._slots))

    def pid(self, local_rank: int) -> int:
        """Returns the pid of a rank's monitor."""
        return self._slots[local_rank].monitor.pid

    def pids(self) -> set[int]:
        """Returns the pids of the template, its sweeper and the monitors: a stop of the ranks must spare these."""
        template = self._runtime.template
        return {slot.monitor.pid for slot in self._slots} | {pid for pid in (template.pid, template.sweeper_pid) if pid}

    def descriptors(self) -> set[int]:
        """Returns descriptors of which one is readable when `handle` has something to do: a message, the end of a
        monitor, or a change that the template reports."""
        watched = set()
        for slot in self._slots:
            watched |= {slot.monitor.channel.fileno(), slot.monitor.pidfd}
        if self._runtime.template.alive:
            watched.add(self._runtime.template.fileno())
        return {descriptor for descriptor in watched if descriptor >= 0}

    def next_check(self) -> float | None:
        """Returns when `handle` should be called even if nothing is readable (monotonic seconds); None: no need.

        Not None only while a monitor is stopped, which is replaced when its grace is over.
        """
        since = [slot.stopped_since for slot in self._slots if slot.stopped_since is not None]
        if since:
            return min(since) + STOPPED_GRACE_S
        return None

    def begin_rank(
        self, cycle: int, local_rank: int, rank: int, pid: int, started_ns: int, reconnect: bool = False
    ) -> None:
        """Notifies a monitor of its new rank, at the start of a cycle or when a rank was started again.

        Called right after the process was started. What the rank's client sends before is kept by its socket.

        Args:
            cycle: its number, which the monitor's messages carry: messages about another cycle are told apart by it.
            local_rank: of the rank.
            rank: its global rank, for logs.
            pid: of its process.
            started_ns: when the process was started (monotonic nanoseconds). Limits for the start count from here.
            reconnect: the rank ran before this process did, and connects once more.
        """
        slot = self._slots[local_rank]
        slot.attached, slot.judges_by = False, {}
        with contextlib.suppress(OSError):
            # The stacks of an earlier cycle were copied to the folder of that cycle.
            os.truncate(self.stack_file(local_rank), 0)
        stack_file, recorder_socket = str(self.stack_file(local_rank)), self.recorder_socket(local_rank)
        slot.start = CycleStart(
            cycle, rank, pid, started_ns, stack_file, reconnect=reconnect, recorder_socket=recorder_socket
        )
        slot.report = RankReport(slot.start)
        self._send(slot, slot.start)

    def end_cycle(self) -> None:
        """Notifies the monitors that the cycle is over: they judge nothing until the next one.

        Called when a stop has sent its first signal, and before ranks save after a preemption: ranks that end or save
        make no progress.
        """
        for slot in self._slots:
            slot.start = None
            self._send(slot, StopJudging())

    def printed(self, local_rank: int, message: LogStep | LogOverdue) -> None:
        """Passes on to a monitor that its rank printed a step, or printed none for too long (`--ft-watch-log`).

        The launcher reads what ranks print; the monitor counts the steps as progress, and ends a rank that is overdue.
        """
        slot = self._slots[local_rank]
        if slot.start is None:
            return
        slot.judges_by[type(message)] = message
        if isinstance(message, LogStep):
            slot.judges_by.pop(LogOverdue, None)
        self._send(slot, message)

    def end_hang(self, local_rank: int, message: HangOverdue) -> None:
        """Has a monitor end its rank for a hang, with a verdict, as for any other limit. Called by `hang_watch.py`.

        Keeps where all ranks were at the last `snapshots`, by which the launcher has decided that the job hangs. A
        later snapshot could show ranks that have failed because this one is gone.
        """
        for seen in self._slots:
            seen.report.at_decision = seen.report.snapshot
        slot = self._slots[local_rank]
        if slot.start is not None:
            self._send(slot, message)

    def note_standstill(self, local_rank: int) -> None:
        """Keeps where a rank was at the last `snapshots`. Called by `hang_watch.py` for a rank that stands still:
        another node may be about to end the rank that holds this one up.

        That node may have ended its rank already, and gives it time to end. Then the wait of this rank has failed, and
        the rank may stand still somewhere else by now, for instance in a handler of the error. Where it waited is kept.
        """
        report, before = self.report(local_rank), self.stood_still(local_rank)
        if before is not None and report.snapshot is not None and has_left_its_wait(before, report.snapshot):
            return
        report.stood_still, report.stood_still_at = report.snapshot, time.monotonic()

    def stood_still(self, local_rank: int) -> Snapshot | None:
        """Returns where a rank stood still at the last checks for hangs; None: it did not.

        The time from such a check to the end of the cycle is bounded (`_STANDSTILL_SHARE`, `_DECISION_S`). If more time
        has passed, the rank has gone on, and its failure is no consequence of the hang.
        """
        report, limit_s = self.report(local_rank), self._settings.hang_timeout
        if limit_s is None or report.stood_still_at is None:
            return None
        counts_s = limit_s / _STANDSTILL_SHARE + self._settings.termination_grace_time + _DECISION_S
        if time.monotonic() - report.stood_still_at > counts_s:
            return None
        return report.stood_still

    def fail(self, local_rank: int, reason: RankException) -> None:
        """Notes why the launcher takes a rank for failed, such as a loss that is not a number in what it printed.

        An exception that the rank reported itself before stays the reason.
        """
        self._slots[local_rank].report.note_exception(reason, time.monotonic())

    def report(self, local_rank: int) -> RankReport:
        """Returns what the rank's monitor reported in this cycle; between two cycles, in the last one."""
        return self._slots[local_rank].report

    def suspect_results(self) -> dict[int, ResultInDoubt]:
        """Returns the unexpected results that ranks reported in this cycle, by local rank (docs/rerun.md)."""
        results = {rank: slot.report.suspect_result for rank, slot in enumerate(self._slots)}
        return {rank: result for rank, result in results.items() if result is not None}

    def handle(self) -> list[tuple[int, Message | Replaced]]:
        """Receives all messages and replaces lost monitors. Called at each wake-up of the cycle loop.

        Messages come first: what a monitor sent before its own death is still in its channel, and its verdict counts.

        Returns:
            Pairs of local rank and message; those of one rank are in the order of arrival. Messages that `snapshots`
            received since the last call are among them.
        """
        events, self._not_passed_on = self._not_passed_on, []
        for local_rank, slot in enumerate(self._slots):
            for received in self._drain(slot):
                message = self._note(slot, received.message, received.sent_ns)
                if message is not None:
                    events.append((local_rank, message))
        self._note_changes()
        for local_rank, slot in enumerate(self._slots):
            reason = self._why_lost(slot)
            if reason:
                self._replace(local_rank, slot)
                events.append((local_rank, Replaced(reason)))
        return events

    def snapshots(
        self,
        meanwhile: Callable[[], object] = lambda: None,
        stacks: bool = False,
        before_stop: bool = False,
        of: Collection[int] | None = None,
    ) -> None:
        """Asks monitors where their ranks are, and waits for the answers, which `report` then has.

        Blocks for 0.2 s at most, with stacks for 1 s, and not for a monitor that has died. The answer of a monitor
        comes after all that its rank sent before, so this also makes sure that nothing a dead rank sent is missing.

        Args:
            meanwhile: called while they answer: searching /proc for processes, which takes time as well.
            stacks: have the ranks write their stacks too.
            before_stop: the ranks are stopped after that. Those that do not answer then get the signal for their stacks
                in any case, of which a rank that executes Python may die.
            of: the local ranks whose monitors are asked; None: all.
        """
        self._sequence += 1
        token = self._sequence
        if of is None:
            of = self.local_ranks
        asked = [self._slots[local_rank] for local_rank in of]
        # Between cycles a monitor has no rank to ask about.
        waiting = {slot.monitor.channel.fileno(): slot for slot in asked if slot.start is not None}
        for slot in waiting.values():
            self._send(slot, SnapshotRequest(token, stacks, before_stop=before_stop))
        meanwhile()
        if stacks:
            deadline = time.monotonic() + _STACKS_WAIT_S
        else:
            deadline = time.monotonic() + _SNAPSHOT_WAIT_S
        while waiting:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            for descriptor in readable(waiting, left_s):
                slot = waiting[descriptor]
                for received in self._drain(slot):
                    event = self._note(slot, received.message, received.sent_ns)
                    if event is not None:
                        self._not_passed_on.append((self._slots.index(slot), event))
                snapshot = slot.report.snapshot
                if (snapshot and snapshot.token == token) or readable([slot.monitor.pidfd], 0.0):
                    waiting.pop(descriptor)

    def ask_times(self) -> None:
        """Asks every monitor for the time ledger of its rank. Does not block: `report` has the answer later."""
        for slot in self._slots:
            if slot.start is not None:
                self._send(slot, TimesRequest())

    def ask_readings(self, stacks: bool = False, collectives: bool = False) -> int:
        """Asks every monitor where its rank is, without waiting. Returns the token of the answers.

        `RankReport.reading` is the answer, once it has come. For the status page and for `culprit_exchange.py`.

        Args:
            stacks: have the ranks write their stacks too, and ask for their collectives.
            collectives: ask torch's flight recorder in each rank.
        """
        self._reading_token -= 1  # below 0: `snapshots` counts upwards
        for slot in self._slots:
            if slot.start is not None:
                self._send(slot, SnapshotRequest(self._reading_token, stacks, collectives))
        return self._reading_token

    def close(self) -> None:
        """Ends every monitor, and receives its last time ledger. Blocks for a second or two for each that is stuck.

        All are told first, so that they end at the same time. A monitor whose channel closes without this goodbye
        takes the launcher for killed, and kills the processes of the job.
        """
        for slot in self._slots:
            self._send(slot, Bye())
        for slot in self._slots:
            slot.monitor.close(last=partial(self._receive_last, slot))
            slot.listener.close()

    def _receive_last(self, slot: _Slot) -> None:
        """Receives what a monitor sent before it ended; only its time ledger still matters."""
        # A monitor that ends before it has read our second goodbye resets the channel: one receive fails (unix(7)).
        for received in [*self._drain(slot), *self._drain(slot)]:
            if isinstance(received.message, Times):
                self._note(slot, received.message, received.sent_ns)

    def _drain(self, slot: _Slot) -> Iterator[Received]:
        """Receives what is in the channel of a monitor, without blocking, and leaves out what is of no use.

        Left out: bytes that are no message (logged once in a while), and messages of the last cycle's ranks.
        """
        while True:
            try:
                received = channel.receive(slot.monitor.channel)
            except OSError:
                return
            if received is None or not received[0]:
                return
            try:
                decoded = codec.decode(received[0])
            except ProtocolError as error:
                self._complaints.about("message", f"a monitor sent what is not a message: {error}")
                continue
            # A message from before the start of this process of the rank is about its predecessor.
            is_of_last_cycle = slot.start is not None and decoded.sent_ns < slot.start.started_ns
            if not (is_of_last_cycle and isinstance(decoded.message, FROM_RANK_TO_LAUNCHER)):
                yield decoded

    def _note(self, slot: _Slot, message: Message, sent_ns: int) -> Message | None:
        """Stores a message; returns it if the launcher must act on it or record it."""
        match message:
            case Connected():
                slot.attached = message.attached
            case LimitsSet() | RestartReport():
                slot.judges_by[type(message)] = message
            case Fenced() | Suspected() | StandsStill() if slot.start is None or message.cycle != slot.start.cycle:
                return None
        return slot.report.note(message, sent_ns, time.monotonic())

    def _note_changes(self) -> None:
        """Notes which monitors were stopped or continued. Their parent, the template, reports that, and nobody else
        can."""
        by_pid = {slot.monitor.pid: slot for slot in self._slots}
        for change in self._runtime.template.changes():
            slot = by_pid.get(change.pid)
            if slot is not None:
                if change.change == "stopped":
                    slot.stopped_since = time.monotonic()
                else:
                    slot.stopped_since = None

    def _why_lost(self, slot: _Slot) -> str:
        """Returns why the monitor must be replaced; empty: it is well, or is paused together with its rank."""
        if readable([slot.monitor.pidfd], 0.0):
            return "it died"
        if slot.stopped_since is None or time.monotonic() < slot.stopped_since + STOPPED_GRACE_S:
            return ""
        # Monitor and rank are both stopped, as by a debugger: a pause. After the limit of the stall warning a monitor
        # that runs is needed again, to report the stall.
        if slot.start is not None and is_stopped(slot.start.rank_pid):
            limit = self._settings.stall_warning or float("inf")
            if time.monotonic() < slot.stopped_since + limit:
                return ""
        if is_stopped(slot.monitor.pid):
            return "it was stopped"
        return ""

    def _replace(self, local_rank: int, slot: _Slot) -> None:
        """Kills what is left of a monitor, starts another, and tells it what the lost one knew of its rank.

        The rank goes on meanwhile; its client connects to the same socket again.
        """
        # A monitor that is stopped answers nothing, and one that died neither.
        slot.monitor.close(goodbye_s=0)
        slot.monitor = self._fork(slot.listener, local_rank)
        slot.stopped_since = None
        if slot.start is not None:
            start = replace(slot.start, reconnect=True, attached=slot.attached)
            if slot.report.times is not None:
                start = replace(start, times=slot.report.times.json())
            self._send(slot, start)
            # The new monitor judges by these messages at once, also where its rank is stuck and connects late.
            for message in slot.judges_by.values():
                self._send(slot, message)

    def _send(self, slot: _Slot, message: Message) -> None:
        """Sends a message to a monitor. Does not block. A monitor that is gone is skipped: `handle` replaces it."""
        self._sequence += 1
        with contextlib.suppress(OSError):
            channel.send(slot.monitor.channel, codec.encode(message, self._sequence, time.monotonic_ns()))
