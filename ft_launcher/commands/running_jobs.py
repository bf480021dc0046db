"""Finds the jobs of this user that run on this host, and asks them. Uses the standard library only."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_launcher.settings.options import UsageError
from ft_launcher.status.listening import SOCKET
from rank_monitor.contract.processes import runtime_folder

_LIMIT_S = 10.0
"""For one answer. Stacks take up to 2 s; a launcher that is stopped never answers."""
_MOST_BYTES = 64 << 20
NOBODY = 4
"""The exit code where no such job runs here."""


@dataclass(frozen=True)
class RunningJob:
    """A job that answers at a socket; `status` is what it said."""

    socket_path: Path
    status: dict[str, Any]

    def ask(self, path: str, limit_s: float = _LIMIT_S) -> dict[str, Any]:
        """Returns its answer.

        Raises:
            OSError: it does not answer within the limit (seconds), or not with JSON.
        """
        return _ask(self.socket_path, path, limit_s)


def find(run: str | None) -> list[RunningJob]:
    """Returns the jobs of this user on this host.

    Args:
        run: a run id, or its beginning; None: all.
    """
    found = []
    for path in _sockets():
        with contextlib.suppress(OSError):  # it has just ended
            job = RunningJob(path, _ask(path, "/status.json"))
            if run is None or str(job.status.get("run_id", "")).startswith(run):
                found.append(job)
    return found


def the_one(run: str | None) -> RunningJob | None:
    """Returns the job that is meant; None: there is none.

    Raises:
        UsageError: several are.
    """
    found = find(run)
    if len(found) > 1:
        named = ", ".join(str(job.status.get("run_id")) for job in found[:5])
        raise UsageError(f"{len(found)} jobs run here: {named}", "Give the run id, or its beginning")
    return found[0] if found else None


def _sockets() -> Iterator[Path]:
    parents = dict.fromkeys((os.environ.get("TMPDIR") or tempfile.gettempdir(), "/tmp", "/dev/shm"))
    for folder in dict.fromkeys(
        folder.resolve() for parent in parents for folder in Path(parent).glob(f"{runtime_folder.PREFIX}*")
    ):
        with contextlib.suppress(OSError):
            path = folder / SOCKET
            if path.lstat().st_uid == os.geteuid():
                yield path


def _ask(path: Path, target: str, limit_s: float = _LIMIT_S) -> dict[str, Any]:
    connection = _Connection(path, limit_s)
    try:
        connection.request("GET", target)
        response = connection.getresponse()
        body = response.read(_MOST_BYTES)
        if response.status != 200:
            raise OSError(body.decode(errors="replace").strip())
        found = json.loads(body)
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"{path} answered with something else: {error}") from None
    finally:
        connection.close()
    if not isinstance(found, dict):
        raise OSError(f"{path} answered with something else")
    return found


class _Connection(http.client.HTTPConnection):
    """A connection to a socket in the file system."""

    def __init__(self, path: Path, limit_s: float) -> None:
        super().__init__("localhost", timeout=limit_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
