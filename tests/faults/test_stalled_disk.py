"""A file system that stops answering while a job runs: a FUSE server that is stopped, or holds a request it has read.

Each job runs in a mount namespace of its own with such a file system, which `/proc/PID/root` shows to the test.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.patience import patient, until

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None or not Path("/dev/fuse").exists(),
    reason="needs root, unshare and /dev/fuse",
)
LIMIT_S = patient(60.0)
ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, sys, time
folder = sys.argv[1]
cycle = os.environ["TORCHELASTIC_RESTART_COUNT"]
open(f"{folder}/began{cycle}", "w").close()
while not os.path.exists(f"{folder}/go{cycle}"):
    time.sleep(0.01)
if os.path.exists(f"{folder}/silent{cycle}"):
    os._exit(3)
if cycle == "0" and not os.path.exists(f"{folder}/well0"):
    raise ValueError("a fault while the disk stands still")
open(f"{folder}/trained", "w").close()
"""
PROGRAM = """
import sys
from ft_launcher import LaunchConfig, launch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

disk, script, folder = sys.argv[1:]
more = {}
if disk:
    logs = DefaultLogsSpecs(log_dir=f"{disk}/logs", redirects=Std.ALL)
    more = {"logs_specs": logs, "journal_dir": f"{disk}/j", "nvrx_logfile": f"{disk}/log"}
config = LaunchConfig(nproc_per_node=1, max_restarts=0, preemption_grace=5, workers_stop_timeout=5, **more)
try:
    launch(script, config)(folder)
    print("launch returned", flush=True)
except BaseException as error:
    print("launch raised", type(error).__name__, getattr(error, "exit_code", None), flush=True)
print("the program goes on", flush=True)
"""


@dataclass(frozen=True)
class Stall:
    """How the file system stops answering, by the signals of `stalled_disk.py`."""

    name: str
    begins: int
    ends: int


QUEUED = Stall("queued", signal.SIGTSTP, signal.SIGCONT)
SERVED = Stall("served", signal.SIGUSR1, signal.SIGUSR2)


class StalledJob:
    """A launcher whose options may name folders in `disk`."""

    def __init__(self, folder: Path, *options: str, program: str = "-m ft_launcher", **environ: str) -> None:
        self.folder, self.disk = folder, folder / "disk"
        (folder / "train.py").write_text(SCRIPT)
        (folder / "program.py").write_text(PROGRAM)
        self.disk.mkdir()
        self.launcher: subprocess.Popen[bytes] | None = None
        serve = ["unshare", "--mount", sys.executable, "-m", "tests.stalled_disk", str(self.disk)]
        with (folder / "server").open("w") as out:
            self.server = subprocess.Popen(serve, stdout=out, stderr=out, cwd=ROOT)
        try:
            self._start(options, program, environ)
        except BaseException:
            self.close()
            raise

    def _start(self, options: Sequence[str], program: str, environ: Mapping[str, str]) -> None:
        folder = self.folder
        self.wait(lambda: "mounted" in (folder / "server").read_text(), "a mount")
        # The server does not know FUSE_FLUSH, as the kernel finds out at the first close, and never asks again: for an
        # answer to it a process waits that SIGKILL has ended.
        Path(f"/proc/{self.server.pid}/root{self.disk}/probe").write_text("")
        words = [option.format(disk=self.disk) for option in options]
        # Not a child of the launcher, which ends its children.
        within = ["nsenter", f"--mount=/proc/{self.server.pid}/ns/mnt", f"--wd={folder}", sys.executable]
        more = {name: value.format(disk=self.disk) for name, value in environ.items()}
        with (folder / "out").open("w") as out:
            command = [*within, *program.split(), *words, "train.py", str(folder)]
            self.launcher = subprocess.Popen(
                command, stdout=out, stderr=out, env=os.environ | {"PYTHONPATH": str(ROOT)} | more
            )
        self.wait((folder / "began0").exists, "the first cycle")

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The launcher."""
        assert self.launcher is not None
        return self.launcher

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Waits for a condition."""
        until(condition, lambda: f"{what}\n{self.out}", 60)

    @property
    def out(self) -> str:
        """What was printed."""
        file = self.folder / "out"
        return file.read_text() if file.exists() else ""

    def go(self, cycle: int) -> None:
        """Lets the ranks of a cycle go on."""
        (self.folder / f"go{cycle}").touch()

    def begin(self, stall: Stall) -> None:
        """From now on the file system does not answer."""
        self.server.send_signal(stall.begins)
        if stall is QUEUED:
            self.wait(lambda: _state(self.server.pid) == "T", "the stop of the server")

    def end(self, stall: Stall) -> None:
        """It answers again."""
        self.server.send_signal(stall.ends)

    def events(self) -> list[str]:
        """The journal, on the disk."""
        folder = Path(f"/proc/{self.server.pid}/root{self.disk}/j")
        (journal,) = folder.glob("journal.*.jsonl")
        return [json.loads(line)["event"] for line in journal.read_text().splitlines()]

    def close(self) -> None:
        """Ends what is left."""
        for process in (self.server, self.launcher):
            if process is not None:
                process.kill()
                process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., StalledJob]]:
    jobs: list[StalledJob] = []

    def begin(*options: str, program: str = "-m ft_launcher", **environ: str) -> StalledJob:
        jobs.append(StalledJob(tmp_path, *options, program=program, **environ))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


