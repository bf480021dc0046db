"""The rank's side of its standalone agent, which watches a rank without a launcher, and reports its end to the others.

The agent is a process beside the rank, one for the rank's whole life. This file runs in the rank:
`restart/coordination.py` calls `AgentHandle.start` at each call of a wrapped function, and `close` at its end.

1. The first `start` makes the agent's process, and sends it the call (`WatchedCall`). Where the rank is to host the
   call's store, it opens the socket itself, so that a port that is taken is an error here, and passes the socket on.
2. A later `start` sends the next call to the same process.
3. `close` sends that the call is over for this rank. Where the agent hosts the store, `close` waits a few seconds for
   the other ranks, since the store ends with the agent.
4. When the process is lost, another takes its place, which gets the present call again. At most three do. An agent that
   hosted the store has no successor: its store is lost, and the call ends on all ranks.

The agent's process is a fork of the rank, as long as no CUDA context and no other Python thread exists here. Else it is
an interpreter of its own, since a fork could inherit a lock that another thread holds. (A store of the user's own
factory can only be made in a fork, so then the agent is a fork in any case.) Threads of C libraries that wait for work
do not count: libraries with such pools survive a fork.

How the process is made is in `agent_process.py`, what it does in `rank_calls.py`.

Threads: the rank's main thread calls the methods without underscore. A hidden thread (`_receive_until_lost`), one for
each process of an agent, receives from the agent. When the agent is lost, a thread of `threading` replaces it
(`_replace`), since that logs, which a hidden thread must not do. `_lock` is held while a message is sent and the state
that the message announces is set, so that a successor gets the same call as its predecessor.
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
from ft_client.inprocess.standalone import agent_process, store_host
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

_OTHERS_S = 5.0
"""Seconds that a rank which is done waits for the others, where its agent hosts their store."""
_REPLACEMENTS = 3
"""How often an agent is replaced. One that is lost more often has a cause that the next one meets, too."""
_MONITOR_ENDS_S = 5.0
"""Seconds for the monitor of a lost agent to end. It ends by itself when its channel closes; one that does not is
stuck."""
_LOOK_S = 0.05
"""Seconds between two searches of /proc for that monitor. Nobody watches the rank meanwhile."""
_START_S = 60.0
"""Seconds for a new interpreter that imports from a slow file system."""
_UNWATCHED = "this rank goes on, and nobody watches it"
_NO_STORE = "it hosted the store in which the ranks agree, so the call ends on all of them"
_START = "import sys; sys.path[:] = {path!r}; from ft_client.inprocess.standalone.agent_process import main; main()"
"""What the interpreter of an agent runs. It finds modules where the rank does."""

_kept: AgentHandle | None = None
"""The agent of this process, or of the process that this one was forked from."""


class AgentHandle:
    """The standalone agent of this process, as its rank sees it. Make it with `start`.

    Args:
        member: the rank at the entry of the wrapped call.
        local_rank: LOCAL_RANK, for the log of the monitor.
        logfile: the agent's log; None: there is none.

    Attributes:
        pid: of the agent's process.
        socket: where the monitor of this rank listens.
        is_lost: the process is gone, and no other took its place: nobody watches this rank.
        is_watching: the agent has a way to the store of the present call, so that it can report the end of this rank.
    """

    def __init__(self, member: int, local_rank: int, logfile: Path | None) -> None:
        self.pid, self.is_lost, self.is_watching = 0, False, True
        self._member, self._local_rank, self._logfile, self._owner = member, local_rank, logfile, os.getpid()
        self._tag = ""
        self._folder = runtime_folder.make()[0]
        self.socket = self._folder / "m0"
        self._pidfiles: set[Path] = set()
        self._refused: set[Path] = set()
        """Those of which a warning has said that they cannot be written."""
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
    ) -> AgentHandle:
        """Starts the agent's process, or sends the new call to the present one. Called when a rank enters a call.

        Blocks until the process exists, and not for what it does then: the client connects to `socket` later.

        Args:
            call: the rank's call.
            make_store: returns a new connection to the store, without the prefix; called in a fork. Not used where the
                call has a host. A later call is watched only when it brings an equal `make_store`: the process knows
                the first one.
            local_rank: LOCAL_RANK at entry, for the log of the monitor.
            logfile: the agent's log, as given to the wrapper; `{rank}` is the member.
            pidfile: written with the agent's pid, and again when another takes its place; as `logfile`.

        Raises:
            OSError: a file cannot be written, or the port is taken; the text names it.
            InternalError: the process cannot be started.
        """
        global _kept
        paths = [path_of(path, call.member) if path else None for path in (pidfile, logfile)]
        for path in filter(None, paths):
            os.close(open_own(path, os.O_WRONLY | os.O_APPEND, 0o666))
        agent = _kept
        # A fork of a rank, such as a worker of multiprocessing, has a copy of its parent's agent, which is not its own.
        if agent is not None and agent._owner != os.getpid():
            agent = None
        is_served = agent is not None and not agent.is_lost and call.port in agent._served
        listeners = []
        if call.hosts_store and not is_served:
            listeners = [store_host.listen(call.host, call.port)]
        try:
            if agent is None:
                agent = cls(call.member, local_rank, paths[1])
                agent._launch(make_store, _may_fork() or not call.host)
            elif agent.is_lost:
                agent._launch(make_store, not call.host, reconnect=True)
            agent._begin(call, make_store, listeners)
        finally:
            for listener in listeners:
                listener.close()
        agent._write_pid(paths[0])
        _kept = agent
        return agent

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which `ft_client.rank.monitoring.process.start()` finds the monitor, as of a launcher.

        They are for this process alone: children of the rank must not connect to its monitor.
        """
        return {
            env.RANK_MONITOR_SOCKET: str(self.socket),
            env.STACK_FILE: str(self._folder / "stacks0"),
            env.STACK_SIGNAL: str(MonitorSettings().stack_signal),
        }

    def close(self, others_s: float = _OTHERS_S) -> None:
        """Ends the call for this rank: done, or the rank has departed. The agent stays for the next call.

        Args:
            others_s: where the agent hosts the store, for how many seconds to block at most until the others have
                finished as well. They can use the store beyond that, as long as the agent lives.
        """
        with self._lock:
            self._is_over = True
            self._send(OVER)
        if self._call.hosts_store:
            self._all_over.wait(others_s)

    # Within.

    def _begin(self, call: WatchedCall, make_store: MakeStore | None, listeners: list[socket.socket]) -> None:
        """Sends a call to the agent, and with it the sockets at which the agent is to serve the call's store."""
        self.is_watching = bool(call.host) or (self._make_store is not None and self._make_store == make_store)
        if not self.is_watching:
            logger.warning("the monitor process knows the store of the first call only: this call is not watched")
        with self._lock:
            self._call, self._is_over = call, False
            self._all_over.clear()
            self._send(write_record(call).encode(), listeners)
            self._served |= {call.port for _ in listeners}

    def _send(self, data: bytes, listeners: Sequence[socket.socket] = ()) -> None:
        """Sends a message to the agent. An agent that is gone gets none: its successor gets the call."""
        with contextlib.suppress(OSError):
            channel.send(self._connection, data, tuple(listener.fileno() for listener in listeners))

    def _write_pid(self, path: Path | None) -> None:
        """Writes the agent's pid to this file and to all files of earlier calls, each as a whole.

        A file that cannot be written, on a full disk for instance, is one warning, since the agent watches all the
        same. Called in the main thread, and in the thread of `_replace` for a successor.
        """
        if path is not None:
            self._pidfiles.add(path)
        for file in self._pidfiles:
            try:
                self._write_whole(file)
            except OSError as error:
                if file not in self._refused:
                    self._refused.add(file)
                    logger.warning(
                        "the pid of the monitor process of rank %s cannot be written to %s (%s);"
                        " the process watches all the same",
                        self._member,
                        file,
                        error.strerror,
                    )

    def _write_whole(self, file: Path) -> None:
        """Writes the agent's pid to a file, which is renamed when it is written: nobody reads a part of it.

        Raises:
            OSError: the file cannot be written.
        """
        whole = file.with_name(f".{file.name}.{os.getpid()}")
        whole.unlink(missing_ok=True)
        try:
            with open(whole, "w", opener=lambda name, flags: open_own(name, flags, 0o666)) as written:
                written.write(f"{self.pid}\n")
            whole.replace(file)
        finally:
            whole.unlink(missing_ok=True)

    def _launch(self, make_store: MakeStore | None, forks: bool, reconnect: bool = False) -> None:
        """Makes the agent's process, and the thread that receives from it. Blocks until the process exists.

        A process in between makes the agent and ends (`agent_process.become`), so that the agent is no child of
        the rank. The file with the agent's pid is there when the process in between has ended.

        Args:
            make_store: of the user's own factory, for a fork.
            forks: whether the agent is a fork of this process; else it is a new interpreter.
            reconnect: whether the rank was connected to the monitor of another agent before.

        Raises:
            InternalError: the process cannot be started.
        """
        ours, theirs = channel.pair()
        order = self._prepare(theirs, reconnect)
        try:
            if forks:
                _fork(order, make_store)
            else:
                _execute(order)
            self.pid = int(agent_process.pid_file(order.folder).read_text())
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
        hidden_thread.start(functools.partial(self._receive_until_lost, ours))

    def _prepare(self, connection: socket.socket, reconnect: bool) -> AgentOrder:
        """Returns the parameters of the process: a new folder at the same path, and descriptors with high numbers.

        The path stays, since the client connects again at the socket that it knows. The numbers are high, since the
        process puts other files at 0, 1 and 2. The caller closes the descriptors.
        """
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

    def _receive_until_lost(self, connection: socket.socket) -> None:
        """Receives from the agent until it is gone, then has it replaced. The function of the hidden thread; blocks.

        The agent sends one message only: the call is finished on all ranks, for which `close` waits. The end of the
        process also ends that wait.
        """
        with contextlib.suppress(OSError):
            while connection.recv(len(FINISHED)) == FINISHED:
                self._all_over.set()
        self._all_over.set()
        connection.close()
        hidden_thread.run_in_ordinary(self._replace, "ft_client standalone agent")

    def _replace(self) -> None:
        """Makes another process in the place of a lost agent, unless that hosted the store. Has a thread of its own.

        The successor is a new interpreter, since the rank has threads by now. A new interpreter cannot call the user's
        own factory of a store: for such a call no successor is made. The monitor of the lost agent must have ended
        first, since it removes the folder.
        """
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
        deadline = time.monotonic() + _MONITOR_ENDS_S
        try:
            # Template and monitor of the lost agent each remove the folder, which the successor makes again.
            while processes_of(self._tag, key=env.SIDECAR_OF):
                if time.monotonic() > deadline:
                    raise InternalError(f"the monitor of rank {self._member} does not end")
                time.sleep(_LOOK_S)
            self._launch(None, forks=False, reconnect=True)
        except (OSError, InternalError, RuntimeError) as problem:  # a RuntimeError: no thread can be started
            self.is_lost = True
            logger.warning("%s: %s", problem, _UNWATCHED)
            return
        with self._lock:
            self._send(write_record(self._call).encode())
            if self._is_over:
                self._send(OVER)
        self._write_pid(None)


def _may_fork() -> bool:
    """Returns whether a fork of this process can run Python safely: no other thread may hold a lock, which nobody would
    release in the child, and there may be no CUDA context, which does not survive a fork."""
    cuda = getattr(sys.modules.get("torch.cuda"), "is_initialized", lambda: False)
    return threading.active_count() == 1 and len(sys._current_frames()) == 1 and not cuda()


def _fork(order: AgentOrder, make_store: MakeStore | None) -> None:
    """Makes the agent as a fork of this process, by a process in between. Blocks until that has ended."""
    between = fork()
    if between == 0:
        agent_process.become(order, make_store)
    with contextlib.suppress(ChildProcessError):  # the script reaps every child by itself
        os.waitpid(between, 0)


def _execute(order: AgentOrder) -> None:
    """Makes the agent in a new interpreter, by a process in between. Blocks until that has ended, `_START_S` at most.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be started, or did not end in time.
    """
    subprocess.run(
        [sys.executable, "-c", _START.format(path=sys.path), write_record(order)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=order.log,
        pass_fds=order.descriptors,
        check=True,
        timeout=_START_S,
    )
