"""The process of a companion: how it is made of a fork of a rank, or a new interpreter, and what it does then.

`companion.py` starts it. A companion is independent of its rank: it has its own session, none of the rank's descriptors
and signal handlers, and never runs code of the rank again. It watches the rank, receives from its monitor, and writes
to the store for the rank. Operations of the store block, so they are done in threads with connections of their own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ft_client.inprocess.attribution import Interruption, InterruptionRecord
from ft_client.inprocess.standalone import store_host
from ft_client.inprocess.standalone.sidecar import Sidecar
from ft_client.inprocess.standalone.watched_call import (
    FINISHED,
    OVER,
    CallMembers,
    MakeStore,
    NodeWatch,
    WatchedCall,
    beat_for_node,
)
from ft_client.inprocess.wait_daemon import COMPANION
from rank_monitor.contract.processes import peer_names, proc, resolver
from rank_monitor.contract.processes.fork import fork
from rank_monitor.contract.processes.spawn import Template
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.restart_phase import GONE, RestartPhase
from rank_monitor.contract.rounds.round import depart
from rank_monitor.contract.rounds.round_stores import serve_rounds
from rank_monitor.contract.wire import channel
from rank_monitor.contract.wire.json_record import read_record
from rank_monitor.contract.wire.launcher_messages import CycleStart

_SPOKEN_FOR = GONE | {RestartPhase.DONE}
# The rank sends its first call right after the start; without one the monitor starts all the same.
_FIRST_CALL_S = 1.0
_IGNORED = {
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGPIPE, signal.SIGXFSZ),
}


@dataclass(frozen=True)
class CompanionOrder:
    """The parameters of a companion: its rank, the runtime folder, and open descriptors.

    `tag` marks the template and the monitor, and no rank, so that nothing is killed when the companion is lost. `rank`
    is the rank's pidfd, `connection` the one to it, `listener` where it connects to its monitor, `log` the
    log file, or the null device.
    """

    tag: str
    member: int
    local_rank: int
    rank_pid: int
    started_ns: int
    reconnect: bool
    folder: str
    rank: int
    connection: int
    listener: int
    log: int

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that the companion keeps."""
        return self.rank, self.connection, self.listener, self.log


def pid_file(folder: str) -> Path:
    """The file with the companion's pid; it is written when `become` has ended its caller."""
    return Path(folder, "pid")


def become(order: CompanionOrder, make_store: MakeStore | None = None) -> NoReturn:
    """Turns a new child process into the parent of a companion, and ends it.

    Args:
        make_store: of the user's own factory.
    """
    try:
        os.setsid()
        proc.name_this_process(COMPANION)  # the fork inherits it: who finds its pid finds it by its name
        pid = fork()
        if pid == 0:
            _live(order, make_store)
        pid_file(order.folder).write_text(str(pid))
    finally:
        os._exit(0)


def main() -> NoReturn:
    """Entry point of a companion in a new interpreter; the last argument is its `CompanionOrder` as JSON."""
    become(read_record(CompanionOrder, sys.argv[-1]))


def _live(order: CompanionOrder, make_store: MakeStore | None) -> NoReturn:
    code = 1
    try:
        resolver.bound_process()
        # No object of the rank may be finalized in this process.
        gc.disable()
        gc.freeze()
        _settle(order)
        gc.enable()
        CompanionWatch(order, make_store).run()
        code = 0
    except BaseException:  # the edge of the process: the stack below is the rank's
        with contextlib.suppress(OSError):
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _settle(order: CompanionOrder) -> None:
    faulthandler.cancel_dump_traceback_later()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # of the C library's own
            if number in _IGNORED:
                signal.signal(number, signal.SIG_IGN)
            else:
                signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    null = os.open(os.devnull, os.O_RDWR)
    for standard, of in enumerate((null, null, order.log)):
        os.dup2(of, standard)
    _close_all_but({0, 1, 2, *order.descriptors})
    sys.stdin, sys.stdout, sys.stderr = None, open(1, "w"), open(2, "w")  # noqa: SIM115


def _close_all_but(kept: set[int]) -> None:
    for descriptor in proc.own_descriptors():
        if descriptor not in kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)


