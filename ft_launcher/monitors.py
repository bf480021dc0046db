"""The monitors of a node: one per local rank for the whole job, told of each cycle, replaced when lost.

Owns the listening sockets, so that replacing a monitor refuses no connection. Says what the monitors found; decides
nothing about ranks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from ft_launcher.process_tree import is_stopped
from ft_launcher.runtime import Runtime
from rank_monitor.contract import channel, codec
from rank_monitor.contract.config import MonitorSettings
from rank_monitor.contract.errors import ProtocolError
from rank_monitor.contract.launcher_messages import (
    Bye,
    Connected,
    CycleEnd,
    CycleStart,
    Fenced,
    Snapshot,
    SnapshotRequest,
    Verdict,
)
from rank_monitor.contract.messages import (
    ControlRequest,
    GroupMade,
    Guard,
    InterruptedAgain,
    LastOutput,
    LimitsSet,
    Message,
    RankException,
    Restarter,
    ResultInDoubt,
    SectionTimes,
)
from rank_monitor.contract.spawn import Monitor
from rank_monitor.contract.wait import readable

logger = logging.getLogger(__name__)

STOPPED_GRACE_S = 1.0
STALL = "stall"
"""The limit that only warns; any other one that does not condemn asks for a restart in process."""
_SNAPSHOT_WAIT_S, _STACKS_WAIT_S = 0.2, 1.0
_OF_THE_RANK = (
    RankException,
    LastOutput,
    ControlRequest,
    LimitsSet,
    Guard,
    GroupMade,
    InterruptedAgain,
    Restarter,
    SectionTimes,
    ResultInDoubt,
)


@dataclass(frozen=True)
class Replaced:
    """A monitor was lost and another took its place."""

    local_rank: int
    why: str


News: TypeAlias = (
    Verdict
    | RankException
    | ControlRequest
    | LimitsSet
    | InterruptedAgain
    | Restarter
    | SectionTimes
    | ResultInDoubt
    | GroupMade
    | Fenced
    | Replaced
)


@dataclass
class Found:
    """What one rank's monitor told in this cycle, with the moment each came (monotonic seconds)."""

    verdict: Verdict | None = None
    verdict_at: float | None = None
    exception: RankException | None = None
    exception_at: float | None = None
    last_output: str = ""
    doubt: ResultInDoubt | None = None
    snapshot: Snapshot | None = None
    was_attached: bool = False


@dataclass
class _Seat:
    """A local rank's place: its listening socket, and the monitor that sits there now."""

    listener: socket.socket
    monitor: Monitor
    start: CycleStart | None = None
    attached: bool = False
    limits: LimitsSet | None = None
    guard: Guard | None = None
    stopped_since: float | None = None
    found: Found = field(default_factory=Found)


