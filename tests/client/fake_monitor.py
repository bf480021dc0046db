"""A monitor for tests: it takes every message down, answers as the real one does, and breaks when told to."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from pathlib import Path
from typing import TypeVar

from rank_monitor.contract.restart_phase import RestartPhase
from rank_monitor.contract.settings.config import MonitorSettings
from rank_monitor.contract.settings.declaration import to_json
from rank_monitor.contract.wire import channel, codec
from rank_monitor.contract.wire.codec import Received
from rank_monitor.contract.wire.messages import Attach, Message, Progress, Refused, RestartReport, Welcome
from tests.patience import patient, until

DEADLINE_S = 20.0
M = TypeVar("M", bound=Message)


class FakeMonitor:
    """Listens at `path` in a thread of its own until `close`. Stamps of progress come at any time: kept apart."""

    def __init__(self, path: Path, settings: MonitorSettings | None = None) -> None:
        self.path, self.settings = path, settings or MonitorSettings()
        self.received: list[Received] = []
        self.progress: list[Received] = []
        self.connections = 0
        self.refusal = ""
        self.silent = False
        self._listener = channel.listen(path)
        self._selector = selectors.DefaultSelector()
        self._waker, woken = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(woken, selectors.EVENT_READ)
        self._woken = woken
        self._reading = threading.Event()
        self._reading.set()
        self._closed = False
        self._clients: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def messages(self, kind: type[M]) -> list[M]:
        return [one.message for one in list(self.received) if isinstance(one.message, kind)]

    def kinds(self) -> list[str]:
        return [type(one.message).__name__ for one in list(self.received)]

    def wait_for(self, kind: type[M], count: int = 1) -> list[M]:
        until(lambda: len(self.messages(kind)) >= count, f"{count} {kind.__name__}; came: {self.kinds()}")
        return self.messages(kind)

    def pause(self) -> None:
        """Reads nothing from now on, as when it is stopped."""
        self._reading.clear()
        self._waker.send(b"x")

    def resume(self) -> None:
        self._reading.set()

    def drop(self) -> None:
        """Closes every connection, as when the monitor dies while its listening socket lives."""
        for client in self._clients:
            client.shutdown(socket.SHUT_RDWR)

    def say(self, data: bytes) -> None:
        """Sends to every client."""
        for client in self._clients:
            channel.send(client, data)

    def close(self) -> None:
        self._closed = True
        self._reading.set()
        self._waker.send(b"x")
        self._thread.join(patient(DEADLINE_S))
        for one in (self._listener, self._waker, self._woken, *self._clients):
            one.close()
        self.path.unlink()

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._woken:
                    self._woken.recv(1)
                else:
                    self._read(key.fileobj)  # type: ignore[arg-type]
            self._reading.wait()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        client.setblocking(False)
        self.connections += 1
        self._clients.append(client)
        self._selector.register(client, selectors.EVENT_READ)
        if self.refusal:
            channel.send(client, codec.encode(Refused(self.refusal), 1, time.monotonic_ns()))
            client.shutdown(socket.SHUT_RDWR)

    def _read(self, client: socket.socket) -> None:
        while self._reading.is_set():
            try:
                taken = channel.receive(client)
            except OSError:
                taken = b"", []
            if taken is None:
                return
            if not taken[0]:
                self._selector.unregister(client)
                self._clients.remove(client)
                client.close()
                return
            one = codec.decode(taken[0])
            (self.progress if isinstance(one.message, Progress) else self.received).append(one)
            enters_function = isinstance(one.message, RestartReport) and one.message.phase is RestartPhase.RUNNING
            if (enters_function or isinstance(one.message, Attach)) and not self.silent and not self.refusal:
                channel.send(client, codec.encode(Welcome(to_json(self.settings), 0), 1, time.monotonic_ns()))
