"""Processes that a rank starts and leaves behind, each kind harder to find: how they start, and who they are.

A kind is `same session`, `new session`, `daemon` (double fork, session of its own), `bare daemon` (with an empty
environment too) or `stubborn` (ignores SIGTERM). Knows no rank and no launcher.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

KINDS = ("same session", "new session", "daemon", "bare daemon")
BARE = "bare daemon"
_SLEEP = ["/bin/sleep", "3600"]
_STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(3600)"


@dataclass(frozen=True)
class Child:
    """A process as it was when it started: a pid that was given to another one since is not it."""

    kind: str
    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """Whether it is there still, and no zombie."""
        try:
            return start_of(self.pid) == self.started and state_of(self.pid) not in "ZX"
        except OSError:
            return False


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def state_of(pid: int) -> str:
    """The process' state, one letter.

    Raises:
        OSError: there is no such process.
    """
    return _stat(pid)[0]


def start_of(pid: int) -> int:
    """When the process started, in ticks since boot.

    Raises:
        OSError: there is no such process.
    """
    return int(_stat(pid)[19])


def start(kinds: tuple[str, ...], record: Path) -> None:
    """Starts one process of each kind and writes down who they are."""
    children = [Child(kind, pid, start_of(pid)) for kind in kinds for pid in [_start_one(kind)]]
    record.write_text(json.dumps([[child.kind, child.pid, child.started] for child in children]))


def recorded(folder: Path, pattern: str = "*") -> list[Child]:
    """The children written down in the files of a folder."""
    return [Child(*entry) for file in sorted(folder.glob(pattern)) for entry in json.loads(file.read_text())]


def _start_one(kind: str) -> int:
    if kind == "same session":
        return subprocess.Popen(_SLEEP).pid
    if kind == "new session":
        return subprocess.Popen(_SLEEP, start_new_session=True).pid
    if kind == "stubborn":
        process = subprocess.Popen([sys.executable, "-c", _STUBBORN], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid
    return _daemon({} if kind == BARE else dict(os.environ))


def _daemon(environment: dict[str, str]) -> int:
    reader, writer = os.pipe()
    if (middle := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writer, str(os.getpid()).encode())
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            os.closerange(3, writer + 1)
            os.execve(_SLEEP[0], _SLEEP, environment)
        os._exit(0)
    os.waitpid(middle, 0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        return int(stream.read())
