"""Ranks for tests of processes: forked by a process that has imported torch once, and told what to do line by line.

Run as a script it is that process. A rank is not a child of the test; what all of them leave behind carries the mark.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ft_client.inprocess.arguments import Timeouts
from ft_client.inprocess.restart.monitor_link import MonitorLink
from ft_client.inprocess.standalone.agent_handle import AgentHandle
from ft_client.inprocess.standalone.watched_call import WatchedCall
from ft_client.rank.monitoring import process
from rank_monitor.contract.processes.sweep import processes_of
from tests.patience import patient, until
from tests.restart_reports import report

ROOT = Path(__file__).resolve().parents[3]
MARK = "STANDALONE_TEST_MARK"
PATIENCE_S = patient(30.0)


class RankOfTest:
    """A rank, from the test's side."""

    def __init__(self, pid: int, words: socket.socket) -> None:
        self.pid = pid
        self._words = words.makefile("rw")
        words.close()

    def do(self, name: str, **arguments: Any) -> Any:
        """Has it do something; what that returns."""
        self.say(name, **arguments)
        return self.answer()

    def refuses(self, name: str, **arguments: Any) -> str:
        """The error that it answers with."""
        self.say(name, **arguments)
        return str(json.loads(self._words.readline())["error"])

    def say(self, name: str, **arguments: Any) -> None:
        """As `do`, without waiting for an answer."""
        print(json.dumps([name, arguments]), file=self._words, flush=True)

    def answer(self) -> Any:
        """Of what was said."""
        answer = json.loads(self._words.readline())
        assert "error" not in answer, answer
        return answer["value"]

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def leave(self) -> None:
        """An end by itself."""
        with contextlib.suppress(OSError):
            self._words.close()


class Nursery:
    """Where ranks come from; TMPDIR is theirs alone."""

    def __init__(self, tmp: Path) -> None:
        self.mark, self.tmp = secrets.token_hex(8), tmp
        self._ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve()", str(theirs.fileno())],
            cwd=ROOT,
            env={**os.environ, MARK: self.mark, "TMPDIR": str(tmp), "PYTHONPATH": str(ROOT)},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def rank(self) -> RankOfTest:
        """A new rank."""
        ours, theirs = socket.socketpair()
        socket.send_fds(self._ours, [b"x"], [theirs.fileno()])
        theirs.close()
        return RankOfTest(int(self._ours.recv(16)), ours)

    def processes(self) -> dict[int, str]:
        """Everything that came from here and lives, by pid, with the name that `ps` shows."""
        found = {}
        for pid in processes_of(self.mark, key=MARK):
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
        found.pop(self._process.pid, None)
        return found

    def nothing_left(self) -> None:
        """I1: no process, no file in TMPDIR."""
        until(lambda: not self.processes() and not [*self.tmp.iterdir()], f"left: {self.processes()}, {self.tmp}")

    def end(self) -> None:
        """Ends it, and what a failed test left."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)  # a fork of this process may have the socket open, too
        self._ours.close()
        self._process.wait(PATIENCE_S)


@contextlib.contextmanager
def nursery(tmp: Path) -> Iterator[Nursery]:
    """A nursery with a TMPDIR."""
    nursery = Nursery(tmp)
    try:
        yield nursery
    finally:
        nursery.end()


# In the process that forks.


def serve() -> None:
    """Forks a rank for each connection that comes, until the test is gone."""
    import torch.distributed  # noqa: F401

    connection = socket.socket(fileno=int(sys.argv[-1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if not descriptors:
            return
        words = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            _be_rank(words)
        words.close()
        connection.send(str(pid).encode())


# In a rank.

_agent: AgentHandle | None = None
_warnings: list[str] = []


def _be_rank(words: socket.socket) -> None:
    code = 0
    try:
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: _warnings.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("ft_client").addHandler(handler)
        with words.makefile("rw") as lines:
            for line in lines:
                name, arguments = json.loads(line)
                try:
                    answer = {"value": globals()[f"do_{name}"](**arguments)}
                except Exception as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                print(json.dumps(answer), file=lines, flush=True)
    except BaseException:
        code = 1
    finally:
        os._exit(code)


def do_start(
    member: int,
    world_size: int,
    prefix: str = "call",
    address: tuple[str, int] | None = None,
    hosts_store: bool = False,
    timeouts: dict[str, float] | None = None,
    file: str = "",
    **paths: str,
) -> list[Any]:
    """Pid of the agent and folder; `file`: of a store of the user's own factory."""
    global _agent
    from torch.distributed import FileStore

    host, port = address or ("", 0)
    limits = {"heartbeat_interval": 1.0, "heartbeat_timeout": 30.0, "barrier_timeout": 120.0, **(timeouts or {})}
    seconds = {f"{name}_s": value for name, value in limits.items()}
    call = WatchedCall(member, world_size, prefix, host, port, hosts_store, **seconds)
    _agent = AgentHandle.start(call, (lambda: FileStore(file, -1)) if file else None, **paths)
    process.start(environment=_agent.environment)
    return [_agent.pid, str(_agent.socket.parent)]


def do_connected() -> bool:
    """Whether the monitor answers."""
    from ft_client.rank_monitor_client import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client.cfg is not None


def do_say(phase: str) -> bool:
    """What the wrapper would report."""
    link = process.current()
    return link is not None and link.post(report(phase, call_prefix=""), time.monotonic_ns(), 1.0)


def do_hang() -> None:
    """Past the hard timeout of a wrapper."""
    short = {
        "soft_timeout": 0.2,
        "hard_timeout": 0.4,
        "progress_watchdog_interval": 0.05,
        "termination_grace_time": 0.1,
    }
    short |= {"monitor_process_interval": 0.1, "monitor_thread_interval": 0.1}
    guard = MonitorLink(
        Timeouts(**{name: datetime.timedelta(seconds=value) for name, value in short.items()}), _warnings.append
    )
    guard.running(0)
    time.sleep(PATIENCE_S)


def do_thread() -> None:
    """Starts a thread that stays."""
    threading.Thread(target=time.sleep, args=(2 * PATIENCE_S,), daemon=True).start()


def do_threads() -> list[str]:
    """The names of the threads that a script sees."""
    return [thread.name for thread in threading.enumerate()]


def do_close(others_s: float = 0.0) -> None:
    """Ends the call."""
    assert _agent is not None
    _agent.close(others_s)


def do_state() -> list[Any]:
    """Pid of the agent, whether it is lost, and what was warned of."""
    assert _agent is not None
    return [_agent.pid, _agent.is_lost, _warnings]
