"""A real etcd for tests: Debian's server with both APIs, on free ports of loopback, its records in a temporary folder.

Starts, pauses and ends it, by pid. Knows nothing of what is kept in it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.patience import patient
from tests.ports import free_port

HOST = "127.0.0.1"
_PROGRAM = "etcd"
_LIMIT_S = 60.0
_TRIES = 5
_POLL_S = 0.02
_ask = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class EtcdServer:
    """One server, which keeps its port and its records over `stop` and `start`.

    `flags` are more of its own. With those that name its certificate it listens at a port more, `tls_port`.
    """

    def __init__(self, folder: Path, flags: Mapping[str, str]) -> None:
        self.folder = folder
        self._flags = dict(flags)
        self._process: subprocess.Popen[bytes] | None = None
        for _ in range(_TRIES):  # somebody may take a free port before the server does
            self.port, self.tls_port = free_port(), free_port()
            if self._came_up():
                return
        raise AssertionError(f"etcd does not start\n{self._log()}")

    @property
    def endpoint(self) -> str:
        """Host and port for clients."""
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """Of the running server."""
        assert self._process is not None, "etcd was stopped"
        return self._process.pid

    def start(self) -> None:
        """Starts it again and waits until it answers."""
        assert self._came_up(), f"etcd does not start again\n{self._log()}"

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ends it by a signal and waits for its end; harmless when it was stopped before."""
        if self._process is not None:
            self.resume()
            self._process.send_signal(number)
            try:
                self._process.wait(patient(_LIMIT_S))
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Kills it and starts it with the records it had."""
        self.stop(signal.SIGKILL)
        self.start()

    def forget(self) -> None:
        """Starts it without any record."""
        self.stop(signal.SIGKILL)
        shutil.rmtree(self.folder / "data")
        self.start()

    def pause(self) -> None:
        """Lets it stand still: connections stay, nothing answers. It does when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """Lets it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def _came_up(self) -> bool:
        client = f"http://{self.endpoint}"
        if "cert-file" in self._flags:
            client += f",https://{HOST}:{self.tls_port}"
        words = (
            {"enable-v2": "true"}
            | self._flags
            | {
                "data-dir": str(self.folder / "data"),
                "listen-client-urls": client,
                "advertise-client-urls": client,
                "listen-peer-urls": f"http://{HOST}:{free_port()}",
            }
        )
        command = [_PROGRAM, *(f"--{name}={value}" for name, value in words.items())]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + patient(_LIMIT_S)
        while self._process.poll() is None and time.monotonic() < deadline:
            if self._is_healthy():
                return True
            time.sleep(_POLL_S)
        self.stop(signal.SIGKILL)
        return False

    def _is_healthy(self) -> bool:
        try:
            with _ask.open(f"http://{self.endpoint}/health", timeout=2) as answer:
                return b"true" in answer.read()
        except OSError:
            return False

    def _log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-4000:]


@contextmanager
def running_etcd(flags: Mapping[str, str] = MappingProxyType({})) -> Iterator[EtcdServer]:
    """A server while the context lasts. Without the program the test is skipped; where `CI` is set, it fails."""
    if shutil.which(_PROGRAM) is None:
        problem = "etcd is not installed (apt-get install etcd-server)"
        pytest.fail(problem) if os.environ.get("CI") else pytest.skip(problem)
    with tempfile.TemporaryDirectory(prefix="etcd-test-") as folder:
        server = EtcdServer(Path(folder), flags)
        try:
            yield server
        finally:
            server.stop()
