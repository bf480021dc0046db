"""Finds the jobs of this user that run on this host, and asks them: for `status`, `stacks`, `top` and `bundle`.

Each launcher has a runtime folder with a Unix socket, at which `tools/status/status_server.py` answers by HTTP. Nothing
else than these folders tells which jobs run: there is no list and no daemon. So a command asks every socket of this
user for `/status.json`, all at once, and takes the jobs that answer. Two kinds of socket give no job:

- The folder of a launcher that was killed has a socket at which nobody listens. It is passed over.
- A launcher that is stopped, or that the host holds up, has a socket and gives no answer. Its job runs, but its name is
  not known, so no command may say that no such job runs: it says which process does not answer (`NoAnswerError`).

An answer has a limit of bytes and of time.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_launcher.record.console.console_text import answer, printable
from ft_launcher.settings.options import UsageError
from ft_launcher.tools.report.job_findings import as_text
from ft_launcher.tools.status.listening import SOCKET
from rank_monitor.contract.processes import proc, runtime_folder
from rank_monitor.contract.wire import channel

ALL_NODES_S = 60.0
"""Seconds to wait for stacks of all nodes: each looks for a question at every second keep-alive (`--ft-node-beat`)."""
_LIMIT_S = 10.0
"""Seconds to wait for any other answer. Stacks take up to 2 s."""
_MAX_BYTES = 64 << 20
"""Bytes of an answer that are read."""
_ASKED_AT_ONCE = 32
"""Sockets that are asked at a time, each in a thread: several launchers that do not answer take one limit together."""
NOBODY = 4
"""The exit code where no such job runs here."""
SILENT = 5
"""The exit code where a launcher runs here that does not answer, and no other job is the one that is meant."""


class NoAnswerError(OSError):
    """A launcher listens at its socket, but gives no answer. The text says which process that is, and why if that is
    known."""


@dataclass(frozen=True)
class RunningJob:
    """A job that answers at a socket.

    Attributes:
        socket_path: the socket.
        status: its first answer, the object of `/status.json`.
    """

    socket_path: Path
    status: dict[str, Any]

    def ask(self, path: str, limit_s: float = _LIMIT_S) -> dict[str, Any]:
        """Returns the job's answer to a request for `path`. Blocks for `limit_s` seconds at most.

        Raises:
            NoAnswerError: the launcher is stopped, or its whole answer has not come in time.
            OSError: the launcher has ended, refuses the request, or answers with something else than JSON.
        """
        return _ask(self.socket_path, path, limit_s)


def running_job(run: str | None, if_none: str = "") -> RunningJob:
    """Returns the one job that `run` means.

    Where `run` is None and one job answers, launchers that do not answer are named on stderr.

    Args:
        run: a name or a run id, or the beginning of one; None: the only job.
        if_none: what to say, after `ft_launcher: `, where there is no such job.

    Raises:
        UsageError: several jobs are meant; they are listed on stderr.
        SystemExit: with 4 where there is none, with 5 where there is none that answers; lines on stderr say so.
    """
    jobs, silent = _find(run)
    if len(jobs) > 1:
        for job in sorted(jobs, key=lambda job: float(job.status["started"])):
            print(printable(f"  {job_line(job.status)}"), file=sys.stderr)
    if run is None or not jobs:
        for problem in silent:
            answer(problem)
    if len(jobs) > 1:
        raise UsageError(f"{len(jobs)} jobs run here", "Give the name or the run id of one, or its beginning")
    if jobs:
        return jobs[0]
    if silent:
        sys.exit(SILENT)
    what = "no job of this user runs on this host"
    if run is not None:
        what = f"no job of this user with a name or run id that begins with {run!r} runs on this host"
    answer(if_none or what)
    sys.exit(NOBODY)


def job_line(found: Mapping[str, Any]) -> str:
    """Returns one line by which people tell a job from others: its name, its age, its ranks, what it does."""
    ranks = len(found["ranks"])
    parts = [
        str(found["job_name"]),
        f"for {as_text(found['t'] - found['started'])}",
        f"{ranks} rank{'' if ranks == 1 else 's'} here",
        str(found["state"]),
    ]
    if found["run_id"] not in found["job_name"]:
        parts.append(f"run id {found['run_id']}")
    return ", ".join(parts)


def _find(run: str | None) -> tuple[list[RunningJob], list[str]]:
    """Returns the jobs of this user on this host that `run` may mean, and which launchers gave no answer, in words.

    Args:
        run: a name or a run id, or the beginning of one. A job whose whole name it is wins over jobs whose names begin
            with it. None: all jobs.
    """
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as threads:
        answers = list(threads.map(_first_answer, _sockets()))
    found = [one for one in answers if isinstance(one, RunningJob)]
    silent = [one for one in answers if isinstance(one, str)]
    if run is None:
        return found, silent
    named = [job for job in found if run in _names(job)]
    return named or [job for job in found if any(name.startswith(run) for name in _names(job))], silent


def _first_answer(path: Path) -> RunningJob | str | None:
    """Returns the job that answers at a socket; else why a launcher that listens there gave no status. None: nobody
    listens there, or the launcher has just ended. Runs in a thread of `_find`."""
    try:
        return RunningJob(path, _ask(path, "/status.json", _LIMIT_S))
    except (ConnectionError, FileNotFoundError):
        return None
    except NoAnswerError as error:
        return str(error)
    except OSError as error:
        return f"no status comes from {path}: {error}"


def _names(job: RunningJob) -> list[str]:
    """Returns the names by which a user may mean a job."""
    return [str(job.status.get(key, "")) for key in ("job_name", "run_id")]


def _sockets() -> Iterator[Path]:
    """Yields the sockets of this user's launchers, in all folders where a launcher may have its runtime folder.

    A socket of another user is left out: anyone may make a folder of such a name in /tmp, and answer as a job.
    """
    parents = runtime_folder.parents(os.environ)
    for folder in dict.fromkeys(
        folder.resolve() for parent in parents for folder in Path(parent).glob(f"{runtime_folder.PREFIX}*")
    ):
        with contextlib.suppress(OSError):
            path = folder / SOCKET
            if path.lstat().st_uid == os.geteuid():
                yield path


def _ask(path: Path, target: str, limit_s: float) -> dict[str, Any]:
    """Returns the answer to a GET request as JSON.

    Raises:
        NoAnswerError: the launcher is stopped, or its whole answer has not come in time.
        OSError: the launcher has ended, or its answer is an error or not a JSON object.
    """
    connection = _Connection(path, limit_s)
    try:
        connection.request("GET", target)
        response = connection.getresponse()
        body = response.read(_MAX_BYTES)
        if response.status != 200:
            raise OSError(body.decode(errors="replace").strip() or f"{response.status} {response.reason}")
        found = json.loads(body)
    except ConnectionError:  # before HTTPException, of which some are of this class, too
        raise
    except TimeoutError:
        raise NoAnswerError(f"{connection.launcher()} has not answered within {limit_s:g} s") from None
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"{path} answered with something else: {error}") from None
    finally:
        connection.close()
    if not isinstance(found, dict):
        raise OSError(f"{path} answered with something else")
    return found


class _Connection(http.client.HTTPConnection):
    """An HTTP connection to a socket in the file system, with one limit for all that happens on it.

    Args:
        path: of the socket.
        limit_s: seconds from now on until the whole answer has come.
    """

    def __init__(self, path: Path, limit_s: float) -> None:
        super().__init__("localhost")
        self._path = path
        self._deadline = time.monotonic() + limit_s
        self._pid = 0

    def connect(self) -> None:
        """Connects; called by the base class at the first request.

        Raises:
            NoAnswerError: the process that listens is stopped, or it has long accepted no connection.
        """
        self.sock = _LimitedSocket(self._deadline)
        try:
            self.sock.connect(str(self._path))
        except BlockingIOError:
            raise NoAnswerError(f"{self.launcher()} accepts no connection, as many others wait") from None
        # The kernel accepts a connection also for a process that is stopped.
        self._pid = channel.peer(self.sock).pid
        if proc.is_stopped(self._pid):
            raise NoAnswerError(f"{self.launcher()} is stopped, and does not answer; kill -CONT {self._pid} resumes it")

    def launcher(self) -> str:
        """Returns in words which launcher listens. Its pid is not known where it is in a pid namespace that this
        process does not see."""
        if self._pid:
            return f"the launcher with pid {self._pid}"
        return f"the launcher that listens at {self._path}"


class _LimitedSocket(socket.socket):
    """A Unix socket that can be read until a deadline.

    The timeout of a socket counts anew at each read. A launcher that gives a byte now and then would never reach it.

    Args:
        deadline: in seconds of CLOCK_MONOTONIC.
    """

    def __init__(self, deadline: float) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._deadline = deadline
        self._limit()

    def recv_into(self, *args: Any, **more: Any) -> int:
        """Receives some bytes. `makefile` of the base class, by which `http.client` reads, calls it for each read.

        Raises:
            TimeoutError: the deadline has passed.
        """
        self._limit()
        return super().recv_into(*args, **more)

    def _limit(self) -> None:
        """Sets the timeout of the next operation.

        Raises:
            TimeoutError: the deadline has passed.
        """
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        self.settimeout(left_s)
