"""The monitor's process: one loop that receives messages, asks the detector, acts, and sleeps until the next deadline.

`template.py` makes a `MonitorServer` in each monitor and calls `run`, which returns when the launcher has ended the
monitor. The server acts and decides nothing about the rank: `hang_detector.py` turns messages and moments into
actions, and `_act` performs them.

    rank ---- RankSocket ----+
    agent --- AgentChannel --+--> Loop.wait --callbacks--> HangDetector --actions--> `_act`:
    pidfd of the rank -------+                                 signals to the rank (`rank_process.py`)
    timer of the lease ------+                                 verdicts to the agent
                                                               requests to the rank's in-process wrapper

A monitor must never stop the training that it protects. No message, whatever it holds, ends the loop: what cannot be
used is refused, logged once and counted.

Threads: none but the main thread. All callbacks run in it, inside `serve_once`, one after the other, so nothing here
needs a lock. What blocks the loop delays a verdict: the longest waits are those for stacks (0.75 s, `rank_process.py`)
and for the flight recorder (`_RECORDER_WAIT_S`).
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import time

from rank_monitor.agent_channel import AgentChannel
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.restart_phase import RestartPhase
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.settings.declaration import to_json
from rank_monitor.contract.wire.channel import Peer
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
    Ready,
    Snapshot,
    SnapshotRequest,
    StandsStill,
    StopJudging,
    Suspected,
    Times,
    TimesRequest,
    Verdict,
)
from rank_monitor.contract.wire.messages import (
    FIRST_PERIOD_S,
    FROM_RANK,
    FROM_RANK_TO_LAUNCHER,
    Attach,
    Detach,
    Hello,
    InterruptAsked,
    LimitsSet,
    LogTo,
    RestartReport,
    StacksAsked,
    Welcome,
)
from rank_monitor.flight_recorder import FlightRecorder
from rank_monitor.hang_detector import (
    Action,
    AskUsualGap,
    DumpStacks,
    HangDetector,
    Interrupt,
    Kill,
    Note,
    NotifyStandstill,
    SendSignal,
    SendVerdict,
)
from rank_monitor.limits import NS_PER_S
from rank_monitor.log import Log
from rank_monitor.loop import Loop
from rank_monitor.lost_launcher import MonitoredJob
from rank_monitor.rank_process import RankProcess
from rank_monitor.rank_socket import RankSocket

_RECENT_S = 0.5
"""Stacks and collectives that were asked for at most this long ago are used again. The launcher asks for them right
after a verdict, and the verdict has asked for them already."""
_RECORDER_WAIT_S = 0.3
"""How long an answer of the flight recorder is waited for, from the request on. An idle machine answers in 10 ms at
most; a busy one, where all ranks answer at once, takes longer. The launcher waits 1 s for stacks and collectives
together (`ft_launcher/node/monitors/monitors.py`)."""
_READ_EARLY_NS = 1_000_000
"""A rank that is left unread is read this much before its time: epoll waits in whole milliseconds, and the last part of
one would cost another wake-up."""


class MonitorServer:
    """The monitor of one local rank, for the whole job: a new rank process of each cycle gets the same monitor.

    Args:
        listener: the rank's listening socket. The agent owns it, so it outlives a monitor that is lost.
        agent: this end of the channel to the agent.
        settings: limits and how to act.
        local_rank: stands in the log lines until the first `CycleStart` names the global rank.
        job: what is killed when the agent was killed.
        log: the monitor's log; its level and name are set here.
        lease: descriptor of a kernel timer that the agent extends while the coordinator answers. Once it is readable,
            the ranks of this node must not run any longer. None: the job has one node, and no lease.
    """

    def __init__(
        self,
        listener: socket.socket,
        agent: socket.socket,
        settings: MonitorSettings,
        local_rank: int,
        job: MonitoredJob,
        log: Log,
        lease: int | None = None,
    ) -> None:
        self._settings, self._job, self._log = settings, job, log
        log.level, log.name = settings.log_level, f"RankMonitorServer:{local_rank}"
        self._detector = HangDetector(settings)
        self._loop = Loop()
        self._agent = AgentChannel(
            self._loop,
            agent,
            on_message=self._on_agent_message,
            on_close=self._on_agent_gone,
            on_refused=self._on_refused,
        )
        self._socket = RankSocket(
            self._loop,
            listener,
            on_heartbeat=self._on_heartbeat,
            on_message=self._on_rank_message,
            on_hello=self._on_hello,
            on_lost=self._on_lost,
            on_refused=self._on_refused,
            max_delay_ns=self._detector.max_delay_ns,
        )
        self._recorder = FlightRecorder(self._loop)
        self._lease = lease
        self._process: RankProcess | None = None
        """The process that is watched as the rank; None: between two cycles, or once it has ended."""
        self._connected_pid = 0
        """The last process that sent a hello in this cycle; 0: none did."""
        self._complaints = Complaints(self._log.warning)
        self._done = False
        """The agent has said goodbye, or is gone: `run` returns."""

    def run(self) -> None:
        """Serves until the agent sends `Bye`. If the agent's channel closes without `Bye`, the launcher was killed, and
        every process of its job on this machine is killed too. Blocks; called once."""
        self._agent.send(Ready(os.getpid()))
        try:
            while not self._done:
                self.serve_once()
        finally:
            self._unwatch_process()
            self._socket.drop()
            self._loop.close()

    def serve_once(self) -> None:
        """Judges if a deadline is due, then waits for the next event or deadline and handles it.

        Before anything is judged, all messages that wait are read: a rank must not be killed for a heartbeat that lies
        in the socket.
        """
        timeout_s = self._timeout_s()
        if timeout_s == 0:
            self._socket.drain()
            now_ns = time.monotonic_ns()
            due_ns = self._detector.next_wake()
            if due_ns is not None and due_ns <= now_ns:
                asks_resolver = False
                if self._process is not None and self._detector.needs_look_up(now_ns):
                    asks_resolver = self._process.asks_resolver()
                self._act(self._detector.on_tick(now_ns, asks_resolver))
            if self._process is not None:
                self._process.look()
            timeout_s = self._timeout_s()
        self._loop.wait(timeout_s)

    def _timeout_s(self) -> float | None:
        """Returns how long the loop may sleep, in seconds; 0: something is due now; None: until the next event."""
        unread_until_ns = self._socket.unread_until_ns
        moments = (self._detector.next_wake(), unread_until_ns, self._look_ns())
        known = [moment for moment in moments if moment is not None]
        if not known:
            return None
        now_ns = time.monotonic_ns()
        if unread_until_ns is not None and unread_until_ns < now_ns + _READ_EARLY_NS:
            return 0.0
        return max(0, min(known) - now_ns) / NS_PER_S

    def _look_ns(self) -> int | None:
        """Returns when to look whether the rank has answered the question for its stacks; None: there is none."""
        if self._process is None or self._process.look_at is None:
            return None
        return int(self._process.look_at * NS_PER_S)

    # The rank.

    def _on_heartbeat(self, sent_ns: int) -> None:
        """Called by the rank's socket for each heartbeat. Kept short: a training may send thousands in a second."""
        actions = self._detector.on_heartbeat(sent_ns, time.monotonic_ns())
        if actions:
            self._act(actions)

    def _on_rank_message(self, received: Received, data: bytes) -> None:
        """Called by the rank's socket for each message other than a heartbeat.

        The detector gets every message first. Then the messages of `FROM_RANK_TO_LAUNCHER` go on to the agent unchanged
        (`data`), and a change of the connection or of the watch is reported to the agent as `Connected`.

        Raises:
            ProtocolError: a rank may not send such a message, or its values are invalid. The socket then answers the
                rank with `Refused`.
        """
        message = received.message
        if isinstance(message, LogTo):
            self._copy_log_to(message.path)
            return
        if message.kind not in FROM_RANK:
            raise ProtocolError(f"{type(message).__name__} is not for a rank to send")
        watch = self._detector.watch
        before = watch.wrapper.report
        self._act(self._detector.on_message(received, time.monotonic_ns()))
        if isinstance(message, RestartReport) and (message.round, message.phase) != (before.round, before.phase):
            self._log.copy(f"round {message.round}: {message.phase}")
        if isinstance(message, FROM_RANK_TO_LAUNCHER):
            self._agent.forward(message, data)
        elif isinstance(message, (Hello, Attach, Detach)):
            if isinstance(message, Hello) and self._process is not None and self._process.awaits_stacks:
                # The question may have been lost with the connection before.
                self._ask_for_stacks()
            if self._process is not None:
                pid = self._process.pid
            else:
                pid = watch.client_pid
            self._agent.send(Connected(pid, watch.attached))
        # In a wrapped function the rank's watchdog stamps as often as the wrapper needs. The answer wakes it for that.
        enters_function = isinstance(message, RestartReport) and message.phase is RestartPhase.RUNNING
        short_of_stamps = isinstance(message, Hello) and self._needs_stamps_often
        if (isinstance(message, Attach) or enters_function or short_of_stamps) and watch.start is not None:
            self._socket.reply(Welcome(to_json(self._settings), watch.start.cycle))

    @property
    def _needs_stamps_often(self) -> bool:
        """Whether the settings ask for stamps more often than a rank sends them that does not know the settings.

        A rank learns the settings with `Welcome`, the answer to `Attach`. A program that never asks to be watched sends
        no `Attach`, so it gets `Welcome` after its hello where it must stamp more often.
        """
        return self._settings.stamp_period < FIRST_PERIOD_S

    def _on_hello(self, peer: Peer) -> None:
        """Called by the rank's socket with the sender of a hello. From now on that process is the rank.

        The process that the launcher started may be a shell or a tool like numactl, and the training a child of that
        process. So the peer of the connection (SO_PEERCRED) is watched in the place of the started process, as long as
        the started process has not connected itself.

        Raises:
            ProtocolError: another process has connected as the rank before, and still lives. Two processes of one rank
                would keep each other alive.
        """
        process = self._process
        if process is not None and process.pid == peer.pid:
            self._connected_pid = peer.pid
            return
        if process is not None and process.pid == self._connected_pid and not process.ended():
            raise ProtocolError(f"process {process.pid} is the rank, and lives")
        self._connected_pid = peer.pid
        self._watch_process(peer.pid)

    def _on_lost(self) -> None:
        """Called by the rank's socket when the rank's connection has closed. The process may live: see `reconnect`."""
        self._act(self._detector.on_lost(time.monotonic_ns()))

    def _watch_process(self, pid: int) -> None:
        """Watches a process as the rank, by its pidfd, and the node's lease for as long as there is a process to end.

        Leaves `_process` None where the process has ended already, or is of another pid namespace.
        """
        self._unwatch_process()
        try:
            self._process = RankProcess(pid)
        except OSError:
            return
        self._loop.watch(self._process.pidfd, self._on_rank_exit)
        if self._lease is not None:
            self._loop.watch(self._lease, self._on_lease_over)

    def _unwatch_process(self) -> None:
        """Watches no process any more, and closes what was open for it."""
        if self._lease is not None:  # a timer that has run out stays readable: the loop would spin
            self._loop.unwatch(self._lease)
        if self._process is not None:
            self._loop.unwatch(self._process.pidfd)
            self._process.close()
            self._process = None

    def _on_rank_exit(self) -> None:
        """Called by the loop when the rank's pidfd is readable: the process has ended.

        What the rank sent last is read before its end is noted: its exception may be among that. The agent then gets
        the final time ledger.
        """
        process = self._process
        if process is None or not process.ended():
            return  # an event of the descriptor that had this number a moment ago
        self._socket.drain()
        if self._process is not process:
            return  # a child of the process has connected as the rank while the socket was drained
        self._socket.drop()  # a child of the process may still hold the connection
        self._log.copy(f"process {process.pid} has ended")
        self._unwatch_process()
        self._act(self._detector.on_exit(time.monotonic_ns()))
        self._send_times()

    def _copy_log_to(self, path: str) -> None:
        """Starts the copy of the log that an in-process wrapper asks for (`monitor_process_logfile`, NVIDIA's name)."""
        try:
            self._log.copy_to(path)
        except (OSError, ValueError) as problem:
            self._on_refused(f"monitor_process_logfile: {problem}")
            return
        if self._process is not None:
            watched = self._process.pid
        else:
            watched = 0
        self._log.copy(f"watches process {watched}; this is process {os.getpid()}")

    # The agent.

    def _on_agent_message(self, received: Received) -> None:
        """Called by the agent's channel for each message.

        The rank's messages are read first wherever the agent's message asks for the state of the rank, or ends the
        cycle: what the rank sent before belongs into the answer.

        Raises:
            ProtocolError: an agent does not send such a message.
        """
        now_ns = time.monotonic_ns()
        match received.message:
            case CycleStart() as start:
                self._log.name = f"RankMonitorServer:{start.rank}"
                self._connected_pid = 0
                self._log.copy_to("")
                self._socket.begin(0 if start.reconnect else start.started_ns)
                self._recorder.reset()
                self._act(self._detector.on_message(received, now_ns))
                self._watch_process(start.rank_pid)
                if self._process is None:  # the rank has ended before its cycle was announced here
                    self._socket.drain()
                    self._act(self._detector.on_exit(now_ns))
                    self._send_times()
            case StopJudging():
                self._socket.drain()
                self._socket.end()
                self._act(self._detector.on_message(received, now_ns))
                self._send_times()
            case TimesRequest():
                self._socket.drain()
                self._send_times()
            case LimitsSet() | RestartReport() | LogStep() | LogOverdue() | HangOverdue():
                self._act(self._detector.on_message(received, now_ns))
            case SnapshotRequest() as request:
                self._socket.drain()
                snapshot = self._snapshot(request.token, time.monotonic_ns())
                if request.stacks or request.collectives:
                    snapshot = self._with_evidence(snapshot, request)
                self._agent.send(snapshot)
            case Bye():
                self._done = True
            case other:
                raise ProtocolError(f"{type(other).__name__} is not for an agent to send")

    def _snapshot(self, token: int, now_ns: int) -> Snapshot:
        """Returns what the rank's watch knows now, without stacks and collectives. `token`: of the request."""
        watch = self._detector.watch
        return Snapshot(
            token=token,
            connected=watch.connected,
            attached=watch.attached,
            iteration=watch.iteration,
            sections={name: (now_ns - since_ns) / NS_PER_S for name, since_ns in watch.sections.items()},
            last_sign_age_s=None if watch.last_sign_ns is None else (now_ns - watch.last_sign_ns) / NS_PER_S,
            detached=watch.detached,
            idle_s=watch.idle_s(now_ns),
            report_age_s=watch.report_age_s(now_ns),
            has_own_limit=watch.has_own_limit,
        )

    def _send_times(self) -> None:
        """Sends the time ledger of the rank: on request, at the end of a cycle, and at the end of the process."""
        watch = self._detector.watch
        if watch.start is not None:
            times = watch.ledger.times(time.monotonic_ns()).json()
            self._agent.send(Times(watch.start.cycle, watch.start.rank_pid, times))

    def _with_evidence(self, snapshot: Snapshot, request: SnapshotRequest) -> Snapshot:
        """Returns the snapshot with the rank's collectives (`groups`) and, where `request` has `stacks`, its frames.

        What was asked for in the last `_RECENT_S` is used again. Both requests go out before either answer is waited
        for, so the two waits overlap. Blocks for 0.75 s at most. Of a rank that has ended there are only the
        collectives of the last answer.
        """
        process, start = self._process, self._detector.watch.start
        if process is None or start is None:
            return dataclasses.replace(snapshot, groups=self._recorder.groups())
        since = time.monotonic() - _RECENT_S
        if not process.is_stopped():  # a stopped process answers nothing
            self._recorder.ask(start.recorder_socket, since)
        if request.stacks:
            if self._settings.dump_stacks and not process.has_stacks_since(since):
                process.ask_stacks(self._settings.stack_signal, start.stack_file, self._ask_for_stacks)
            frames = process.frames(request.before_stop)
            snapshot = dataclasses.replace(snapshot, frames=frames, process=process.facts())
        return dataclasses.replace(snapshot, groups=self._recorder.groups(_RECORDER_WAIT_S, since))

    def _on_agent_gone(self) -> None:
        """Called by the agent's channel when it has closed without `Bye`: the launcher was killed, and nobody else is
        left to end the processes of its job. Blocks for up to 10 s."""
        self._done = True
        self._job.end(self._log)

    def _on_lease_over(self) -> None:
        """Called by the loop when the node's lease has run out: other nodes may be about to form a group without this
        node, and two groups that train at once would both write checkpoints.

        The agent stands still, or is about to end the ranks itself. The agent is notified first, so that it knows why
        the ranks died. The rank is killed at once, then every process that carries the tag of the cycle.
        """
        assert self._lease is not None
        self._loop.unwatch(self._lease)
        start = self._detector.watch.start
        if start is None:
            return
        self._agent.send(Fenced(start.cycle, start.rank))
        self._signal(signal.SIGKILL)
        self._log.warning("This node was silent for too long, and others may go on without it: its ranks are killed.")
        self._job.end_cycle(start.cycle, self._log)

    # Acting.

    def _act(self, actions: list[Action]) -> None:
        """Performs the actions of the detector in their order.

        Log lines of verdicts come last, so that no signal waits for a write.

        One action is a question: `AskUsualGap`. The detector cannot ask the flight recorder itself. The answer goes
        back at once (`on_usual_gap`), and the further actions are performed within this call. They contain no other
        question, so the recursion ends.
        """
        lines = []
        is_ending = any(isinstance(action, SendSignal) for action in actions)
        for action in actions:
            match action:
                case DumpStacks():
                    self._dump_stacks()
                case SendVerdict(verdict):
                    self._agent.send(self._with_process(verdict, is_ending))
                    lines.append(verdict.line)
                case Interrupt(verdict):
                    self._socket.reply(InterruptAsked(verdict.limit, verdict.reason))
                    self._agent.send(self._with_process(verdict))
                    lines.append(f"{verdict.line} Asking for a restart in process.")
                case SendSignal(number):
                    self._signal(signal.SIGCONT)
                    self._signal(number)
                case Kill():
                    self._signal(signal.SIGKILL)
                    lines.append("The rank outlived the grace after the signal. Killed.")
                case AskUsualGap():
                    since = time.monotonic() - _RECENT_S
                    usual_gap_s = self._recorder.usual_gap_s(_RECORDER_WAIT_S, since)
                    self._act(self._detector.on_usual_gap(usual_gap_s, time.monotonic_ns()))
                case NotifyStandstill():
                    start = self._detector.watch.start
                    if start is not None:
                        self._agent.send(StandsStill(start.cycle, start.rank))
                case Note(text):
                    self._log.info(text)
        for line in lines:
            self._log.warning(line)

    def _dump_stacks(self) -> None:
        """Reports to the agent that a limit of the rank is about to pass, and asks the rank for its stacks and its
        collectives. Does not wait for the answers: the verdict, 0.1 s later, picks them up."""
        start = self._detector.watch.start
        if start is None:
            return
        is_wrapped = self._detector.watch.wrapper.is_there
        self._agent.send(Suspected(start.cycle, start.rank, is_wrapped))
        if self._process is not None:
            if not self._process.is_stopped():  # a stopped process answers nothing
                self._recorder.ask(start.recorder_socket, time.monotonic() - _RECENT_S)
            self._process.ask_stacks(self._settings.stack_signal, start.stack_file, self._ask_for_stacks)

    def _ask_for_stacks(self) -> bool:
        """Sends the rank the message that asks for its stacks. Returns whether it was sent."""
        return self._socket.reply(StacksAsked())

    def _with_process(self, verdict: Verdict, is_ending: bool = False) -> Verdict:
        """Returns the verdict with what only the acting side knows: pid, frames and the state in /proc.

        `is_ending`: the rank gets the signal that ends it right after this.
        """
        if self._process is None:
            return verdict
        frames = self._process.frames(is_ending)
        return dataclasses.replace(verdict, pid=self._process.pid, frames=frames, process=self._process.facts())

    def _signal(self, number: int) -> None:
        """Sends a signal to the rank, if there is a process; through its pidfd, so never to another one."""
        if self._process is not None:
            self._process.signal(number)

    def _on_refused(self, reason: str) -> None:
        """Logs a refusal once for each kind, and counts the others: a rank could fill the log otherwise.

        The kind is the reason up to its first colon, without digits: numbers and pids differ each time.
        """
        kind = "".join(letter for letter in reason.partition(":")[0] if not letter.isdigit())
        self._complaints.about(kind, f"Refused: {reason}")
