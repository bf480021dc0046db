"""The rank's side of its standalone agent, which watches a rank without a launcher, and reports its end to the others.

Starts the agent's process, sends it each call, and replaces it when it is lost. How it is made is in
`companion_process.py`, what it does in `rank_calls.py`.

It is a fork of the rank, as long as no CUDA context and no other Python thread exists here; else it is an interpreter
of its own, which cannot inherit a lock that another thread holds. (A store of the user's own factory can only be made
in a fork, so then it is one in any case.) Threads of C libraries that wait for work do not count: libraries with such
pools survive a fork. The process is made once; later calls use the same one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ft_client.inprocess.arguments import path_of
from ft_client.inprocess.exception import InternalError
from ft_client.inprocess.standalone import companion_process, store_host
from ft_client.inprocess.standalone.watched_call import FINISHED, OVER, MakeStore, WatchedCall
from ft_client.rank.monitoring import hidden_thread
from rank_monitor.contract import env
from rank_monitor.contract.agent_order import AgentOrder
from rank_monitor.contract.processes import runtime_folder
from rank_monitor.contract.processes.descriptor import moved_up
from rank_monitor.contract.processes.fork import fork
from rank_monitor.contract.processes.sweep import processes_of
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.wire import channel
from rank_monitor.contract.wire.json_record import write_record
from rank_monitor.contract.wire.own_file import open_own

logger = logging.getLogger(__name__)

# How long a rank that is done waits for the others, where its companion hosts their store.
_OTHERS_S = 5.0
# A companion that is lost as often has a cause that the next one meets, too.
_REPLACEMENTS = 3
# The monitor of a lost companion ends by itself when its channel closes; one that does not is stuck.
_SIDECARS_GO_S = 5.0
# Between two searches of /proc for that monitor, which the watch of the rank waits for.
_LOOK_S = 0.05
# For a new interpreter that imports from a slow file system.
_START_S = 60.0
_UNWATCHED = "this rank goes on, and nobody watches it"
_NO_STORE = "it hosted the store in which the ranks agree, so the call ends on all of them"
_START = "import sys; sys.path[:] = {path!r}; from ft_client.inprocess.standalone.companion_process import main; main()"

_kept: Companion | None = None


class Companion:
    """The companion of this process. Make it with `start`.

    Attributes:
        pid: its pid.
        socket: where the monitor of this rank listens.
        is_lost: it is gone, and no other took its place: nobody watches this rank.
        is_watching: it has a way to the store of the present call.
    """

    def __init__(self, member: int, local_rank: int, logfile: Path | None) -> None:
        self.pid, self.is_lost, self.is_watching = 0, False, True
        self._member, self._local_rank, self._logfile, self._owner = member, local_rank, logfile, os.getpid()
        self._tag = ""
        self._folder = runtime_folder.make()[0]
        self.socket = self._folder / "m0"
        self._pidfiles: set[Path] = set()
        self._connection: socket.socket
        self._call: WatchedCall
        self._make_store: MakeStore | None = None
        self._is_over = False
        self._lock = threading.Lock()
        self._all_over = threading.Event()
        self._served: set[int] = set()
        self._replacements = 0

    @classmethod
    def start(
        cls,
        call: WatchedCall,
        make_store: MakeStore | None = None,
        *,
        local_rank: int = 0,
        logfile: str | None = None,
        pidfile: str | None = None,
    ) -> Companion:
        """Starts the companion, or sends the new call to the present one. Does not wait for what it does then.

        Args:
            make_store: a new connection to the store, without the prefix; called in a fork. Not used where the call has
                a host. A later call is watched only when it brings an equal one: the process knows the first.
            local_rank: LOCAL_RANK at entry, for the log of the monitor.
            logfile, pidfile: as given to the wrapper; `{rank}` is the member.

        Raises:
            OSError: a file cannot be written, or the port is taken; the text names it.
            InternalError: the process cannot be started.
        """
        global _kept
        paths = [path_of(path, call.member) if path else None for path in (pidfile, logfile)]
        for path in filter(None, paths):
            os.close(open_own(path, os.O_WRONLY | os.O_APPEND, 0o666))
        companion = _kept
        if companion is not None and companion._owner != os.getpid():
            companion = None
        is_served = companion is not None and not companion.is_lost and call.port in companion._served
        listeners = []
        if call.hosts_store and not is_served:
            listeners = [store_host.listen(call.host, call.port)]
        try:
            if companion is None:
                companion = cls(call.member, local_rank, paths[1])
                companion._launch(make_store, _may_fork() or not call.host)
            elif companion.is_lost:
                companion._launch(make_store, not call.host, reconnect=True)
            companion._begin(call, make_store, listeners)
        finally:
            for listener in listeners:
                listener.close()
        companion._write_pid(paths[0])
        _kept = companion
        return companion

    @property
    def environment(self) -> dict[str, str]:
        """What `ft_client.rank.monitoring.process.start()` needs to know in this process, and in no other."""
        return {
            env.RANK_MONITOR_SOCKET: str(self.socket),
            env.STACK_FILE: str(self._folder / "stacks0"),
            env.STACK_SIGNAL: str(MonitorSettings().stack_signal),
        }

    def close(self, others_s: float = _OTHERS_S) -> None:
        """Ends the call for this rank: done, or the rank has departed. The companion stays for the next call.

        Args:
            others_s: where it hosts the store, how long to wait for the others to finish as well. They can use the
                store beyond that, as long as the companion lives.
        """
        with self._lock:
            self._is_over = True
            self._send(OVER)
        if self._call.hosts_store:
            self._all_over.wait(others_s)

    # Within.

    def _begin(self, call: WatchedCall, make_store: MakeStore | None, listeners: list[socket.socket]) -> None:
        self.is_watching = bool(call.host) or (self._make_store is not None and self._make_store == make_store)
        if not self.is_watching:
            logger.warning("the monitor process knows the store of the first call only: this call is not watched")
        with self._lock:
            self._call, self._is_over = call, False
            self._all_over.clear()
            self._send(write_record(call).encode(), listeners)
            self._served |= {call.port for _ in listeners}

    def _send(self, data: bytes, listeners: Sequence[socket.socket] = ()) -> None:
        with contextlib.suppress(OSError):
            channel.send(self._connection, data, tuple(listener.fileno() for listener in listeners))

    def _write_pid(self, path: Path | None) -> None:
        if path is not None:
            self._pidfiles.add(path)
        for file in self._pidfiles:
            whole = file.with_name(f".{file.name}.{os.getpid()}")  # nobody reads a part of it
            whole.unlink(missing_ok=True)
            with open(whole, "w", opener=lambda name, flags: open_own(name, flags, 0o666)) as written:
                written.write(f"{self.pid}\n")
            whole.replace(file)

    def _launch(self, make_store: MakeStore | None, forks: bool, reconnect: bool = False) -> None:
        """Makes the process, and a thread that waits for its end.

        Raises:
            InternalError: it cannot be started.
        """
        ours, theirs = channel.pair()
        order = self._prepare(theirs, reconnect)
        try:
            if forks:
                _fork(order, make_store)
            else:
                _execute(order)
            self.pid = int(companion_process.pid_file(order.folder).read_text())
        except (OSError, ValueError, subprocess.SubprocessError) as problem:
            ours.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise InternalError(f"the monitor process of rank {self._member} cannot be started: {problem}") from None
        finally:
            for descriptor in order.descriptors:
                os.close(descriptor)
        ours.setblocking(True)
        self._connection, self.is_lost, self._served = ours, False, set()
        self._make_store = None
        if forks:
            self._make_store = make_store
        hidden_thread.start(functools.partial(self._attend, ours))

    def _prepare(self, connection: socket.socket, reconnect: bool) -> AgentOrder:
        """The parameters of the process: a new folder at the same path, and descriptors with high numbers."""
        self._tag = secrets.token_hex(8)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(0o700)
        if self._logfile is None:
            log = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        else:
            log = open_own(self._logfile, os.O_WRONLY | os.O_APPEND, 0o666)
        opened = (os.pidfd_open(os.getpid()), connection.detach(), channel.listen(self.socket).detach(), log)
        rank, connection_end, listener, log = map(moved_up, opened)
        return AgentOrder(
            tag=self._tag,
            member=self._member,
            local_rank=self._local_rank,
            rank_pid=os.getpid(),
            started_ns=time.monotonic_ns(),
            reconnect=reconnect,
            folder=str(self._folder),
            rank=rank,
            connection=connection_end,
            listener=listener,
            log=log,
        )

    def _attend(self, connection: socket.socket) -> None:
        """Receives from the companion until it is gone."""
        with contextlib.suppress(OSError):
            while connection.recv(len(FINISHED)) == FINISHED:
                self._all_over.set()
        self._all_over.set()
        connection.close()
        self._replace()

    def _replace(self) -> None:
        """Replaces a lost companion, unless it hosted the store."""
        lost = f"the monitor process of rank {self._member} (process {self.pid}) is gone"
        if not self._call.host or self._served or self._replacements >= _REPLACEMENTS:
            if self._served:
                logger.warning("%s: %s", lost, _NO_STORE)
            else:
                logger.warning("%s: %s", lost, _UNWATCHED)
            self.is_lost = True
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        logger.warning("%s: another takes its place", lost)
        self._replacements += 1
        deadline = time.monotonic() + _SIDECARS_GO_S
        try:
            while processes_of(self._tag, key=env.SIDECAR_OF):  # they remove the folder, each by itself
                if time.monotonic() > deadline:
                    raise InternalError(f"the monitor of rank {self._member} does not end")
                time.sleep(_LOOK_S)
            self._launch(None, forks=False, reconnect=True)
        except (OSError, InternalError) as problem:
            self.is_lost = True
            logger.warning("%s: %s", problem, _UNWATCHED)
            return
        with self._lock:
            self._send(write_record(self._call).encode())
            if self._is_over:
                self._send(OVER)
        self._write_pid(None)


def _may_fork() -> bool:
    """Whether a child of this process can run Python without waiting for a thread that it does not have."""
    cuda = getattr(sys.modules.get("torch.cuda"), "is_initialized", lambda: False)
    return threading.active_count() == 1 and len(sys._current_frames()) == 1 and not cuda()


def _fork(order: AgentOrder, make_store: MakeStore | None) -> None:
    between = fork()
    if between == 0:
        companion_process.become(order, make_store)
    with contextlib.suppress(ChildProcessError):  # the script reaps every child by itself
        os.waitpid(between, 0)


def _execute(order: AgentOrder) -> None:
    subprocess.run(
        [sys.executable, "-c", _START.format(path=sys.path), write_record(order)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=order.log,
        pass_fds=order.descriptors,
        check=True,
        timeout=_START_S,
    )