class NodeMonitors:
    """All monitors of this node.

    Args:
        runtime: the node's runtime folder and template.
        settings: limits for every rank.
        nprocs: ranks of this node.
        lease: a timer; when it runs out the monitors end the ranks, whatever this process does.
    """

    def __init__(self, runtime: Runtime, settings: MonitorSettings, nprocs: int, lease: int | None = None) -> None:
        self._runtime = runtime
        self._settings = settings
        self._lease = lease
        self._sequence = 0
        self._seats: list[_Seat] = []
        self._not_told: list[tuple[int, News]] = []
        for local_rank in range(nprocs):
            listener = channel.listen(self.socket_path(local_rank))
            self._seats.append(_Seat(listener, self._fork(listener, local_rank)))

    def _fork(self, listener: socket.socket, local_rank: int) -> Monitor:
        return self._runtime.template.fork_monitor(listener, self._settings, local_rank, self._lease)

    def socket_path(self, local_rank: int) -> Path:
        """Where a rank connects."""
        return self._runtime.folder / f"m{local_rank}"

    def stack_file(self, local_rank: int) -> Path:
        """Where a rank writes its stacks when asked."""
        return self._runtime.folder / f"stacks{local_rank}"

    @property
    def local_ranks(self) -> range:
        """The local ranks of this node."""
        return range(len(self._seats))

    def pid(self, local_rank: int) -> int:
        """Pid of a rank's monitor."""
        return self._seats[local_rank].monitor.pid

    def pids(self) -> set[int]:
        """Pids of the template, its sweeper and the monitors."""
        template = self._runtime.template
        return {seat.monitor.pid for seat in self._seats} | {pid for pid in (template.pid, template.sweeper_pid) if pid}

    def descriptors(self) -> set[int]:
        """Readable when something is to be handled."""
        found = set()
        for seat in self._seats:
            found |= {seat.monitor.channel.fileno(), seat.monitor.pidfd}
        if self._runtime.template.alive:
            found.add(self._runtime.template.fileno())
        return {descriptor for descriptor in found if descriptor >= 0}

    def next_check(self) -> float | None:
        """When `handle` should be called even if nothing is readable (monotonic seconds)."""
        since = [seat.stopped_since for seat in self._seats if seat.stopped_since is not None]
        return min(since) + STOPPED_GRACE_S if since else None

    def begin_rank(self, cycle: int, local_rank: int, rank: int, pid: int, started_ns: int) -> None:
        """Tells a monitor of its rank, at the start of a cycle or when that one was started again."""
        seat = self._seats[local_rank]
        seat.attached, seat.limits, seat.guard, seat.found = False, None, None, Found()
        with contextlib.suppress(OSError):
            os.truncate(self.stack_file(local_rank), 0)  # stacks of an earlier cycle are in that one's folder
        seat.start = CycleStart(cycle, rank, pid, started_ns, str(self.stack_file(local_rank)))
        self._send(seat, seat.start)

    def end_cycle(self) -> None:
        """Nothing is judged until the next cycle."""
        for seat in self._seats:
            seat.start = None
            self._send(seat, CycleEnd())

    def found(self, local_rank: int) -> Found:
        """What the rank's monitor told in this cycle."""
        return self._seats[local_rank].found

    def doubts(self) -> dict[int, ResultInDoubt]:
        """The results in doubt of this cycle, by local rank."""
        return {rank: seat.found.doubt for rank, seat in enumerate(self._seats) if seat.found.doubt is not None}

    def limits(self, local_rank: int) -> LimitsSet | None:
        """The limits the rank set in this cycle."""
        return self._seats[local_rank].limits

    def handle(self) -> list[tuple[int, News]]:
        """Takes everything the monitors said, replaces those that were lost; returns what matters, by local rank."""
        news, self._not_told = self._not_told, []
        for local_rank, seat in enumerate(self._seats):
            for message in self._drain(seat):
                if (heard := self._note(seat, message)) is not None:
                    news.append((local_rank, heard))
        self._note_changes()
        for local_rank, seat in enumerate(self._seats):
            if why := self._why_lost(seat):
                self._replace(local_rank, seat)
                news.append((local_rank, Replaced(local_rank, why)))
        return news

    def snapshots(self, meanwhile: Callable[[], object] = lambda: None, stacks: bool = False) -> None:
        """Asks every monitor where its rank is; waits a bounded time for the answers, kept in `found`.

        Args:
            meanwhile: called while they answer.
            stacks: have the ranks write their stacks too.
        """
        self._sequence += 1
        token = self._sequence
        waiting = {seat.monitor.channel.fileno(): seat for seat in self._seats if seat.start is not None}
        for seat in waiting.values():
            self._send(seat, SnapshotRequest(token, stacks))
        meanwhile()
        deadline = time.monotonic() + (_STACKS_WAIT_S if stacks else _SNAPSHOT_WAIT_S)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for descriptor in readable(waiting, left):
                seat = waiting[descriptor]
                for message in self._drain(seat):
                    if (news := self._note(seat, message)) is not None:
                        self._not_told.append((self._seats.index(seat), news))
                snapshot = seat.found.snapshot
                if (snapshot and snapshot.token == token) or readable([seat.monitor.pidfd]):
                    waiting.pop(descriptor)

    def close(self) -> None:
        """Ends every monitor, by an orderly goodbye."""
        for seat in self._seats:
            self._send(seat, Bye())
        for seat in self._seats:
            seat.monitor.close()
            seat.listener.close()

    def _drain(self, seat: _Seat) -> Iterator[Message]:
        while True:
            try:
                received = channel.receive(seat.monitor.channel)
            except OSError:
                return
            if received is None or not received[0]:
                return
            try:
                heard = codec.decode(received[0])
            except ProtocolError as error:
                logger.warning("a monitor sent what is no message: %s", error)
                continue
            of_now = seat.start is None or heard.sent_ns >= seat.start.started_ns
            if of_now or not isinstance(heard.message, _OF_THE_RANK):  # else a late word of the last cycle's rank
                yield heard.message

    def _note(self, seat: _Seat, message: Message) -> News | None:
        """Keeps what a monitor told; returns it if the launcher should hear of it."""
        now = time.monotonic()
        match message:
            case Connected():
                seat.attached = message.attached
                seat.found.was_attached |= message.attached
            case LimitsSet():
                seat.limits = message
                return message
            case Snapshot():
                seat.found.snapshot = message
            case Verdict():
                if seat.start is None or message.cycle != seat.start.cycle:
                    return None
                if message.condemned or (message.limit == STALL and seat.found.verdict is None):
                    seat.found.verdict, seat.found.verdict_at = message, now
                return message
            case RankException():
                if seat.found.exception is None:
                    seat.found.exception, seat.found.exception_at = message, now
                return message
            case LastOutput():
                seat.found.last_output = message.text
            case ResultInDoubt():
                seat.found.doubt = message
                return message
            case Guard():
                seat.guard = message
            case Fenced():
                return message if seat.start is not None and message.cycle == seat.start.cycle else None
            case ControlRequest() | InterruptedAgain() | Restarter() | SectionTimes() | GroupMade():
                return message
        return None

    def _note_changes(self) -> None:
        by_pid = {seat.monitor.pid: seat for seat in self._seats}
        for change in self._runtime.template.changes():
            seat = by_pid.get(change.pid)
            if seat is not None:
                seat.stopped_since = time.monotonic() if change.change == "stopped" else None

    def _why_lost(self, seat: _Seat) -> str:
        """Why the monitor must be replaced; empty while it is well, or paused together with its rank."""
        if readable([seat.monitor.pidfd]):
            return "it died"
        if seat.stopped_since is None or time.monotonic() < seat.stopped_since + STOPPED_GRACE_S:
            return ""
        if seat.start is not None and is_stopped(seat.start.rank_pid):
            limit = self._settings.stall_warning or float("inf")
            if time.monotonic() < seat.stopped_since + limit:
                return ""
        return "it was stopped" if is_stopped(seat.monitor.pid) else ""

    def _replace(self, local_rank: int, seat: _Seat) -> None:
        seat.monitor.close(goodbye_s=0)
        seat.monitor = self._fork(seat.listener, local_rank)
        seat.stopped_since = None
        if seat.start is not None:
            start = replace(seat.start, reconnect=True, attached=seat.attached)
            self._send(seat, start)
            for said in (seat.limits, seat.guard):
                if said is not None:
                    self._send(seat, said)

    def _send(self, seat: _Seat, message: Message) -> None:
        self._sequence += 1
        with contextlib.suppress(OSError):
            channel.send(seat.monitor.channel, codec.encode(message, self._sequence, time.monotonic_ns()))
