"""The job a monitor belongs to, and its end when the launcher was killed: nothing of it may be left."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from rank_monitor.contract import env, runtime_folder
from rank_monitor.contract.sweep import kill, processes_of, sweep
from rank_monitor.log import Log

_SWEEP_S = 10.0


@dataclass(frozen=True)
class Job:
    """The tag of its processes, and the folder that goes with the launcher."""

    tag: str
    runtime_dir: str

    def end_cycle(self, cycle: int, log: Log) -> None:
        """Kills every process that the ranks of a cycle are or have started on this machine."""
        if left := sweep(self.tag, _SWEEP_S, {env.CYCLE: str(cycle)}):
            log.warning(f"Not ended {_SWEEP_S:g} s after SIGKILL: {left}")

    def end(self, log: Log) -> None:
        """Kills every process of the job on this machine and removes its runtime folder.

        Its other monitors do the same by themselves; one that was stopped is continued, so that it can.
        """
        if left := sweep(self.tag, _SWEEP_S):
            log.warning(f"Not ended {_SWEEP_S:g} s after SIGKILL: {left}")
        runtime_folder.remove(Path(self.runtime_dir))
        for pid in processes_of(self.tag, key=env.SIDECAR_OF):
            kill(pid, self.tag, signal.SIGCONT, key=env.SIDECAR_OF)
