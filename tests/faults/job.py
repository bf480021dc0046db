"""A job under test: the launcher as a process of its own, with a folder, a TMPDIR and a mark of its own.

Starts, waits under a deadline, reads what it wrote, finds what belongs to it, and ends that by pid. Judges nothing.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests.faults import children
from tests.faults.training import Plan, State
from tests.patience import patient
from tests.program import ONE_TRY, clean_environment

WORKER = Path(__file__).with_name("worker.py")
MARK = "FAULT_TEST_MARK"
_KEPT = ("FT_WARM_START",)  # the whole grid runs under both starts
_WORKER = "PYTEST_XDIST_WORKER"
_STARTS_S = 60.0
_POLL_S = 0.01
_TAIL = 6000
_LISTENS = "0A"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Place:
    """Where a launcher runs: how processes start there, what `/proc` tells of its network, and what they find set."""

    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
    net: Path = Path("/proc/net")
    environ: Mapping[str, str] = field(default_factory=dict)


HERE = Place()


class Job:
    """One launcher and all that belongs to it.

    Args:
        folder: its working directory, its TMPDIR and everything it writes is in there.
        plan: what the ranks do.
        nproc: ranks of this node.
        flags: more words for the launcher.
        name: tells launchers of one job apart that share `folder`.
        script: what the ranks run.
        tmp: its TMPDIR; one in `folder` when not given. `port`: of its rendezvous, where the test gives one.
        place: where it runs.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        nproc: int,
        flags: Iterable[str] = (),
        name: str = "node",
        script: Path = WORKER,
        tmp: Path | None = None,
        place: Place = HERE,
    ) -> None:
        self.folder, self.plan, self.nproc, self.place = folder, plan, nproc, place
        self.mark = uuid.uuid4().hex
        self.output_file = folder / f"{name}.output"
        self.journal_folder = folder / f"{name}.journal"
        self.tmp = tmp or folder / f"{name}.tmp"
        self.port = 0
        self.tmp.mkdir(parents=True, exist_ok=True)
        plan.save(folder)
        words = ["--nproc-per-node", str(nproc), "--ft-journal-dir", str(self.journal_folder), *flags]
        with self.output_file.open("ab") as output:
            self.process = place.start(
                [sys.executable, "-m", "ft_launcher", *words, str(script), str(folder)],
                cwd=folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        ours = {MARK: self.mark, "TMPDIR": str(self.tmp)}
        return clean_environment(**kept, **ours, **ONE_TRY) | dict(self.place.environ)

    # What it wrote.

    @property
    def output(self) -> str:
        """All it printed so far, its ranks included."""
        return self.output_file.read_text(errors="replace")

    def journal(self, *events: str) -> list[dict[str, Any]]:
        """The journal so far, whole lines only; with names, only events of these."""
        lines = [
            json.loads(line)
            for file in sorted(self.journal_folder.glob("journal.*.jsonl"))
            for line in file.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]
        return [line for line in lines if not events or line["event"] in events]

    def ranks(self, cycle: int) -> dict[int, int]:
        """Rank -> pid of the ranks of this node that came to their script in a cycle, by their own word."""
        found = {}
        for file in (self.folder / "ranks").glob(f"{cycle}-*"):
            facts = json.loads(file.read_text())
            found[facts["rank"]] = facts["pid"]
        return found

    def state(self, rank: int) -> State | None:
        """A rank's last checkpoint."""
        file = self.folder / f"state-{rank}"
        return State.of_json(file.read_text()) if file.exists() else None

    def trained(self, iteration: int, cycle: int, world: int) -> bool:
        """Whether the ranks of a cycle, `world` of them, have all come to an iteration."""
        files = list((self.folder / "progress").glob(f"{cycle}-*"))
        return len(files) >= world and all(int(file.read_text()) >= iteration for file in files)

    # Waiting.

    def until(self, condition: Callable[[], _T], what: str, limit_s: float = _STARTS_S) -> _T:
        """Waits until `condition()` is true; returns its value. Fails when time is up or the launcher ended first."""
        deadline = time.monotonic() + patient(limit_s)
        while True:
            ended = self.process.poll() is not None
            if value := condition():
                return value
            assert not ended, f"the launcher ended with {self.process.returncode} before {what}\n{self.tail()}"
            assert time.monotonic() < deadline, f"waited {limit_s} s for {what}\n{self.tail()}"
            time.sleep(_POLL_S)

    def until_ranks_train(self, iteration: int = 1, cycle: int = 0, world: int | None = None) -> dict[int, int]:
        """Waits until all ranks have come to an iteration; returns rank -> pid. `world`: of more than this node."""

        wanted = self.nproc if world is None else world
        self.until(lambda: self.trained(iteration, cycle, wanted), f"iteration {iteration} of cycle {cycle}")
        return self.ranks(cycle)

    def finish(self, limit_s: float = _STARTS_S) -> int:
        """Waits for the launcher's end; returns its exit code as a shell has it."""
        try:
            code = self.process.wait(patient(limit_s))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher did not end within {limit_s} s\n{self.tail()}") from None
        return code if code >= 0 else 128 - code

    def go(self) -> None:
        """Lets ranks go on that the plan holds."""
        (self.folder / "go").touch()

    # What belongs to it.

    def processes(self) -> dict[int, str]:
        """Pid -> command line of every process of this job that lives, the launcher too."""
        mark, tmp = f"{MARK}={self.mark}".encode(), os.fsencode(self.tmp)
        found = {}
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit() or entry.name == str(os.getpid()):
                continue
            pid = int(entry.name)
            command = _read(pid, "cmdline")
            tagged = mark in _read(pid, "environ").split(b"\0")
            if (tagged or tmp in command) and lives(pid):
                found[pid] = command.replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def listening(self, ports: Collection[int]) -> set[int]:
        """Those of these ports that are listened at in the launcher's network, but for tests that run beside this."""
        lines = [line.split() for name in ("tcp", "tcp6") for line in _lines(self.place.net / name)[1:]]
        found = {int(local.rpartition(":")[2], 16) for _, local, _, state, *_ in lines if state == _LISTENS}
        found &= set(ports)
        return found - _held_beside(found) if found else found

    def unix_sockets(self) -> list[str]:
        """The sockets in its TMPDIR that are still there."""
        return [line for line in _lines(self.place.net / "unix") if str(self.tmp) in line]

    def children(self) -> list[children.Child]:
        """The processes that ranks started."""
        return children.recorded(self.folder / "children")

    def monitor(self, local_rank: int) -> int:
        """Pid of a rank's monitor; 0 when there is none."""
        return self._named(f"ft_monitor{local_rank}")

    def template(self) -> int:
        """Pid of the process that forks monitors; 0 when there is none."""
        return self._named("ft_template")

    def _named(self, name: str) -> int:
        found = {pid for pid in self.processes() if _read(pid, "comm").decode().strip() == name}
        # A monitor has the template's name until it gives itself its own, right after the fork.
        found -= {pid for pid in found if _parent(pid) in found}
        assert len(found) <= 1, f"several processes are {name}"
        return found.pop() if found else 0

    def runtime_folder(self) -> Path:
        """The launcher's folder of sockets."""
        (folder,) = self.tmp.glob("ft-*")
        return folder

    def tail(self) -> str:
        """What helps to understand a failure."""
        journal = "\n".join(json.dumps(line) for line in self.journal())
        return f"--- output\n{self.output[-_TAIL:]}\n--- journal\n{journal[-_TAIL:]}\n--- processes\n{self.processes()}"

    def kill_all(self) -> None:
        """Ends the launcher and what is left of the job, by pid."""
        while pids := [*self.processes(), *(child.pid for child in self.children() if child.alive)]:
            for pid in pids:
                kill(pid)
            time.sleep(_POLL_S)
        self.process.wait()


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Sends a signal, and for SIGKILL waits until the process has ended; harmless when there is none."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(pidfd, number)
        if number == signal.SIGKILL:
            select.select([pidfd], [], [], patient(_STARTS_S))
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


def lives(pid: int) -> bool:
    """Whether there is such a process, and no zombie."""
    try:
        return children.state_of(pid) not in "ZX"
    except OSError:
        return False


def _held_beside(ports: Collection[int]) -> set[int]:
    """Those of these ports of this machine that a test of another xdist worker was given since."""
    held = {one.laddr.port: one.pid for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    return {port for port in ports if (pid := held.get(port)) and _runs_beside(pid)}


def _runs_beside(pid: int) -> bool:
    """Whether the process is another xdist worker, or was started by one."""
    own = os.environ.get(_WORKER)
    try:
        process = psutil.Process(pid)
        theirs = process.environ().get(_WORKER)
        return own is not None and (theirs != own if theirs else process.ppid() == os.getppid())
    except psutil.Error:
        return False


def _lines(file: Path) -> list[str]:
    return file.read_text(errors="replace").splitlines() if file.exists() else []


def _parent(pid: int) -> int:
    """Pid of the parent; 0 of a process that is gone."""
    after_name = _read(pid, "stat").rpartition(b")")[2].split()
    return int(after_name[1]) if after_name else 0


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