class CompanionWatch:
    """Watches one rank until it has ended and its end was reported.

    Args:
        order: the parameters of the companion.
        make_store: of the user's own factory.
    """

    def __init__(self, order: CompanionOrder, make_store: MakeStore | None) -> None:
        self._order, self._rank, self._make_store = order, order.rank, make_store
        self._connection: socket.socket | None = socket.socket(fileno=order.connection)
        self._connection.setblocking(False)
        self._sidecar: Sidecar | None = None
        self._call: WatchedCall | None = None
        self._is_over = False
        self._ending: threading.Thread | None = None
        self._servers: dict[int, Any] = {}
        self._round_servers: dict[int, object] = {}

    def run(self) -> None:
        """Runs until the rank has ended and its end was reported. Blocks."""
        order, folder = self._order, Path(self._order.folder)
        self._say(f"watches process {order.rank_pid}; this is process {os.getpid()}")
        template = Template.start(order.tag, folder)
        import torch.distributed  # here: the template starts meanwhile, and threads do not begin with it

        peer_names.look_up_no_more(torch)
        readable({self._rank, *self._open_connection()}, _FIRST_CALL_S)
        self._hear_rank()  # a store that is to be served comes first: ranks wait for it
        start = CycleStart(
            0, order.member, order.rank_pid, order.started_ns, str(folder / "stacks"), reconnect=order.reconnect
        )
        listener = socket.socket(fileno=order.listener)
        sidecar = self._sidecar = Sidecar(template, folder, listener, order.local_rank, start, self._say)
        try:
            self._watch(sidecar)
            sidecar.receive_last_messages()
            self._hear_rank()
        finally:
            sidecar.close()
        self._say("the rank has ended")
        if sidecar.state in _SPOKEN_FOR:
            self._end_call()
        if self._call is not None:
            self._report_loss(self._call, sidecar.condemned)
            if self._call.port in self._servers:
                self._host_on(self._call)
            elif self._call.rounds_host:
                self._serve_on(self._call)
        self._say("ends")

    def _say(self, text: str) -> None:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} companion of rank {self._order.member}: {text}\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode())

    def _watch(self, sidecar: Sidecar) -> None:
        while not readable([self._rank], 0.0):
            connection = self._open_connection()
            ready = readable({self._rank} | connection | sidecar.descriptors(), None)
            if ready & connection:
                self._hear_rank()
            if ready - connection - {self._rank}:
                sidecar.handle()

    # The rank.

    def _open_connection(self) -> set[int]:
        if self._connection is None:
            return set()
        return {self._connection.fileno()}

    def _hear_rank(self) -> None:
        while self._connection is not None:
            taken = _receive(self._connection)
            if taken is None:
                return
            data, descriptors = taken
            listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
            if not data:
                self._connection.close()
                self._connection = None
            elif data == OVER:
                self._end_call()
            else:
                self._begin(read_record(WatchedCall, data), listeners)

    def _begin(self, call: WatchedCall, listeners: list[socket.socket]) -> None:
        self._call, self._is_over = call, False
        if self._sidecar is not None:
            self._sidecar.state = ""
        for listener in listeners:
            self._servers[call.port] = store_host.serve(listener)
            self._say(f"the store is served at port {call.port}")
        if call.rounds_host:
            self._round_servers = {}  # those of the call before end here
            self._in_thread(functools.partial(self._serve_rounds, call, self._round_servers))
        members_of = functools.partial(self._members_of, call)
        self._in_thread(
            lambda: beat_for_node(call.member, members_of, call.heartbeat_interval_s, self._say),
            failed="this companion does not beat for its node any more",
        )
        if call.member == 0:
            give_up = functools.partial(self._give_up, call)
            watch = NodeWatch(members_of, call.heartbeat_timeout_s, call.heartbeat_interval_s, give_up, self._say)
            self._in_thread(watch.run, failed="nodes are not watched any more")

    def _end_call(self) -> None:
        """Ends the call for this rank, which has reported that to the others itself."""
        call = self._call
        if call is None or self._is_over:
            return
        self._is_over = True
        self._ending = self._in_thread(lambda: self._report_end(call))

    def _report_end(self, call: WatchedCall) -> None:
        call_members = self._members_of(call)
        call_members.end(call.member)
        if call.hosts_store:
            call_members.wait_finished()
            if self._connection is not None:
                channel.send(self._connection, FINISHED)

    # The store.

    def _report_loss(self, call: WatchedCall, condemned: str) -> None:
        """Reports that the rank is gone. Blocks until the others have taken that into account, or have all ended."""
        if self._is_over:
            if self._ending is not None and not call.hosts_store:
                self._ending.join(call.heartbeat_timeout_s)
            return
        if condemned:
            why = Interruption.HARD_TIMEOUT
        else:
            why = Interruption.TERMINATED
        self._say(f"the rank did not leave by itself: {condemned or why.name}")
        known = threading.Event()
        self._in_thread(lambda: self._depart(call, call.member, why), known.set)
        self._in_thread(lambda: self._wait_until_all_ended(call, known))
        known.wait()

    def _depart(self, call: WatchedCall, member: int, why: Interruption) -> None:
        store = call.connect(self._make_store, call.heartbeat_timeout_s)
        call.members(store).end(member)
        depart(call.keys(store), member, InterruptionRecord(member, why).to_json(), call.barrier_timeout_s)
        self._say(f"the others know that rank {member} is gone")

    def _wait_until_all_ended(self, call: WatchedCall, ended: threading.Event) -> None:
        self._members_of(call, call.heartbeat_timeout_s).wait_finished()
        ended.set()

    def _give_up(self, call: WatchedCall, members: list[int]) -> None:
        """Reports members as lost, each in a thread: `depart` returns only when all lost members have been reported."""
        for member in members:
            self._in_thread(functools.partial(self._depart, call, member, Interruption.UNRESPONSIVE))

    def _host_on(self, call: WatchedCall) -> None:
        self._say("the store is served as long as the others need it")
        store_host.stay(call.port, self._members_of(call), call.heartbeat_interval_s, call.barrier_timeout_s)

    def _serve_rounds(self, call: WatchedCall, servers: dict[int, object]) -> None:
        keys = call.keys(call.connect(self._make_store))
        host = call.rounds_host
        serve_rounds(keys, functools.partial(store_host.serve_anywhere, host), host, servers)

    def _serve_on(self, call: WatchedCall) -> None:
        self._say("the stores of rounds are served until the others are through")
        with contextlib.suppress(RuntimeError):  # the store of the coordination ends with who hosts it
            self._members_of(call, call.heartbeat_timeout_s).wait_finished()

    def _members_of(self, call: WatchedCall, limit_s: float = math.inf) -> CallMembers:
        return call.members(call.connect(self._make_store, limit_s))

    def _in_thread(
        self,
        task: Callable[[], None],
        then: Callable[[], None] = lambda: None,
        failed: str = "the store of this call does not answer as it should",
    ) -> threading.Thread:
        def run() -> None:
            try:
                task()
            except RuntimeError as lost:
                self._say(f"{failed}: {lost}")
            finally:
                then()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


def _receive(connection: socket.socket) -> tuple[bytes, list[int]] | None:
    try:
        return channel.receive(connection, max_descriptors=1)
    except OSError:
        return b"", []
