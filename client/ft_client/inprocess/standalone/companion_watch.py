"""The main loop of a companion: it watches its rank, receives from its monitor, and writes to the store for the rank.

Operations of the store block, so they are done in threads with connections of their own. How the process is made is in
`companion_process.py`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import socket
import threading
from collections.abc import Callable
from typing import Any

from ft_client.inprocess.attribution import Interruption, InterruptionRecord
from ft_client.inprocess.standalone import store_host
from ft_client.inprocess.standalone.call_members import CallMembers
from ft_client.inprocess.standalone.node_beat import NodeBeat
from ft_client.inprocess.standalone.sidecar import Sidecar
from ft_client.inprocess.standalone.watched_call import FINISHED, OVER, MakeStore, WatchedCall
from rank_monitor.contract.iterations.iteration_stores import serve_iterations
from rank_monitor.contract.iterations.rank_departure import depart
from rank_monitor.contract.processes.wait import readable
from rank_monitor.contract.wire import channel
from rank_monitor.contract.wire.messages import WrapperState

_SPOKEN_FOR = (WrapperState.FINALIZED, WrapperState.LEFT, WrapperState.ABORTED)
_OWN = "companion"
# The rank sends its first call right after the start; without one the monitor starts all the same.
_FIRST_CALL_S = 1.0


class CompanionWatch:
    """Watches one rank until it has ended and its end was reported.

    Args:
        rank: its pidfd.
        connection: the connection to it.
        start_sidecar: has its monitor begin.
        make_store: of the user's own factory.
        say: writes a line into the log.
    """

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        start_sidecar: Callable[[], Sidecar],
        make_store: MakeStore | None,
        say: Callable[[str], None],
    ) -> None:
        self._rank, self._start_sidecar, self._make_store, self._say = rank, start_sidecar, make_store, say
        self._connection: socket.socket | None = connection
        self._sidecar: Sidecar | None = None
        self._call: WatchedCall | None = None
        self._is_over = False
        self._ending: threading.Thread | None = None
        self._servers: dict[int, Any] = {}
        self._iteration_servers: dict[int, object] = {}

    def run(self) -> None:
        """Runs until the rank has ended and its end was reported. Blocks."""
        readable({self._rank, *self._open_connection()}, _FIRST_CALL_S)
        self._hear_rank()  # a store that is to be served comes first: ranks wait for it
        sidecar = self._sidecar = self._start_sidecar()
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
            elif self._call.iterations_host:
                self._serve_on(self._call)

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
                self._begin(WatchedCall.from_json(data), listeners)

    def _begin(self, call: WatchedCall, listeners: list[socket.socket]) -> None:
        self._call, self._is_over = call, False
        if self._sidecar is not None:
            self._sidecar.state = ""
        for listener in listeners:
            self._servers[call.port] = store_host.serve(listener, call.host)
            self._say(f"the store is served at port {call.port}")
        if call.iterations_host:
            self._iteration_servers = {}  # those of the call before end here
            self._in_thread(functools.partial(self._serve_iterations, call, self._iteration_servers))
        NodeBeat(call.member, lambda: self._members_of(call), call.heartbeat_interval_s, self._say).start()
        if call.member == 0:
            store_host.NodeWatch(
                lambda: self._members_of(call),
                call.heartbeat_timeout_s,
                call.heartbeat_interval_s,
                lambda members: self._give_up(call, members),
                self._say,
            ).start()

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
        CallMembers(call.keys(store, _OWN), call.world_size).end(member)
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

    def _serve_iterations(self, call: WatchedCall, servers: dict[int, object]) -> None:
        keys = call.keys(call.connect(self._make_store))
        host = call.iterations_host
        serve_iterations(keys, functools.partial(store_host.serve_anywhere, host), host, servers)

    def _serve_on(self, call: WatchedCall) -> None:
        self._say("the stores of iterations are served until the others are through")
        with contextlib.suppress(RuntimeError):  # the store of the coordination ends with who hosts it
            self._members_of(call, call.heartbeat_timeout_s).wait_finished()

    def _members_of(self, call: WatchedCall, limit_s: float = math.inf) -> CallMembers:
        return CallMembers(call.keys(call.connect(self._make_store, limit_s), _OWN), call.world_size)

    def _in_thread(self, task: Callable[[], None], then: Callable[[], None] = lambda: None) -> threading.Thread:
        def run() -> None:
            try:
                task()
            except RuntimeError as lost:
                self._say(f"the store of this call does not answer as it should: {lost}")
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
