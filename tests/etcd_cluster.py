"""Three real etcds that are one cluster, on free ports of loopback: which of them leads, and what if it stands still.

Starts, pauses and ends them, by pid. Knows nothing of what is kept in them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.etcd_server import HOST
from tests.patience import patient
from tests.ports import free_port

SIZE = 3
_LIMIT_S = 60.0
_POLL_S = 0.05
_ask = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Member:
    """One of them."""

    port: int
    process: subprocess.Popen[bytes]

    def status(self) -> dict[str, Any]:
        """What it says of the cluster; nothing when it does not answer."""
        request = urllib.request.Request(f"http://{HOST}:{self.port}/v3/maintenance/status", b"{}", method="POST")
        try:
            with _ask.open(request, timeout=2) as answer:
                return dict(json.load(answer))
        except (OSError, ValueError):
            return {}

    def pause(self) -> None:
        """Lets it stand still: connections stay, nothing answers. It does when this returns."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """Lets it go on."""
        self.process.send_signal(signal.SIGCONT)


class Cluster:
    """The members. `endpoints`: all of them, for `--rdzv-endpoint`."""

    def __init__(self, folder: Path) -> None:
        peers = {f"m{number}": f"http://{HOST}:{free_port()}" for number in range(SIZE)}
        self.members = [_start(folder / name, name, peers) for name in peers]
        self.endpoints = ",".join(f"{HOST}:{member.port}" for member in self.members)

    def leader(self) -> Member:
        """Waits until all that answer agree who leads, and that one answers."""
        deadline = time.monotonic() + patient(_LIMIT_S)
        while time.monotonic() < deadline:
            told = {member: status for member in self.members if (status := member.status())}
            leaders = {status.get("leader", "0") for status in told.values()}
            for member, status in told.items():
                if len(told) > SIZE // 2 and leaders == {status["header"]["member_id"]}:
                    return member
            time.sleep(_POLL_S)
        raise AssertionError("the cluster has no leader")

    def close(self) -> None:
        """Ends them."""
        for member in self.members:
            member.process.kill()
        for member in self.members:
            member.process.wait()


def _start(folder: Path, name: str, peers: dict[str, str]) -> Member:
    port = free_port()
    client = f"http://{HOST}:{port}"
    words = {
        "name": name,
        "data-dir": str(folder),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peers[name],
        "initial-advertise-peer-urls": peers[name],
        "initial-cluster": ",".join(f"{peer}={url}" for peer, url in peers.items()),
        "unsafe-no-fsync": "true",
    }
    command = ["etcd", *(f"--{key}={value}" for key, value in words.items())]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return Member(port, process)


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """A cluster while the context lasts. Without the program the test is skipped; where `CI` is set, it fails."""
    if shutil.which("etcd") is None:
        problem = "etcd is not installed (apt-get install etcd-server)"
        pytest.fail(problem) if os.environ.get("CI") else pytest.skip(problem)
    with tempfile.TemporaryDirectory(prefix="etcd-test-") as folder:
        cluster = Cluster(Path(folder))
        try:
            cluster.leader()
            yield cluster
        finally:
            cluster.close()
