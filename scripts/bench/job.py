"""Runs one launcher once: starts it in a folder of its own, reads the stamps of its ranks, and ends every process of
it.

Every wait has a deadline. A process is ended only when its environment names this job's folder, so that other jobs on
the machine are safe.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from .launchers import COMMON_ENVIRONMENT, Launcher


class JobFailed(Exception):
    """The job did not do what the scenario needs; the text says what and shows the end of its output."""


@dataclass(frozen=True)
class Stamp:
    """One event in one rank; `t` is the monotonic clock in nanoseconds."""

    event: str
    rank: int
    cycle: int
    pid: int
    t: int


class Job:
    """A launcher with its ranks; a context manager that leaves nothing behind."""

    def __init__(
        self,
        launcher: Launcher,
        ranks: int,
        arguments: Sequence[str],
        flags: Sequence[str] = (),
        max_restarts: int = 0,
    ) -> None:
        self.ranks = ranks
        self.launcher = launcher
        self.folder = Path(tempfile.mkdtemp(prefix="ftb"))
        self._stamps: list[Stamp] = []
        self._read_bytes = 0
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("FT_", "PET_"))},
            **COMMON_ENVIRONMENT,
            **launcher.environment,
            "BENCH_FOLDER": str(self.folder),
            "BENCH_CLIENT": launcher.client,
            "TMPDIR": str(self.folder),
        }
        self.command = launcher.command(ranks, max_restarts, flags, arguments)
        self.started_ns = time.monotonic_ns()
        self.process = self._start(self.command)

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "output").open("ab") as output:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _tb: TracebackType | None
    ) -> None:
        deadline = time.monotonic() + 10
        while self._kill_all() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.process.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill_all(self) -> int:
        pids = self.processes()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(pids)

    def start_again(self) -> None:
        """Starts the launcher again, as a loop around it does. Called once it is dead."""
        self.process.wait(10)
        self.process = self._start(self.command)

    def end_well(self, limit_s: float) -> None:
        """Waits for the launcher's exit code 0."""
        if self.process.wait(limit_s) != 0:
            raise JobFailed(f"exit code {self.process.returncode}; {self.last_output()}")

    def processes(self) -> list[int]:
        """All processes whose environment has this job's folder."""
        environments = ((process.pid, process.info["environ"]) for process in psutil.process_iter(["environ"]))
        folder = str(self.folder)
        return [pid for pid, environment in environments if environment and environment.get("BENCH_FOLDER") == folder]

    def stamps(self, event: str = "", cycle: int | None = None) -> list[Stamp]:
        """What the ranks wrote so far, whole lines only, filtered."""
        with contextlib.suppress(FileNotFoundError), (self.folder / "stamps.jsonl").open("rb") as file:
            file.seek(self._read_bytes)
            new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read_bytes += len(whole)
            self._stamps += [Stamp(**json.loads(line)) for line in whole.splitlines()]
        found = (stamp for stamp in self._stamps if event in ("", stamp.event))
        return [stamp for stamp in found if cycle in (None, stamp.cycle)]

    def wait_ranks(self, event: str, cycle: int = 0, deadline_s: float = 60.0, count: int | None = None) -> list[Stamp]:
        """The stamps of `event` in `cycle` once `count` ranks (all) wrote it; a failure if a later cycle began without.

        Polls: the stamps carry their own times, so that costs no accuracy; only new ones are read, so hardly any time.
        """
        what = f"{event} in cycle {cycle}"
        deadline = time.monotonic() + deadline_s
        while True:
            ended = self.process.poll() is not None
            found = self.stamps(event, cycle)
            if len(found) == (count or self.ranks):
                return found
            if any(s.cycle > cycle for s in self.stamps()):
                raise JobFailed(f"{what}: another restart instead; {self.last_output()}")
            if ended:
                raise JobFailed(f"{what}: the launcher ended with {self.process.returncode}; {self.last_output()}")
            if time.monotonic() > deadline:
                raise JobFailed(f"{what}: not within {deadline_s:g} s; {self.last_output()}")
            time.sleep(0.01)

    def tell(self, name: str) -> None:
        """Make the file that the ranks wait for."""
        (self.folder / name).touch()

    def took_ns(self, name: str, rank: int = 0) -> array.array[int]:
        """Nanoseconds of each call of one rank."""
        return array.array("q", (self.folder / f"{name}.{rank}.bin").read_bytes())

    def took_ns_of_all(self, name: str) -> list[int]:
        """Nanoseconds of each call of all ranks."""
        return [took for rank in range(self.ranks) for took in self.took_ns(name, rank)]

    def last_output(self) -> str:
        """The last lines of what the launcher and its ranks printed."""
        lines = (self.folder / "output").read_text(errors="replace").strip().splitlines()
        return " | ".join(line for line in lines[-12:] if "^^^" not in line)[-1200:]

    def monitors(self) -> list[int]:
        """The sidecars of this launcher."""
        text = self.launcher.monitor_words
        ranks = {s.pid for s in self.stamps()}
        found = (pid for pid in descendants(self.process.pid) if pid not in ranks)
        return [pid for pid in found if text and text in command_line(pid)]


def deaths(
    pids: Iterable[int], once_watched: Callable[[], None] = lambda: None, deadline_s: float = 30.0
) -> dict[int, int]:
    """The monotonic nanoseconds at which each process was seen dead; `once_watched` is called before the wait."""
    poller = select.poll()
    alive: dict[int, int] = {}
    dead: dict[int, int] = {}
    with contextlib.ExitStack() as stack:
        for pid in pids:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                raise JobFailed(f"process {pid} ended before it was watched") from None
            stack.callback(os.close, fd)
            poller.register(fd, select.POLLIN)
            alive[fd] = pid
        once_watched()
        deadline = time.monotonic() + deadline_s
        while alive:
            events = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            now = time.monotonic_ns()
            if not events:
                raise JobFailed(f"{len(alive)} processes still alive after {deadline_s:g} s")
            for fd, _ in events:
                poller.unregister(fd)
                dead[alive.pop(fd)] = now
    return dead


def command_line(pid: int) -> str:
    """Empty when the process is gone."""
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def descendants(pid: int) -> list[int]:
    """All processes below `pid`."""
    try:
        return [below.pid for below in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads so far: the clock that clock_getcpuclockid(3) names, good to a nanosecond."""
    return time.clock_gettime_ns(~pid << 3 | 2) / 1e9


def memory_mib(pid: int) -> tuple[float, float]:
    """(proportional, private) MiB."""
    try:
        memory = psutil.Process(pid).memory_full_info()
    except psutil.NoSuchProcess:
        raise JobFailed(f"process {pid} ended") from None
    return memory.pss / 2**20, memory.uss / 2**20