@pytest.mark.parametrize("stall", [QUEUED, SERVED], ids=lambda stall: stall.name)
def test_restarts_go_on_without_the_journal(start: Callable[..., StalledJob], stall: Stall) -> None:
    job = start("--ft-journal-dir={disk}/j", "--max-restarts=1", "--nproc-per-node=1")
    job.wait(lambda: "cycle_start" in job.events(), "a journal")
    job.begin(stall)
    job.go(0)
    job.wait((job.folder / "began1").exists, "the restart")
    job.wait(lambda: "does not answer: the training goes on" in job.out, "a word about the disk")
    job.end(stall)
    job.wait(lambda: "answers again" in job.out, "a word about the disk")
    job.wait(lambda: job.events().count("cycle_start") == 2, "the lines that were held")
    job.go(1)
    assert job.process.wait(LIMIT_S) == 0, job.out
    assert (job.folder / "trained").exists()
    events = job.events()
    assert (events.count("fault"), events.count("decision"), events[-1]) == (1, 1, "job_end")


@pytest.mark.parametrize("stall", [QUEUED, SERVED], ids=lambda stall: stall.name)
def test_restarts_go_on_without_the_log_folder(start: Callable[..., StalledJob], stall: Stall) -> None:
    """The agent looks there for the error of the rank, and the health checks for room: neither holds it up for long."""
    job = start("--log-dir={disk}/logs", "--max-restarts=1", "--nproc-per-node=1", "--ft-health-timeout=2")
    (job.folder / "silent0").touch()
    job.begin(stall)
    job.go(0)
    job.wait((job.folder / "began1").exists, "the restart")
    job.end(stall)
    job.go(1)
    assert job.process.wait(LIMIT_S) == 0, job.out
    assert (job.folder / "trained").exists()


@pytest.mark.parametrize("stall", [QUEUED, SERVED], ids=lambda stall: stall.name)
@pytest.mark.parametrize(
    "options", [("--ft-journal-dir={disk}/j",), ("--log-dir={disk}/logs", "--ft-nvrx-logfile={disk}/log")]
)
def test_sigterm_ends_the_launcher(start: Callable[..., StalledJob], stall: Stall, options: tuple[str, ...]) -> None:
    job = start(*options, "--nproc-per-node=1", "--ft-preemption-grace=5", "--workers-stop-timeout=5")
    job.begin(stall)
    job.process.terminate()
    if stall is SERVED:
        # A thread in the kernel, which only the answer ends, keeps the process; all the rest is over.
        job.wait(lambda: _state(job.process.pid) in ("Z", ""), "the end of the launcher")
        job.end(stall)
    assert job.process.wait(LIMIT_S) == 86, job.out


@pytest.mark.parametrize("stall", [QUEUED, SERVED], ids=lambda stall: stall.name)
def test_sigterm_ends_the_launcher_whose_temporary_folder_stalls(
    start: Callable[..., StalledJob], stall: Stall
) -> None:
    job = start("--nproc-per-node=1", "--ft-preemption-grace=5", "--workers-stop-timeout=5", TMPDIR="{disk}")
    assert len(list(Path(f"/proc/{job.server.pid}/root{job.disk}").iterdir())) > 1, "the launcher has its files there"
    job.begin(stall)
    job.process.terminate()
    if stall is SERVED:
        job.wait(lambda: _state(job.process.pid) in ("Z", ""), "the end of the launcher")
        job.end(stall)
    assert job.process.wait(LIMIT_S) in (86, 87), job.out


@pytest.mark.parametrize(
    ("stalls", "ends", "stall"),
    [
        ("logs", "told to", QUEUED),
        ("logs", "succeeds", SERVED),
        ("temporary files", "told to", SERVED),
        ("temporary files", "fails", QUEUED),
    ],
    ids=["logs-told to-queued", "logs-succeeds-served", "temporary-told to-served", "temporary-fails-queued"],
)
def test_launch_returns(start: Callable[..., StalledJob], stall: Stall, ends: str, stalls: str) -> None:
    """The user's program goes on, however the job ends."""
    if stalls == "logs":
        job = start("{disk}", program="program.py")
    else:
        job = start("", program="program.py", TMPDIR="{disk}")
    if ends == "fails":
        (job.folder / "silent0").touch()
    if ends == "succeeds":
        (job.folder / "well0").touch()
    job.begin(stall)
    if ends == "told to":
        job.process.terminate()
    else:
        job.go(0)
    job.wait(lambda: "the program goes on" in job.out, "the end of launch()")
    job.end(stall)
    assert job.process.wait(LIMIT_S) == 0, job.out
    raised = {"told to": "raised SignalException 86", "succeeds": "returned", "fails": "raised ChildFailedError 3"}
    assert f"launch {raised[ends]}" in job.out


def test_a_folder_that_stalls_costs_one_restart_its_time(start: Callable[..., StalledJob]) -> None:
    """One process waits for its answer. The launcher ends that process when the job ends."""
    job = start("--log-dir={disk}/logs", "--max-restarts=2", "--nproc-per-node=1", "--ft-health-timeout=1")
    job.begin(QUEUED)
    job.go(0)
    job.wait((job.folder / "began1").exists, "the first restart")
    waiting = _checks(job)
    assert len(waiting) == 1, waiting
    (job.folder / "silent1").touch()
    job.go(1)
    job.wait((job.folder / "began2").exists, "the second restart")
    assert _checks(job) == waiting, "nobody else has asked"
    job.go(2)
    assert job.process.wait(LIMIT_S) == 0, job.out
    job.wait(lambda: not _checks(job), "the end of the process that waits")


def _checks(job: StalledJob) -> set[int]:
    """The pids of processes that check the room on the disk of a job."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f'"work": {{"folders": ["{job.disk}' in (entry / "cmdline").read_text(errors="replace"):
                found.add(int(entry.name))
    return found


def _state(pid: int) -> str:
    """The state of the main thread of a process; empty: it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""
