"""Ends all processes of a monitor's job, or of one cycle, and removes its runtime folder, when the launcher was killed.

Monitors, the template and the sweeper call it.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rank_monitor.contract import env
from rank_monitor.contract.processes import runtime_folder
from rank_monitor.contract.processes.sweep import kill, processes_of, sweep
from rank_monitor.log import Log

# Only a process that waits in the kernel outlives SIGKILL; nothing here can end it sooner.
_SWEEP_S = 10.0


@dataclass(frozen=True)
class MonitoredJob:
    """The tag in the environment of the job's processes, and the runtime folder of its launcher."""

    tag: str
    runtime_dir: str

    def end_cycle(self, cycle: int, log: Log) -> None:
        """Kills the ranks of a cycle on this machine and every process they started. Blocks for up to 10 s."""
        self._sweep(log, {env.CYCLE: str(cycle)})

    def end(self, log: Log) -> None:
        """Kills every process of the job on this machine and removes its runtime folder. Blocks for up to 10 s.

        The other monitors do the same; one that was stopped is continued, so that it can.
        """
        self._sweep(log)
        runtime_folder.remove(Path(self.runtime_dir))
        for pid in processes_of(self.tag, key=env.SIDECAR_OF):
            kill(pid, self.tag, signal.SIGCONT, key=env.SIDECAR_OF)

    def _sweep(self, log: Log, also: Mapping[str, str] | None = None) -> None:
        left = sweep(self.tag, _SWEEP_S, also)
        if left:
            log.warning(f"Not ended {_SWEEP_S:g} s after SIGKILL: {left}")
