"""A run under test: a batch script submitted to the cluster, until it is done or gives up, with what it left.

Submits, waits under a deadline, hurries requeued jobs, cancels. Judges nothing but that nothing is left.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.patience import patient
from tests.ports import free_port
from tests.program import ONE_TRY, clean_environment, run
from tests.slurm.cluster import SCRIPTS, marked

RANK = Path(__file__).with_name("rank.py")
_MARK = "SLURM_TEST_MARK"
_OF_A_JOB = ("SLURM_", "SBATCH_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_RANK")
_LIMIT_S = 100.0
_POLL_S = 0.2
_T = TypeVar("_T")


class Run:
    """One run of a batch script.

    Args:
        folder: everything it writes is in there.
        cluster: what leads Slurm's commands to the cluster.
        script: of scripts/slurm.
        words: what stands behind it on the command line of sbatch.
        options: of sbatch.
        environ: the settings of the batch script.
    """

    def __init__(
        self,
        folder: Path,
        cluster: Mapping[str, str],
        script: str,
        words: Sequence[str],
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self._hurried: list[list[str]] = []
        self.name = f"run-{uuid.uuid4().hex[:8]}"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        ours = {"RUN_DIR": str(folder / "run"), "SCRIPTS": str(SCRIPTS), "MASTER_PORT": str(free_port()), "PATH": path}
        clean = clean_environment(*_OF_A_JOB, OMP_NUM_THREADS="1", **ONE_TRY)
        self._environ = clean | ours | {_MARK: self.name} | dict(cluster) | dict(environ or {})
        log = folder / "log"
        command = [
            "sbatch",
            "--parsable",
            f"--job-name={self.name}",
            f"--output={log}",
            "--open-mode=append",
            "--time=30",
        ]
        self.job = self.slurm(*command, *options, str(SCRIPTS / script), *words).strip()

    def slurm(self, *command: str) -> str:
        """What a command of Slurm prints.

        Raises:
            AssertionError: it fails.
        """
        return run(command, folder=self.folder, environ=self._environ, limit_s=_LIMIT_S, check=True).stdout

    @property
    def log(self) -> str:
        """All that the attempts printed."""
        file = self.folder / "log"
        return file.read_text(errors="replace") if file.exists() else ""

    @property
    def history(self) -> list[dict[str, Any]]:
        """A line per attempt."""
        file = self.folder / "run" / "history.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def outcomes(self) -> list[str]:
        """How the attempts ended."""
        return [line["outcome"] for line in self.history]

    def said(self, word: str) -> int:
        """How often the ranks printed a word."""
        return len(re.findall(rf"^{word}\b", self.log, re.MULTILINE))

    def jobs(self) -> dict[str, str]:
        """The state of each of its jobs that Slurm still has to deal with."""
        lines = self.slurm("squeue", "--noheader", f"--name={self.name}", "--format=%i %T").splitlines()
        return dict(line.split() for line in lines)

    def until(self, condition: Callable[[], _T], what: str, limit_s: float = _LIMIT_S) -> _T:
        """Waits until something holds; a job that was requeued need not wait its two minutes meanwhile."""
        deadline = time.monotonic() + patient(limit_s)
        while not (found := condition()):
            assert time.monotonic() < deadline, (
                f"not in time: {what}; {self.jobs()}; {self.history}\n{self.log[-6000:]}"
            )
            self._hurry()
            time.sleep(_POLL_S)
        return found

    def _hurry(self) -> None:
        """Once per requeue, and not in its second: slurmd refuses credentials that are not younger than it."""
        for job, state in self.jobs().items():
            if state == "PENDING" and "Reason=BeginTime" in (shown := self.shown(job)):
                requeue = re.findall(r"JobId=\d+|Restarts=\d+", shown)
                if requeue not in self._hurried:
                    self._hurried.append(requeue)
                    self.slurm("scontrol", "update", f"JobId={job}", "StartTime=now+2seconds")

    def shown(self, job: str) -> str:
        """What Slurm shows of a job."""
        return self.slurm("scontrol", "show", "job", "-o", job)

    def ends(self, *outcomes: str) -> str:
        """Waits until Slurm has no job of it; checks outcomes, and that nothing is left. The job's state."""
        self.until(lambda: not self.jobs(), "the end of its jobs")
        assert self.outcomes == list(outcomes), f"{self.history}\n{self.log[-6000:]}"
        self.until(lambda: not self.left(), f"the end of its processes: {self.left()}")
        state = re.search(r" JobState=(\S+)", self.shown(self.job))
        assert state
        return state[1]

    def cancel(self) -> None:
        """Ends its jobs; harmless when there is none."""
        deadline = time.monotonic() + patient(_LIMIT_S)
        while jobs := self.jobs():
            assert time.monotonic() < deadline, f"cannot be cancelled: {jobs}"
            self.slurm("scancel", "--quiet", *jobs)
            time.sleep(_POLL_S)

    def left(self) -> dict[int, list[str]]:
        """Its living processes, with their commands."""
        return marked(f"{_MARK}={self.name}")
