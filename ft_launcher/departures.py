"""Tells the ranks' store that a rank is gone: a thread for each, since that waits until the others took note.

Says when they did, or why not, and ends with the cycle whatever it waits for. What is told stands in `rungs.py`, what
is written in the contract.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import queue
import signal
import socket
import threading
from dataclasses import dataclass

from torch.distributed import PrefixStore, TCPStore

from ft_launcher.process_tree import SessionTree
from ft_launcher.rung_steps import Tell
from rank_monitor.contract import resolver
from rank_monitor.contract.departure import depart, withdraw
from rank_monitor.contract.errors import StoreLost
from rank_monitor.contract.roll import release

_CONNECT_S = 20.0
_END_S = 0.5
_TERMINATED = "TERMINATED"
_OVER = "the cycle is over"


@dataclass(frozen=True)
class Told:
    """The others know of a rank's end; `problem`: why they may not."""

    local_rank: int
    problem: str


class _Keys(PrefixStore):  # type: ignore[misc]
    """The keys of a call, `name` being their prefix, through a connection for one thread, and what that waits for."""

    def __init__(self, prefix: str, host: str, port: int, over: threading.Event) -> None:
        limit = datetime.timedelta(seconds=_CONNECT_S)
        with resolver.bounded_towards(host):
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        super().__init__(prefix, store)
        self.name, self.awaited = prefix, list[str]()
        self._over = over

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        """As torch's.

        Raises:
            StoreLost: the cycle ended before or meanwhile.
        """
        self.awaited = keys
        if not self._over.is_set():
            super().wait(keys, timeout)
        if self._over.is_set():
            raise StoreLost(_OVER)


class Departures:
    """Of one cycle.

    Args:
        host, port: the cycle's store.
        stop_s: from SIGTERM to SIGKILL for what a dead rank left.
    """

    def __init__(self, host: str, port: int, stop_s: float) -> None:
        self._host, self._port, self._stop_s = host, port, stop_s
        self._over = threading.Event()
        self._told: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._threads: list[threading.Thread] = []
        self._waiting: dict[str, _Keys] = {}

    def fileno(self) -> int:
        """Readable when `take` has something."""
        return self._bell.fileno()

    def tell(self, order: Tell, pid: int) -> None:
        """Begins to tell; then ends what the rank's process `pid` left running."""
        thread = threading.Thread(target=self._run, args=(order, pid), daemon=True, name=f"ft_departure{pid}")
        self._threads = [*(former for former in self._threads if former.is_alive()), thread]
        thread.start()

    def take(self) -> list[Told]:
        """What was told since the last call."""
        with contextlib.suppress(OSError):
            self._bell.recv(64)
        return [self._told.get_nowait() for _ in range(self._told.qsize())]

    def close(self) -> None:
        """Ends the threads. To be called when the ranks are gone: it writes what the threads wait for."""
        if self._over.is_set():
            return
        self._over.set()
        if any(thread.is_alive() for thread in self._threads):
            threading.Thread(target=self._release, daemon=True, name="ft_release").start()
        for thread in self._threads:  # one that waits in torch when Python ends would abort the process
            thread.join(_END_S)
        self._ring.close()
        self._bell.close()

    def _run(self, order: Tell, pid: int) -> None:
        problem, name = "", threading.current_thread().name
        try:
            keys = self._waiting[name] = _Keys(order.prefix, self._host, self._port, self._over)
            record = json.dumps({"rank": order.member, "interruption": _TERMINATED})
            (withdraw if order.joins else depart)(keys, order.member, record, order.limit_s)
        except Exception as error:  # of any kind that a store raises: the agent decides
            problem = str(error).strip().partition("\n")[0] or type(error).__name__
        else:
            SessionTree(pid).stop(signal.SIGTERM, self._stop_s)
        self._waiting.pop(name, None)
        self._told.put(Told(order.local_rank, problem))
        with contextlib.suppress(OSError):
            self._ring.send(b"!")

    def _release(self) -> None:
        with contextlib.suppress(Exception):  # a store that is gone lets go of whoever waits
            for keys in list(self._waiting.values()):
                another = _Keys(keys.name, self._host, self._port, self._over)
                for key in keys.awaited:
                    release(another, key, _OVER)
